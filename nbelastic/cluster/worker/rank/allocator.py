"""Settings of a rank's memory allocator.

Dask's nanny has processes return freed memory to the system from 64 KB on
(``MALLOC_TRIM_THRESHOLD_``), and glibc maps large blocks anew in any case. Then every gradient
comes from the system page by page, in each step. So a rank keeps freed memory from its first step
on. A thread's blocks of more than 64 MB always come from the system, but not the main thread's.

See https://distributed.dask.org/en/stable/worker-memory.html and ``mallopt(3)``.
"""

from __future__ import annotations

import ctypes
import os

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4

# As much as a heap of a thread can have. With so much free at the top, empty heaps stay, too.
_HEAP_BYTES = 64 << 20
_NEVER = (1 << 31) - 1

_CHOICES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


def keep_freed_memory() -> None:
    """Keep freed memory in this process for the next step, unless the user has chosen."""
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
