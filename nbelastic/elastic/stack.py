"""Where another thread stands.

CPython 3.11 makes the objects that stand for a thread's calls when they are asked for, and may look
for garbage on the way. Whatever that runs (a callback of ``gc``, a tensor's end) may give the
interpreter's lock away; the other thread goes on, and the new object stands for memory that holds
something else by then: the process dies of it, now or later. So nobody looks for garbage here, as
CPython itself has it in ``sys._current_frames`` (https://github.com/python/cpython/issues/106883).
"""

from __future__ import annotations

import gc
import sys
import sysconfig
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

__all__ = ["Line", "innermost", "stands_at"]

Line = list[str | int]
"""``[file, line, function]``; empty if there is none."""

_NOT_THE_USERS = (
    str(Path(__file__).parent.parent),
    *(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")),
    "<frozen ",
)


_LOCK = threading.Lock()
"""Held by who has switched the search for garbage off."""


def innermost(thread: int, wanted: Callable[[CodeType], bool]) -> FrameType | None:
    """Return the innermost call that a thread is in and that is `wanted`; None if there is none.

    Parameters
    ----------
    thread : int
        The thread's identifier.
    wanted : callable
        Is given the code of a function. Must be quick.
    """
    with _LOCK:
        searches = gc.isenabled()
        gc.disable()
        try:
            frame = sys._current_frames().get(thread)
            while frame is not None and not wanted(frame.f_code):
                frame = frame.f_back
        finally:
            if searches:
                gc.enable()
    return frame


def stands_at(thread: int) -> Line:
    """Return the innermost line of user code that a thread is in.

    That is: neither the standard library's, nor an installed package's, nor ours.

    Parameters
    ----------
    thread : int
        The thread's identifier.
    """
    frame = innermost(thread, _is_the_users)
    return [] if frame is None else [frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name]


def _is_the_users(code: CodeType) -> bool:
    return not code.co_filename.startswith(_NOT_THE_USERS)
