"""Read the words of a command: a script or a module, and its arguments."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbelastic.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*)?(\.exe)?", re.IGNORECASE)
_HARMLESS = {"-u", "-B", "-s", "-E", "-I"}
"""Options of Python that do not change what a script does in a rank."""


@dataclass(frozen=True)
class ScriptCommand:
    """A script to run, as ``python`` would."""

    script: str  # absolute path; empty where a module is run
    module: str  # as for ``python -m``; empty for a script
    arguments: tuple[str, ...]
    folder: str  # absolute; goes first on ``sys.path``

    @property
    def name(self) -> str:
        """The script's name for people."""
        return os.path.basename(self.script) or self.module

    @property
    def file(self) -> str:
        """The file that runs, as far as that is known without an import."""
        if self.script:
            return self.script
        base = os.path.join(self.folder, *self.module.split("."))
        return f"{base}.py" if os.path.isfile(f"{base}.py") else os.path.join(base, "__main__.py")


def script_command(words: Sequence[str], cwd: str) -> ScriptCommand:
    """Return what a command runs; relative paths start from `cwd`.

    It is ``python train.py --epochs 3``, ``python -m package.train``, or ``train.py``.
    """
    if not words:
        raise OptionError("a command is missing: dask elastic run [OPTIONS] python train.py …")
    rest = list(words)
    if _PYTHON.fullmatch(os.path.basename(rest[0])):
        del rest[0]
        while rest and rest[0] in _HARMLESS:
            del rest[0]
        if rest and rest[0] == "-m":
            return _module(rest[1:], cwd)
    if not rest:
        raise OptionError(f"{' '.join(words)!r}: a script is missing after it")
    if rest[0].startswith("-"):
        raise OptionError(
            f"{rest[0]!r}: this option of Python cannot be used in a rank; ranks run "
            "'python SCRIPT …' and 'python -m MODULE …'"
        )
    script = os.path.normpath(os.path.join(cwd, os.path.expanduser(rest[0])))
    if not os.path.isfile(script):
        raise OptionError(f"{rest[0]!r}: there is no such script in {cwd}")
    if not os.access(script, os.R_OK):
        raise OptionError(f"{rest[0]!r}: the script cannot be read: permission denied")
    while os.path.islink(script):  # as Python does: sys.path begins with its real folder
        script = os.path.normpath(os.path.join(os.path.dirname(script), os.readlink(script)))
    if not script.endswith((".py", ".pyw")) and not _is_python(script):
        raise OptionError(
            f"{rest[0]!r}: must be a Python script; a rank loads it, and runs no other command"
        )
    return ScriptCommand(script, "", tuple(rest[1:]), os.path.dirname(script))


def _module(rest: list[str], cwd: str) -> ScriptCommand:
    if not rest or not all(part.isidentifier() for part in rest[0].split(".")):
        raise OptionError("python -m: the name of a module must follow, as in -m package.train")
    return ScriptCommand("", rest[0], tuple(rest[1:]), os.path.abspath(cwd))


def _is_python(script: str) -> bool:
    """Return whether a file without ``.py`` begins as a Python script does."""
    with open(script, "rb") as file:
        first = file.readline(200)
    return first.startswith(b"#!") and b"python" in first
