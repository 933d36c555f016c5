"""Position of another thread in Python code."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

from nbelastic.system import collector_off

Line = list[str | int]
"""``[file, line, function]``; empty if there is none."""

NOT_THE_USERS = (
    str(Path(__file__).parents[2]),
    *(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")),
    "<frozen ",
)
"""How names of files begin that are not the user's."""


# CPython 3.11 makes frame objects when they are asked for, and may collect garbage on the way. What
# that runs (a callback of `gc`, a destructor) may release the interpreter's lock. Then the other
# thread goes on, and the new object stands for memory that has been reused: the process crashes. So
# the collector is off meanwhile, as in sys._current_frames itself
# (https://github.com/python/cpython/issues/106883).
def innermost(thread: int, wanted: Callable[[CodeType], bool]) -> FrameType | None:
    """Return the innermost call in a thread whose code is `wanted`, which must decide fast."""
    with collector_off():
        frame = sys._current_frames().get(thread)
        while frame is not None and not wanted(frame.f_code):
            frame = frame.f_back
        return frame


def user_line(thread: int) -> Line:
    """Return the innermost line of user code in which a thread is.

    User code is neither in the standard library, nor in an installed package, nor in nbelastic.
    """
    frame = innermost(thread, _is_the_users)
    return [] if frame is None else [frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name]


def _is_the_users(code: CodeType) -> bool:
    return not code.co_filename.startswith(NOT_THE_USERS)
