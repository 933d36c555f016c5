"""Options of a job, in one table for ``fit``, the magics and the terminal.

``table`` has a row for each option. ``kinds`` checks values, and ``parser`` reads lines of magics
and of the terminal, and names options that are like an unknown one.
"""

from .kinds import FLAG, Kind, choice, count, shown
from .parser import LineCommand, LineOption, did_you_mean, with_hints
from .table import (
    DEFAULTS,
    LIMITS,
    OF_SCRIPTS,
    ROWS,
    TABLE,
    OptionRow,
    Options,
    call_arguments,
    changed_limits,
    check_name,
)

__all__ = [
    "DEFAULTS",
    "FLAG",
    "LIMITS",
    "OF_SCRIPTS",
    "ROWS",
    "TABLE",
    "Kind",
    "LineCommand",
    "LineOption",
    "OptionRow",
    "Options",
    "call_arguments",
    "changed_limits",
    "check_name",
    "choice",
    "count",
    "did_you_mean",
    "shown",
    "with_hints",
]
