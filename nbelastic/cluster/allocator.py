"""Memory that training gives back and takes again, step by step.

Dask's nanny has its workers give freed memory back to the system as soon as there are 64 KB of it
(``MALLOC_TRIM_THRESHOLD_``), and glibc takes large blocks from the system in any case: every
gradient then comes from there page by page, in each step. So while a rank trains, its process keeps
what it has had; afterwards it is as it was, and what is free is given back. (A thread's blocks of
more than 64 MB always come from the system.)

A thread's other blocks lie in *heaps* of 64 MB. Where in them, differs from step to step, so now
and then a step comes to pages that none before it had: it took 10 to 40 ms longer for a block of
12 MB. A newcomer, for whom others wait, has all pages of its heaps before it is counted.

See https://distributed.dask.org/en/stable/worker-memory.html, and the manual pages ``mallopt(3)``
and ``madvise(2)`` (``MADV_POPULATE_WRITE``, since Linux 5.14).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["fill_heaps", "steady_memory"]

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4

# How many blocks may come from the system by themselves, and how much glibc asks for in advance:
# its own defaults.
_MMAPS, _PAD_BYTES = 65536, 128 << 10
# As much as one of the heaps of a thread can have, which begins at a multiple of it. (As what is to
# be free at the top, it has those that have become empty stay, too.)
_HEAP_BYTES = 64 << 20
# Less than this is not worth a look, more than that is in no heap.
_LEAST, _MOST = 1 << 20, _HEAP_BYTES - (1 << 20)
_POPULATE_WRITE = 23
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

    @property
    def lasts(self) -> bool:
        """Whether memory is being kept."""
        return self._users > 0


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


def fill_heaps(blocks: Sequence[tuple[int, int]]) -> None:
    """Have the system provide all pages of the heaps in which blocks have been.

    Parameters
    ----------
    blocks : sequence of (int, int)
        Addresses and sizes in bytes of memory that threads of this process have had from ``malloc``
        since memory is kept. Where it is not, nothing is done.
    """
    libc = _glibc() if _steady.lasts else None
    if libc is None:
        return
    addresses = {address for address, nbytes in blocks if _LEAST <= nbytes <= _MOST}
    for start, end in _parts_of_heaps(addresses):
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _POPULATE_WRITE)


def _parts_of_heaps(addresses: set[int]) -> set[tuple[int, int]]:
    """Return from where to where there is memory in the heaps that addresses are in."""
    parts = set()
    for start, end in _anonymous_memory():
        for address in addresses:
            if start <= address < end:
                heap = address // _HEAP_BYTES * _HEAP_BYTES
                parts.add((max(start, heap), min(end, heap + _HEAP_BYTES)))
    return parts


def _anonymous_memory() -> Iterator[tuple[int, int]]:
    """Yield from where to where there is memory that has no name and is this process's alone."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return  # nobody tells
    for line in lines:
        where, rights, *others = line.split()
        if rights == "rw-p" and others[2:] == ["0"]:
            start, end = where.split("-")
            yield int(start, 16), int(end, 16)


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
