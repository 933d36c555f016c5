"""Limit the output that waits in the scheduler for a kernel that does not read.

A kernel that is stopped, or whose cell holds its lock for minutes, reads nothing. Dask keeps all
messages for it meanwhile, and ranks may print gigabytes. So no more output is sent to it from a
certain size on, until it has read most of that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from nbelastic.messages import RankOutput

MOST_WAITING = 64_000_000
"""Bytes that may wait for a kernel, about as many as it keeps."""

FEW_WAITING = MOST_WAITING // 4
"""Bytes at which output is sent again."""


class OutputValve:
    """Lets the output of a job's ranks pass as long as its kernel reads."""

    def __init__(self) -> None:
        self._closed = False

    def take(self, message: RankOutput, waiting: int) -> RankOutput | None:
        """Return what to send to the kernel: the message, the mark of a gap, or nothing.

        So many bytes are `waiting` for the kernel.
        """
        was_closed = self._closed
        self._closed = waiting > (FEW_WAITING if was_closed else MOST_WAITING)
        if not self._closed:
            return message
        return None if was_closed else replace(message, text="", gap=True)
