"""Memory for a state that arrives: taken, and touched, before anybody waits for it.

The first touch of a page is what costs: the system finds one and clears it, which for a state of
300 MB takes several times as long as filling it. So a newcomer has its room ready before it says
that it is.
"""

from __future__ import annotations

import mmap
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Room"]


_SLACK_BYTES = 1 << 20
"""What descriptions and padding of a state may take beside its tensors."""


class Room:
    """Bytes in pages of their own, as large as the system has them.

    They live as long as the room or any tensor that looks at them.

    Parameters
    ----------
    nbytes : int
        How many, at least one.

    Attributes
    ----------
    bytes : torch.Tensor
        One-dimensional, of uint8.
    """

    def __init__(self, nbytes: int) -> None:
        import torch

        self._pages = _pages(nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._pages.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without large pages
        self.bytes: torch.Tensor = torch.frombuffer(self._pages, dtype=torch.uint8)

    @classmethod
    def for_state(cls, nbytes: int) -> Room:
        """Return room for a state whose tensors have so many bytes, with all pages provided."""
        room = cls(nbytes + nbytes // 64 + _SLACK_BYTES)
        room.bytes.zero_()
        return room

    def piece(self, start: int, end: int) -> torch.Tensor:
        """Return some of the bytes as a tensor that knows nothing of the others."""
        import torch

        return torch.frombuffer(self._pages, dtype=torch.uint8, offset=start, count=end - start)

    def give_back(self, tensor: torch.Tensor) -> None:
        """Return the pages of a tensor that looks at these bytes; nobody reads it again."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        start = tensor.data_ptr() - self.bytes.data_ptr()
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (start + tensor.numel() * tensor.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._pages.madvise(mmap.MADV_DONTNEED, first, last - first)


def _pages(nbytes: int) -> mmap.mmap:
    """Return memory of this process alone: what a fork writes to it must not show here."""
    if sys.platform == "win32":
        return mmap.mmap(-1, nbytes)
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
