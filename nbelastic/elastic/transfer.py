"""Moving state between ranks: from the one that has it to those that need it, and to nobody else.

What travels is a :class:`Parcel`. It goes along a binomial tree, in chunks that each rank passes on
while the next is still on its way, so that depth costs little. Ranks outside the tree take no part.

Nothing of the user's is ever lent to a communicator: the sender copies chunk by chunk into buffers
of its own, a receiver takes everything into one new buffer and returns only when all of it has
arrived and been passed on. A failure on the way leaves both as they were.
"""

from __future__ import annotations

import math
import pickle
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch

    from nbelastic.collectives import Communicator, Handle

__all__ = ["Parcel", "allgather_object", "flatten", "spread", "tree", "unflatten"]

CHUNK_BYTES = 8 << 20
"""How much is sent at a time."""

_ALIGNMENT = 16
_SLOT_BYTES = 1024
_LENGTH_BYTES = 8


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
    """

    head: bytes
    tensors: Sequence[torch.Tensor] = ()
    devices: Sequence[str] = ()


def tree(members: Sequence[int], rank: int) -> tuple[int | None, list[int]]:
    """Return whom `rank` receives from and whom it passes things on to.

    Parameters
    ----------
    members : sequence of int
        The ranks of the tree, its root first.
    rank : int
        One of them.

    Returns
    -------
    parent : int or None
        None for the root.
    children : list of int
        The one with the most ranks behind it first.
    """
    position = members.index(rank)
    parent = members[position & (position - 1)] if position else None
    span = position & -position if position else 1 << len(members).bit_length()
    children = []
    while span > 1:
        span //= 2
        if position + span < len(members):
            children.append(members[position + span])
    return parent, children


def spread(
    communicator: Communicator, members: Sequence[int], parcel: Parcel | None = None
) -> Parcel:
    """Bring the parcel of ``members[0]`` to all `members`; only they call this.

    Parameters
    ----------
    communicator : Communicator
        That of the present generation.
    members : sequence of int
        The sender first, then the receivers; the same on all of them.
    parcel : Parcel, optional
        On the sender, what to send.

    Returns
    -------
    Parcel
        On receivers with tensors in memory that nobody else uses.

    Raises
    ------
    CollectiveError
        A peer is gone. Nothing has changed.
    """
    parent, children = tree(members, communicator.rank)
    if parent is not None:
        return _pass_on(communicator, parent, children)
    if parcel is None:
        raise ValueError(f"rank {communicator.rank} is to send, but has nothing")
    if children:
        _serve(communicator, children, parcel)
    return parcel


def allgather_object(communicator: Communicator, value: object) -> list[Any]:
    """Return the `value` of each rank, in their order.

    Small ones take one operation; if one is large, all ranks do a second that is large enough.
    """
    data = cloudpickle.dumps(value)
    room = _SLOT_BYTES - _LENGTH_BYTES
    slot = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:room]
    slots = _allgather_bytes(communicator, slot, _SLOT_BYTES)
    lengths = [int.from_bytes(each[:_LENGTH_BYTES], "little") for each in slots]
    contents = [each[_LENGTH_BYTES:] for each in slots]
    if max(lengths) > room:
        contents = _allgather_bytes(communicator, data, max(lengths))
    return [
        pickle.loads(content[:length]) for content, length in zip(contents, lengths, strict=True)
    ]


def _allgather_bytes(communicator: Communicator, data: bytes, length: int) -> list[bytes]:
    import torch

    mine = torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)
    outputs = [torch.empty(length, dtype=torch.uint8) for _ in range(communicator.size)]
    communicator.allgather(outputs, mine)
    return [output.numpy().tobytes() for output in outputs]


# On the wire: two integers (length of the index, length of everything), then everything: the index
# (head, shapes and types) and the tensors' bytes, each padded to where the next may start.


def flatten(parcel: Parcel) -> tuple[int, int, Iterator[torch.Tensor]]:
    """Return a parcel as bytes: the index's length, the length of all, and all, in pieces."""
    devices = parcel.devices or [tensor.device.type for tensor in parcel.tensors]
    kinds = [
        (tuple(tensor.shape), tensor.dtype, device, _nbytes(tensor))
        for tensor, device in zip(parcel.tensors, devices, strict=True)
    ]
    index = pickle.dumps((parcel.head, kinds))
    total = _padded(len(index)) + sum(_padded(kind[3]) for kind in kinds)
    return len(index), total, _pieces(index, parcel.tensors)


