"""Settings of a rank's memory allocator.

Dask's nanny has processes return freed memory to the system from 64 KB on
(``MALLOC_TRIM_THRESHOLD_``), and glibc maps large blocks anew in any case. Then every gradient
comes from the system page by page, in each step. So a rank keeps freed memory from its first step
on, and a newcomer gets that of its first step before others wait for it. A thread's blocks of more
than 64 MB always come from the system, but not the main thread's.

See https://distributed.dask.org/en/stable/worker-memory.html and ``mallopt(3)``.
"""

from __future__ import annotations

import ctypes
import mmap
import os

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4

# As much as a heap of a thread can have. With so much free at the top, empty heaps stay, too.
_HEAP_BYTES = 64 << 20
_NEVER = (1 << 31) - 1

_SLACK_BYTES = 32 << 20
"""Bytes for activations, and for the buffers that libraries of matrices keep."""

_HUGE_PAGES = 14  # of madvise(2)

_CHOICES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


def keep_freed_memory(nbytes: int = 0) -> None:
    """Keep freed memory in this process for the next step, unless the user has chosen.

    Get the first `nbytes` of it now: the first touch of a page is what takes time.
    """
    if any(name in os.environ for name in _CHOICES):
        return
    try:
        libc = ctypes.CDLL(None)
        _ = libc.gnu_get_libc_version, libc.mallopt
    except (OSError, TypeError, AttributeError):
        return  # another C library
    libc.mallopt(_MMAP_MAX, 0)
    libc.mallopt(_TOP_PAD, _HEAP_BYTES)
    libc.mallopt(_TRIM_THRESHOLD, _NEVER)
    if not nbytes:
        return
    # One block, whose memory stays in one piece: smaller ones that are taken from it leave the
    # rest whole. Of many blocks freed, any may be a few bytes too short for the next tensor.
    size = nbytes + nbytes // 16 + _SLACK_BYTES
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    block = libc.malloc(size)
    if block:
        first = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (block + size - first) // mmap.PAGESIZE * mmap.PAGESIZE
        # As large as the system has them; an error says that it has none.
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _HUGE_PAGES)
        ctypes.memset(block, 0, size)
        libc.free(block)
