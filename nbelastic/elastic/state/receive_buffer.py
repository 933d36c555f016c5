"""Memory for a state that a rank receives, touched before others wait.

The first touch of a page is what costs, because the system finds a page and clears it. For a state
of 300 MB that takes several times as long as filling it.
"""

from __future__ import annotations

import mmap
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SLACK_BYTES = 1 << 20
"""Bytes that descriptions and padding of a state may take in addition to its tensors."""


class ReceiveBuffer:
    """Bytes in pages of their own, as large as the system has them.

    They live as long as the buffer or any tensor that uses them.
    """

    def __init__(self, nbytes: int) -> None:  # at least one
        import torch

        self._pages = _pages(nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._pages.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without large pages
        self.bytes: torch.Tensor = torch.frombuffer(self._pages, dtype=torch.uint8)

    @classmethod
    def for_state(cls, nbytes: int) -> ReceiveBuffer:
        """Return a buffer for a state with `nbytes` bytes of tensors; its pages are touched."""
        buffer = cls(nbytes + nbytes // 64 + _SLACK_BYTES)
        buffer.bytes.zero_()
        return buffer

    def piece(self, start: int, end: int) -> torch.Tensor:
        """Return some of the bytes as a tensor whose storage has no others."""
        import torch

        return torch.frombuffer(self._pages, dtype=torch.uint8, offset=start, count=end - start)

    def give_back(self, tensor: torch.Tensor) -> None:
        """Return the pages of a tensor to the system, if it is here; it must not be read again."""
        start = tensor.data_ptr() - self.bytes.data_ptr()
        if not hasattr(mmap, "MADV_DONTNEED") or not 0 <= start < len(self.bytes):
            return
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (start + tensor.numel() * tensor.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._pages.madvise(mmap.MADV_DONTNEED, first, last - first)


def _pages(nbytes: int) -> mmap.mmap:
    """Return private memory: the writes of a forked process must not show here."""
    if sys.platform == "win32":
        return mmap.mmap(-1, nbytes)
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
