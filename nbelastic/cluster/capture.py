"""What ranks print, told apart by thread.

Ranks run in threads of a worker's process, so ``sys.stdout`` belongs to all of them. While any
rank runs, a router stands in for it: what a rank's thread writes goes to that rank's sink; what
other threads write goes there too if the process runs exactly one rank, else where it always went.
"""

from __future__ import annotations

import contextlib
import contextvars
import io
import os
import sys
import threading
from typing import TYPE_CHECKING, TextIO, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Sink = Callable[[str], None]

__all__ = ["captured"]

_sink: contextvars.ContextVar[Sink | None] = contextvars.ContextVar("nbelastic_sink", default=None)
_sinks: list[Sink] = []
_lock = threading.Lock()
_routers: list[tuple[str, _Router]] = []


class _Router(io.TextIOBase):
    """A text stream that writes to the sink of the calling rank."""

    def __init__(self, original: TextIO) -> None:
        self.original = original
        self._process = os.getpid()

    def write(self, text: str) -> int:
        sink = _sink.get()
        if sink is None and len(_sinks) == 1 and not _is_frameworks(threading.current_thread()):
            sink = _sinks[0]
        if sink is None or os.getpid() != self._process:
            return self.original.write(text)
        sink(text)
        return len(text)

    def flush(self) -> None:
        self.original.flush()

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"


def _is_frameworks(thread: threading.Thread) -> bool:
    """Return whether a thread was there before any rank: the event loop's, or Dask's pools."""
    return thread is threading.main_thread() or thread.name.startswith(
        ("Dask-", "IO loop", "Profile", "Event loop")
    )


@contextlib.contextmanager
def captured(sink: Sink) -> Iterator[None]:
    """Send what the calling thread prints to `sink`, for the length of a block."""
    token = _sink.set(sink)
    with _lock:
        _sinks.append(sink)
        if len(_sinks) == 1:
            for name in ("stdout", "stderr"):
                router = _Router(getattr(sys, name))
                _routers.append((name, router))
                setattr(sys, name, cast(TextIO, router))
    try:
        yield
    finally:
        with _lock:
            _sinks.remove(sink)
            if not _sinks:
                for name, router in _routers:
                    if getattr(sys, name) is router:
                        setattr(sys, name, router.original)
                _routers.clear()
        _sink.reset(token)
