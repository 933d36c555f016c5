"""Buffer the output of a rank on its way to the scheduler.

A rank may print a million lines in a second, so many lines go in one message. A rank that is faster
than the connection waits: its pipe is not read, for a second at most each time.
"""

from __future__ import annotations

import asyncio
import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

INTERVAL = 0.1
"""Seconds that text may wait for more."""

FULL = 2**20
"""Characters that may wait, and that one message has at most."""

PATIENCE = 1.0
"""Seconds that a pipe is not read for the connection's sake, each time."""

CROWDED = 8 * FULL
"""Bytes that wait for the connection, above which nothing is added that may wait."""

PAUSE = 0.02
"""Seconds after which a crowded connection is checked again."""


class OutputBuffer:
    """Output of a rank that has not been sent.

    `waiting` returns how many bytes wait for the connection. ``pause(True)`` ends the reading of
    the rank's pipe, ``pause(False)`` continues it.
    """

    def __init__(
        self,
        send: Callable[[str], None],
        waiting: Callable[[], int],
        pause: Callable[[bool], None],
    ) -> None:
        self._send = send
        self._waiting = waiting
        self._pause = pause
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pieces: list[str] = []
        self._size = 0
        self._timer: asyncio.TimerHandle | None = None

    def write(self, data: bytes) -> None:
        """Take what the rank has printed."""
        text = self._decoder.decode(data)
        self._pieces.append(text)
        self._size += len(text)
        if self._timer is None:
            self._flush_after(INTERVAL)
        if self._size >= FULL:
            self._flush_if_free()
        if self._size >= FULL:
            self._pause(True)
            asyncio.get_running_loop().call_later(PATIENCE, self._pause, False)

    def flush(self) -> None:
        """Send what has been printed so far."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        text, self._size = "".join(self._pieces), 0
        self._pieces.clear()
        for start in range(0, len(text), FULL):
            self._send(text[start : start + FULL])
        self._pause(False)

    def _flush_after(self, delay: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay, self._flush_if_free)

    def _flush_if_free(self) -> None:
        if self._waiting() <= CROWDED:
            self.flush()
        else:
            if self._timer is not None:
                self._timer.cancel()
            self._flush_after(PAUSE)
