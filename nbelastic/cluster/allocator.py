"""Memory that training gives back and takes again, step by step.

Dask's nanny has its workers give freed memory back to the system as soon as there are 64 KB of it
(``MALLOC_TRIM_THRESHOLD_``). That also keeps glibc from learning, as it would by itself, which
sizes are taken again and again: every gradient then comes from the system page by page, in each
step. So while a rank runs, its process keeps as much as glibc would have come to keep; afterwards
it is as it was, and what is free is given back.

See https://distributed.dask.org/en/stable/worker-memory.html and the manual page ``mallopt(3)``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["steady_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)

# From what size on memory comes from the system: glibc's own default, and the most that it learns.
_FIRST_BYTES, _MOST_BYTES = 128 << 10, 32 << 20
# How much may lie free at the end of the heap: twice that, as glibc has it.
_FREE_BYTES = 2 * _MOST_BYTES


class _Steady:
    """Who counts on memory being kept; one for each process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0

    def begin(self, libc: Any) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                libc.mallopt(_MMAP_THRESHOLD, _MOST_BYTES)
                libc.mallopt(_TRIM_THRESHOLD, _FREE_BYTES)

    def end(self, libc: Any, trim_threshold: int) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                libc.mallopt(_MMAP_THRESHOLD, _FIRST_BYTES)
                libc.mallopt(_TRIM_THRESHOLD, trim_threshold)
                libc.malloc_trim(0)


_steady = _Steady()


@contextlib.contextmanager
def steady_memory() -> Iterator[None]:
    """Have this process keep freed memory for the next step, as long as any rank runs in it.

    Where nobody has told glibc to give it back, or there is no glibc, nothing is changed.
    """
    before = _given_back_from()
    libc = None if before is None else _glibc()
    if before is None or libc is None:
        yield
        return
    _steady.begin(libc)
    try:
        yield
    finally:
        _steady.end(libc, before)


def _given_back_from() -> int | None:
    """Return from how many bytes on memory is given back; None if that is not for us to change."""
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return None  # somebody has thought about it
    text = os.environ.get("MALLOC_TRIM_THRESHOLD_", "")
    return int(text) if text.isdecimal() else None


def _glibc() -> Any:
    """Return the C library if it has what is needed."""
    try:
        libc = ctypes.CDLL(None)
        _ = libc.gnu_get_libc_version, libc.mallopt, libc.malloc_trim
    except (OSError, TypeError, AttributeError):
        return None
    return libc