def unflatten(everything: torch.Tensor, length: int) -> Parcel:
    """Return the parcel that was flattened to `everything`, whose tensors go on using it."""
    import torch

    head, kinds = pickle.loads(everything[:length].numpy().tobytes())
    tensors = []
    start = _padded(length)
    for shape, dtype, _, nbytes in kinds:
        piece = everything[start : start + nbytes]
        tensors.append(piece.view(dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype))
        start += _padded(nbytes)
    return Parcel(head, tensors, [kind[2] for kind in kinds])


def _serve(communicator: Communicator, children: Sequence[int], parcel: Parcel) -> None:
    import torch

    length, total, pieces = flatten(parcel)
    header = torch.tensor([length, total], dtype=torch.int64)
    flight = _Flight(communicator, children)
    flight.send(header)
    for chunk in _chunks(pieces, total):
        flight.send(chunk)
    flight.land()


def _pass_on(communicator: Communicator, parent: int, children: Sequence[int]) -> Parcel:
    import torch

    flight = _Flight(communicator, children, limit=None)
    header = torch.zeros(2, dtype=torch.int64)
    communicator.receive(header, parent)
    flight.send(header)
    length, total = header.tolist()
    everything = torch.empty(total, dtype=torch.uint8)
    for start in range(0, total, CHUNK_BYTES):
        chunk = everything[start : start + CHUNK_BYTES]
        communicator.receive(chunk, parent)
        flight.send(chunk)
    flight.land()
    return unflatten(everything, length)


class _Flight:
    """Chunks on their way to the same ranks, at most `limit` at a time."""

    def __init__(
        self, communicator: Communicator, children: Sequence[int], limit: int | None = 2
    ) -> None:
        self._communicator = communicator
        self._children = children
        self._limit = math.inf if limit is None else limit
        self._under_way: deque[list[Handle]] = deque()

    def send(self, chunk: torch.Tensor) -> None:
        while len(self._under_way) >= self._limit:
            self._land_one()
        self._under_way.append([self._communicator.send_async(chunk, to) for to in self._children])

    def land(self) -> None:
        while self._under_way:
            self._land_one()

    def _land_one(self) -> None:
        for handle in self._under_way.popleft():
            handle.wait()


def _chunks(pieces: Iterable[torch.Tensor], total: int) -> Iterator[torch.Tensor]:
    """Yield everything, copied into new buffers of at most ``CHUNK_BYTES``."""
    import torch

    left = total
    chunk = torch.empty(min(CHUNK_BYTES, left), dtype=torch.uint8)
    filled = 0
    for piece in pieces:
        start = 0
        while start < len(piece):
            step = min(len(piece) - start, len(chunk) - filled)
            chunk[filled : filled + step] = piece[start : start + step]
            start, filled, left = start + step, filled + step, left - step
            if filled == len(chunk):
                yield chunk
                chunk = torch.empty(min(CHUNK_BYTES, left), dtype=torch.uint8)
                filled = 0


def _pieces(index: bytes, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield everything as bytes, padding included, a tensor at a time."""
    import torch

    yield torch.frombuffer(bytearray(index), dtype=torch.uint8)
    yield torch.zeros(_padded(len(index)) - len(index), dtype=torch.uint8)
    for tensor in tensors:
        nbytes = _nbytes(tensor)
        if nbytes:
            yield tensor.detach().cpu().resolve_conj().contiguous().view(-1).view(torch.uint8)
            yield torch.zeros(_padded(nbytes) - nbytes, dtype=torch.uint8)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
