"""Doing something again and again in an event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Every"]


class Every:
    """Calls a function at regular intervals, in the event loop of whoever starts it.

    It takes time from that loop and from nowhere else. A call that comes late shifts those after
    it; none is made up for.

    Parameters
    ----------
    seconds : float
        From one call to the next.
    function : callable
        What to call, without arguments.
    """

    def __init__(self, seconds: float, function: Callable[[], None]) -> None:
        self._seconds = seconds
        self._function = function
        self._next: asyncio.TimerHandle | None = None

    @property
    def running(self) -> bool:
        """Whether there is a next call."""
        return self._next is not None

    def start(self) -> None:
        """Have the first call made after one interval. Does nothing if started already."""
        if self._next is None:
            self._await_next()

    def stop(self) -> None:
        """Make no more calls. To be called in the same loop."""
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _await_next(self) -> None:
        self._next = asyncio.get_running_loop().call_later(self._seconds, self._call)

    def _call(self) -> None:
        self._await_next()
        self._function()
