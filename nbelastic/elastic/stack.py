"""Where a thread stands in its user's code."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["Line", "stands_at"]

Line = list[str | int]
"""``[file, line, function]``; empty if there is none."""

_NOT_THE_USERS = (
    str(Path(__file__).parent.parent),
    *(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")),
    "<frozen ",
)


def stands_at(thread: int) -> Line:
    """Return the innermost line of user code that a thread is in.

    That is: neither the standard library's, nor an installed package's, nor ours.

    Parameters
    ----------
    thread : int
        The thread's identifier.
    """
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            return [frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name]
        frame = frame.f_back
    return []
