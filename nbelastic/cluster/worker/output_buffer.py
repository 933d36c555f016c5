"""Buffer the output of ranks on its way to the scheduler.

Runs in a worker: the threads of ranks write, its event loop sends. A rank may print a million lines
in a second. A call into the loop for each of them costs thirty times as much: the loop would be
busy for a minute, send no heartbeats, and the rank would count as frozen. So one call sends many
lines. A thread that is faster than the connection waits for it, for a second at most each time.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    Key = tuple[str, int]

__all__ = ["OutputBuffer"]

INTERVAL = 0.1
"""Seconds that text may wait for more."""

FULL = 2**20
"""Characters that may wait of a rank, and that one message has at most."""

PIECE = 50
"""Characters that each piece counts in addition to its own."""

PATIENCE = 1.0
"""Seconds that a thread waits for the connection, for each piece."""

CROWDED = 8 * FULL
"""Bytes that wait for the connection, above which nothing is added that may wait."""

PAUSE = 0.02
"""Seconds after which a crowded connection is checked again."""


class Loop(Protocol):
    """Methods of tornado's event loop that are used here."""

    def add_callback(self, callback: Callable[..., object], *args: object) -> object:
        """Have something called in the loop; from any thread."""

    def call_later(self, delay: float, callback: Callable[..., object], *args: object) -> object:
        """Have something called in the loop after some seconds; from its own thread."""


class OutputBuffer:
    """Collects the output of ranks and sends it from the event loop.

    Parameters
    ----------
    loop : tornado.ioloop.IOLoop
        The loop in which `send` is called.
    send : callable
        ``send(key, text)`` sends text that a rank has printed.
    waiting : callable
        Returns how many bytes wait for the connection.
    """

    def __init__(
        self, loop: Loop, send: Callable[[Key, str], None], waiting: Callable[[], int]
    ) -> None:
        self._loop = loop
        self._send = send
        self._waiting = waiting
        self._changed = threading.Condition()
        self._pieces: dict[Key, list[str]] = {}
        self._sizes: dict[Key, int] = {}

    def write(self, key: Key, text: str) -> None:
        """Take a text of a rank. Called in its threads, never in the loop's."""
        with self._changed:
            pieces = self._pieces.setdefault(key, [])
            pieces.append(text)
            self._sizes[key] = size = self._sizes.get(key, 0) + len(text) + PIECE
            if len(pieces) == 1:
                self._loop.add_callback(self._flush_later, INTERVAL, key)
            if size > FULL:
                self._loop.add_callback(self._flush_if_free, key)
                self._changed.wait_for(lambda: self._sizes.get(key, 0) < FULL, PATIENCE)

    def flush(self, key: Key) -> None:
        """Send what has been printed so far. Called in the loop."""
        with self._changed:
            pieces = self._pieces.pop(key, ())
            self._sizes.pop(key, None)
            self._changed.notify_all()
        text = "".join(pieces)
        for start in range(0, len(text), FULL):
            self._send(key, text[start : start + FULL])

    def _flush_later(self, delay: float, key: Key) -> None:
        self._loop.call_later(delay, self._flush_if_free, key)

    def _flush_if_free(self, key: Key) -> None:
        if self._waiting() > CROWDED:
            self._flush_later(PAUSE, key)
        else:
            self.flush(key)
