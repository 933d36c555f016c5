"""Settings of a worker's memory allocator while one of its threads is a rank.

Dask's nanny has its workers return freed memory to the system from 64 KB on
(``MALLOC_TRIM_THRESHOLD_``), and glibc maps large blocks anew in any case. Then every gradient
comes from the system page by page, in each step. So the process keeps freed memory while a rank
trains. Afterwards the settings are as before, and free memory is returned. A thread's blocks of
more than 64 MB always come from the system.

See https://distributed.dask.org/en/stable/worker-memory.html and ``mallopt(3)``.
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

# glibc's defaults: blocks that are mapped by themselves, and bytes that it asks for in advance.
_MMAPS, _PAD_BYTES = 65536, 128 << 10
# As much as a heap of a thread can have. With so much free at the top, empty heaps stay, too.
_HEAP_BYTES = 64 << 20
_NEVER = (1 << 31) - 1

_CHOICES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


class _Steady:
    """Count of the ranks that train in this process: the first sets, the last one resets."""

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

    Does nothing without glibc, or where the environment does not have glibc return memory.
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
    """Return from how many bytes on memory is returned; None if that is not ours to change."""
    if any(name in os.environ for name in _CHOICES):
        return None  # the user has chosen
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
