"""Time as a driver may count it."""

from __future__ import annotations

import time

__all__ = ["LiveClock"]


class LiveClock:
    """A clock that stands still while its owner could not listen.

    A laptop sleeps, a cell holds the interpreter for a minute: afterwards many messages wait to be
    read, and no deadline may pass before they are. So between two looks at the clock at most
    `most` seconds count, and its owner looks more often than that while it listens.
    """

    def __init__(self, most: float = 2.0) -> None:
        self._most = most
        self._last = time.monotonic()
        self._now = 0.0

    def now(self) -> float:
        """Return seconds since the clock was made, pauses left out."""
        last, self._last = self._last, time.monotonic()
        self._now += min(self._last - last, self._most)
        return self._now
