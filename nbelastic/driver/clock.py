"""Time as a driver may count it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def steady_time() -> float:
    """Return seconds on a clock that is never set, and that goes on while a laptop sleeps."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)  # Linux; there, time.monotonic stands still
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class LiveClock:
    """A clock that stands still while its owner could not listen.

    A laptop sleeps, a cell holds the interpreter for a minute: afterwards many messages wait to be
    read, and no deadline may pass before they are. So between two looks at the clock at most
    `most` seconds count, and its owner looks more often than that while it listens.
    """

    def __init__(self, most: float = 2.0, source: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._source = source
        self._last = source()
        self._now = 0.0

    def set(self, now: float) -> None:
        """Make the clock show `now`."""
        self._last, self._now = self._source(), now

    def now(self) -> float:
        """Return seconds since the clock was made, pauses left out."""
        last, self._last = self._last, self._source()
        self._now += min(self._last - last, self._most)
        return self._now
