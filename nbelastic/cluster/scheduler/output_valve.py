"""Limit the output that waits in the scheduler for a kernel that does not read.

Runs in the scheduler, in its event loop. A kernel that is stopped, or whose cell holds its lock for
minutes, reads nothing. Dask keeps all messages for it meanwhile, and ranks may print gigabytes. So
no more output is sent to it from a certain size on, until it reads again.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbelastic.cluster.wire import RankOutput

__all__ = ["OutputValve"]

MOST_WAITING = 64_000_000
"""Characters that may wait for a kernel, about as many as it keeps."""


class OutputValve:
    """Lets the output of a job's ranks pass as long as its kernel reads."""

    def __init__(self) -> None:
        self._batches: int | None = None
        self._waiting = 0
        self._closed = False

    def take(self, message: RankOutput, batches: int | None) -> RankOutput | None:
        """Return what to send to the kernel: the message, or the mark of a gap, or nothing.

        Parameters
        ----------
        message : RankOutput
            Output of a rank.
        batches : int or None
            How many batches of messages the kernel's stream has begun to write. It begins a batch
            when the one before is written. None if that is not known: then everything passes.
        """
        if batches is None:
            return message
        if batches != self._batches:
            self._batches, self._waiting, self._closed = batches, 0, False
        if self._closed:
            return None
        self._waiting += len(message.text)
        if self._waiting <= MOST_WAITING:
            return message
        self._closed = True
        return dataclasses.replace(message, text="", gap=True)
