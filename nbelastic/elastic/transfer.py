"""Moving state between ranks: from the one that has it to those that need it, and to nobody else.

What travels is a :class:`Parcel`. It goes along a binomial tree, in chunks that each rank passes on
while the next is still on its way, so that depth costs little. Ranks outside the tree take no part.

(For the sender to write straight into pages of the receiver's, which both map, is half the copying
and was slower: to map pages took as long as to copy them, on one processor instead of two.)

Nothing of the user's is lent to a communicator that might read it after a failure, while it is
changed: there the sender copies chunk by chunk into buffers of its own. A receiver takes everything
into one new piece of memory and returns only when all of it has arrived and been passed on. A
failure on the way leaves both as they were.
"""

from __future__ import annotations

import math
import pickle
from collections import deque
from typing import TYPE_CHECKING, Any

from nbelastic.elastic.parcel import Parcel, flatten, unflatten
from nbelastic.elastic.room import Room
from nbelastic.pickling import dumps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from nbelastic.collectives import Communicator, Handle

__all__ = ["allgather_object", "spread", "tree"]

CHUNK_BYTES = 16 << 20
"""How much is sent at a time."""

_SLOT_BYTES = 1024
_LENGTH_BYTES = 8


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
    communicator: Communicator,
    members: Sequence[int],
    parcel: Parcel | None = None,
    room: Room | None = None,
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
    room : Room, optional
        On a receiver, memory that is there for it; new memory is taken if it is too small.

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
        return _pass_on(communicator, parent, children, room)
    if parcel is None:
        raise ValueError(f"rank {communicator.rank} is to send, but has nothing")
    if children:
        _serve(communicator, children, parcel)
    return parcel


def allgather_object(communicator: Communicator, value: object) -> list[Any]:
    """Return the `value` of each rank, in their order.

    Small ones take one operation; if one is large, all ranks do a second that is large enough.
    """
    data = dumps(value)
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


# On the wire: two integers (length of the index, length of everything), then everything in chunks.


def _serve(communicator: Communicator, children: Sequence[int], parcel: Parcel) -> None:
    import torch

    length, lengths, pieces = flatten(parcel)
    total = sum(lengths)
    flight = _Flight(communicator, children)
    flight.send([torch.tensor([length, total], dtype=torch.int64)])
    buffers: list[torch.Tensor] = []
    if not communicator.lets_go:
        most = min(total, CHUNK_BYTES)
        buffers = [torch.empty(most, dtype=torch.uint8) for _ in range(_Flight.limit + 1)]
    for number, parts in enumerate(_chunks(pieces, total)):
        if buffers:
            chunk = buffers[number % len(buffers)][: sum(map(len, parts))]
            parts = [torch.cat(parts, out=chunk)]  # noqa: PLW2901
        flight.send(parts)
    flight.land()


def _pass_on(
    communicator: Communicator, parent: int, children: Sequence[int], room: Room | None
) -> Parcel:
    import torch

    flight = _Flight(communicator, children, limit=None)
    header = torch.zeros(2, dtype=torch.int64)
    communicator.receive(header, parent)
    flight.send([header])
    length, total = header.tolist()
    if room is None or len(room.bytes) < total:
        room = Room(total)
    chunks = [room.bytes[at : min(at + CHUNK_BYTES, total)] for at in range(0, total, CHUNK_BYTES)]
    arriving: deque[Handle] = deque()
    for number, chunk in enumerate(chunks):
        for later in chunks[number + len(arriving) : number + _Flight.limit]:
            arriving.append(communicator.receive_async(later, parent))
        arriving.popleft().wait()
        flight.send([chunk])
    flight.land()
    return unflatten(room.bytes, length, room)


class _Flight:
    """Chunks on their way to the same ranks, at most `limit` at a time."""

    limit = 2

    def __init__(
        self, communicator: Communicator, children: Sequence[int], limit: int | None = limit
    ) -> None:
        self._communicator = communicator
        self._children = children
        self._limit = math.inf if limit is None else limit
        self._under_way: deque[list[Handle]] = deque()

    def send(self, parts: list[torch.Tensor]) -> None:
        while len(self._under_way) >= self._limit:
            self._land_one()
        if len(parts) == 1:
            handles = [self._communicator.send_async(parts[0], to) for to in self._children]
        else:
            handles = [self._communicator.send_parts_async(parts, to) for to in self._children]
        self._under_way.append(handles)

    def land(self) -> None:
        while self._under_way:
            self._land_one()

    def _land_one(self) -> None:
        for handle in self._under_way.popleft():
            handle.wait()


def _chunks(pieces: Iterator[torch.Tensor], total: int) -> Iterator[list[torch.Tensor]]:
    """Yield everything in chunks: for each, the parts of pieces that it consists of."""
    piece = next(pieces)
    for start in range(0, total, CHUNK_BYTES):
        left = min(CHUNK_BYTES, total - start)
        parts: list[torch.Tensor] = []
        while left:
            if not len(piece):
                piece = next(pieces)
            part, piece = piece[:left], piece[left:]
            if len(part):
                parts.append(part)
                left -= len(part)
        yield parts
