"""State that ranks send to each other: tensors and a description, as bytes.

The row holds the index (description, shapes and types), then the bytes of each tensor. Padding
aligns each of these.

A newcomer touches the memory for it before others wait: the first touch of a page is what costs,
because the system finds a page and clears it. For a state of 300 MB that takes several times as
long as filling it.
"""

from __future__ import annotations

import mmap
import pickle
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64
"""A cache line, because received tensors are used in place."""

_SLACK_BYTES = 1 << 20
"""Bytes that descriptions and padding of a state may take in addition to its tensors."""


@dataclass(frozen=True)
class StatePayload:
    """A state to send, to receive or to write."""

    head: bytes  # describes the contents to the receiver
    tensors: Sequence[torch.Tensor] = ()  # dense
    devices: Sequence[str] = ()  # for each tensor the type of the sender's device
    buffer: ReceiveBuffer | None = None  # memory that the tensors were received in
    names: Sequence[str] = ()  # of the tensors in a checkpoint; empty if it is not to be written


def flatten(payload: StatePayload) -> tuple[int, list[int], Iterator[torch.Tensor]]:
    """Return a payload as bytes: the index's length, the lengths of all pieces, and the pieces."""
    devices = payload.devices or [tensor.device.type for tensor in payload.tensors]
    kinds = [
        (tuple(tensor.shape), tensor.dtype, device, tensor.nbytes)
        for tensor, device in zip(payload.tensors, devices, strict=True)
    ]
    index = pickle.dumps((payload.head, kinds))
    lengths = [each for n in (len(index), *(kind[3] for kind in kinds)) for each in (n, _gap(n))]
    return len(index), lengths, _pieces(index, payload.tensors)


def unflatten(
    everything: torch.Tensor, length: int, buffer: ReceiveBuffer | None = None
) -> StatePayload:
    """Return the payload flattened to `everything`; its tensors share that memory."""
    import torch

    head, kinds = pickle.loads(everything[:length].numpy().tobytes())
    tensors = []
    start = length + _gap(length)
    for shape, dtype, _, nbytes in kinds:
        if nbytes:
            # In a buffer each has a storage of its own, because pickling takes whole storages.
            end = start + nbytes
            piece = everything[start:end] if buffer is None else buffer.piece(start, end)
            tensors.append(piece.view(dtype).view(shape))
        else:
            tensors.append(torch.empty(shape, dtype=dtype))
        start += nbytes + _gap(nbytes)
    return StatePayload(head, tensors, [kind[2] for kind in kinds], buffer)


def _pieces(index: bytes, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield everything as bytes: alternately a part and the padding after it."""
    import torch

    padding = torch.zeros(_ALIGNMENT, dtype=torch.uint8)
    yield torch.frombuffer(bytearray(index), dtype=torch.uint8)
    yield padding[: _gap(len(index))]
    for tensor in tensors:
        if tensor.nbytes:
            yield tensor.detach().cpu().resolve_conj().contiguous().view(-1).view(torch.uint8)
        else:
            yield padding[:0]
        yield padding[: _gap(tensor.nbytes)]


def _gap(nbytes: int) -> int:
    return -nbytes % _ALIGNMENT


class ReceiveBuffer:
    """Bytes in pages of their own, as large as the system has them.

    They live as long as the buffer or any tensor that uses them.
    """

    def __init__(self, nbytes: int) -> None:  # at least one
        import torch

        # Private, because the writes of a forked process must not show here.
        private = (
            {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
        )
        self._pages = mmap.mmap(-1, nbytes, **private)
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
        """Return the pages of a tensor in this buffer to the system; its values are lost."""
        start = tensor.data_ptr() - self.bytes.data_ptr()
        if not hasattr(mmap, "MADV_DONTNEED") or not 0 <= start < len(self.bytes):
            return
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (start + tensor.numel() * tensor.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._pages.madvise(mmap.MADV_DONTNEED, first, last - first)
