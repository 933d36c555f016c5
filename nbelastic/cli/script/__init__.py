"""Scripts: from the words of a command to ``__main__`` in a rank."""

from .bundle import Bundle, ScriptCommand, bundle_of, script_command
from .rank import ScriptCall, ScriptExit, run_script

__all__ = [
    "Bundle",
    "ScriptCall",
    "ScriptCommand",
    "ScriptExit",
    "bundle_of",
    "run_script",
    "script_command",
]
