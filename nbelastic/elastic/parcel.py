"""What ranks send each other, and files keep: tensors with a description, as one row of bytes.

The row holds the index (description, shapes and types), then each tensor's bytes, all padded to
where the next may start.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from nbelastic.elastic.room import Room

__all__ = ["Parcel", "flatten", "unflatten"]

_ALIGNMENT = 64
"""A cache line: tensors are used where they have arrived."""


@dataclass(frozen=True)
class Parcel:
    """What is sent.

    Attributes
    ----------
    head : bytes
        Whatever describes the contents to the receiver.
    tensors : sequence of torch.Tensor
        Dense tensors of any shapes and types. They arrive on the CPU.
    devices : sequence of str
        For each tensor the type of the device that it came from.
    room : Room or None
        Where they have arrived.
    """

    head: bytes
    tensors: Sequence[torch.Tensor] = ()
    devices: Sequence[str] = ()
    room: Room | None = None


def flatten(parcel: Parcel) -> tuple[int, list[int], Iterator[torch.Tensor]]:
    """Return a parcel as bytes: the index's length, the lengths of all pieces, and the pieces."""
    devices = parcel.devices or [tensor.device.type for tensor in parcel.tensors]
    kinds = [
        (tuple(tensor.shape), tensor.dtype, device, _nbytes(tensor))
        for tensor, device in zip(parcel.tensors, devices, strict=True)
    ]
    index = pickle.dumps((parcel.head, kinds))
    lengths = [each for n in (len(index), *(kind[3] for kind in kinds)) for each in (n, _gap(n))]
    return len(index), lengths, _pieces(index, parcel.tensors)


def unflatten(everything: torch.Tensor, length: int, room: Room | None = None) -> Parcel:
    """Return the parcel that was flattened to `everything`, whose tensors go on using it."""
    import torch

    head, kinds = pickle.loads(everything[:length].numpy().tobytes())
    tensors = []
    start = length + _gap(length)
    for shape, dtype, _, nbytes in kinds:
        if nbytes:
            # From a room as a storage of its own: who pickles or copies one tensor takes all of it.
            end = start + nbytes
            piece = everything[start:end] if room is None else room.piece(start, end)
            tensors.append(piece.view(dtype).view(shape))
        else:
            tensors.append(torch.empty(shape, dtype=dtype))
        start += nbytes + _gap(nbytes)
    return Parcel(head, tensors, [kind[2] for kind in kinds], room)


def _pieces(index: bytes, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield everything as bytes, what comes before a gap and the gap, by turns."""
    import torch

    padding = torch.zeros(_ALIGNMENT, dtype=torch.uint8)
    yield torch.frombuffer(bytearray(index), dtype=torch.uint8)
    yield padding[: _gap(len(index))]
    for tensor in tensors:
        nbytes = _nbytes(tensor)
        if nbytes:
            yield tensor.detach().cpu().resolve_conj().contiguous().view(-1).view(torch.uint8)
        else:
            yield padding[:0]
        yield padding[: _gap(nbytes)]


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _gap(nbytes: int) -> int:
    return -nbytes % _ALIGNMENT
