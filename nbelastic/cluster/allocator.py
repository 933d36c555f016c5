"""Memory that training gives back and takes again, step by step.

Dask's nanny has its workers give freed memory back to the system as soon as there are 64 KB of it
(``MALLOC_TRIM_THRESHOLD_``), and glibc takes large blocks from the system in any case: every
gradient then comes from there page by page, in each step. So while a rank trains, its process keeps
what it has had; afterwards it is as it was, and what is free is given back. (A thread's blocks of
more than 64 MB always come from the system.)

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

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4

# How many blocks may come from the system by themselves, and how much glibc asks for in advance:
# its own defaults.
_MMAPS, _PAD_BYTES = 65536, 128 << 10
# As much as one of the heaps of a thread can have: those that have become empty stay, too.
_HEAP_BYTES = 64 << 20
_NEVER = (1 << 31) - 1

_CHOICES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


class _Steady:
    """Who counts on memory being kept; one for each process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0

    def begin(self, libc: Any) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                libc.mallopt(_MMAP_MAX, 0)
                libc.mallopt(_TOP_PAD, _HEAP_BYTES)
                libc.mallopt(_TRIM_THRESHOLD, _NEVER)

    def end(self, libc: Any, trim_threshold: int) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                libc.mallopt(_MMAP_MAX, _MMAPS)
                libc.mallopt(_TOP_PAD, _PAD_BYTES)
                libc.mallopt(_TRIM_THRESHOLD, trim_threshold)
                libc.malloc_trim(0)


_steady = _Steady()


@contextlib.contextmanager
def steady_memory() -> Iterator[None]:
    """Have this process keep freed memory for the next step, as long as any rank trains in it.

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
    if any(name in os.environ for name in _CHOICES):
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
