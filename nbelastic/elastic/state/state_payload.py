"""State that ranks send to each other: tensors and a description, as bytes.

The row holds the index (description, shapes and types), then the bytes of each tensor. Padding
aligns each of these.

A newcomer touches the memory for it before others wait: the first touch of a page is what costs,
because the system finds a page and clears it. For a state of 300 MB that takes several times as
long as filling it.
"""

from __future__ import annotations

import io
import mmap
import pickle
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbelastic.pickling import Pickler

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64  # a cache line, because received tensors are used in place

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


class _Pickler(Pickler):
    def __init__(self, file: io.BytesIO, things: Sequence[object]) -> None:
        super().__init__(file)
        self._numbers = {id(each): number for number, each in enumerate(things)}

    def persistent_id(self, obj: object) -> int | None:
        return self._numbers.get(id(obj))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, things: Sequence[object]) -> None:
        super().__init__(file)
        self._things = things

    def persistent_load(self, pid: Any) -> object:
        return self._things[pid]


def dump(value: object, things: Sequence[object]) -> bytes:
    """Return a pickled value in which `things` are numbers, for the reader's own things."""
    file = io.BytesIO()
    _Pickler(file, things).dump(value)
    return file.getvalue()


def load(data: bytes, things: Sequence[object]) -> Any:
    """Return a dumped value that refers to `things` of this process."""
    return _Unpickler(io.BytesIO(data), things).load()


def flatten(payload: StatePayload) -> tuple[int, int, Iterator[torch.Tensor]]:
    """Return the length of a payload's index, the length of all bytes, and these in pieces."""
    devices = payload.devices or [tensor.device.type for tensor in payload.tensors]
    kinds = [
        (tuple(tensor.shape), tensor.dtype, device, tensor.nbytes)
        for tensor, device in zip(payload.tensors, devices, strict=True)
    ]
    index = pickle.dumps((payload.head, kinds))
    total = sum(n + _gap(n) for n in (len(index), *(nbytes for *_, nbytes in kinds)))
    return len(index), total, _pieces(index, payload.tensors)


def unflatten(buffer: ReceiveBuffer, length: int) -> StatePayload:
    """Return the payload whose bytes are in a buffer, the index first; tensors share its memory."""
    head, kinds = pickle.loads(buffer.bytes[:length].numpy().tobytes())
    tensors = []
    start = length + _gap(length)
    for shape, dtype, _, nbytes in kinds:
        tensors.append(buffer.piece(start, nbytes).view(dtype).view(shape))
        start += nbytes + _gap(nbytes)
    return StatePayload(head, tensors, [kind[2] for kind in kinds], buffer)


def _pieces(index: bytes, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield everything as bytes: alternately a part and the padding after it."""
    import torch

    padding = torch.zeros(_ALIGNMENT, dtype=torch.uint8)
    yield torch.frombuffer(bytearray(index), dtype=torch.uint8)
    yield padding[: _gap(len(index))]
    for tensor in tensors:
        yield tensor.detach().cpu().resolve_conj().contiguous().view(-1).view(torch.uint8)
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

    def piece(self, start: int, count: int) -> torch.Tensor:
        """Return some bytes as a tensor with its own storage, because pickling takes storages."""
        import torch

        if not count:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._pages, dtype=torch.uint8, offset=start, count=count)

    def give_back(self, tensor: torch.Tensor) -> None:
        """Return the pages of a tensor in this buffer to the system; its values are lost."""
        start = tensor.data_ptr() - self.bytes.data_ptr()
        if not hasattr(mmap, "MADV_DONTNEED") or not 0 <= start < len(self.bytes):
            return
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (start + tensor.numel() * tensor.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._pages.madvise(mmap.MADV_DONTNEED, first, last - first)
