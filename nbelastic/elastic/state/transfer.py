"""Transfer of state from its holder to the ranks without it.

A :class:`StatePayload` travels along a binomial tree, in chunks that a rank passes on while it
receives the next one, so that depth costs little. Ranks outside the tree take no part.

The sender copies chunk by chunk into buffers of its own where a communicator might read memory
after a failure. A receiver takes everything into new memory, and returns when all of it has arrived
and been passed on. A failure on the way leaves both as they were.

Tensors on a device that the communicator is at home on are broadcast there, in which all ranks of a
generation take part, unless a receiver lacks the memory.
"""

# Writing straight into pages of the receiver's memory, mapped by both, halves the copying and was
# slower: mapping pages took as long as copying them, on one processor instead of two.

from __future__ import annotations

import itertools
import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbelastic.elastic.state.state_payload import ReceiveBuffer, StatePayload, flatten, unflatten
from nbelastic.pickling import dumps

if TYPE_CHECKING:
    import torch

    from nbelastic.collectives import Communicator, Handle

CHUNK_BYTES = 16 << 20  # how much is sent at a time

DEVICE_CHUNK_BYTES = 64 << 20
"""How much is broadcast at a time between devices; a rank that needs none of it has so much."""

_AHEAD = 2  # chunks under way at a time

_SLOT_BYTES = 1024
_LENGTH_BYTES = 8


def tree(members: Sequence[int], rank: int) -> tuple[int | None, list[int]]:
    """Return the rank that `rank` receives from, None for the root, and its children."""
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
    payload: StatePayload | None = None,
    buffer: ReceiveBuffer | None = None,
) -> StatePayload:
    """Send the payload of ``members[0]`` to all `members`; only they call this."""
    parent, children = tree(members, communicator.rank)
    if parent is not None:
        return _pass_on(communicator, parent, children, buffer)
    assert payload is not None
    if children:
        _serve(communicator, children, payload)
    return payload


def spread_everywhere(
    communicator: Communicator,
    members: Sequence[int],
    payload: StatePayload | None = None,
    buffer: ReceiveBuffer | None = None,
) -> StatePayload | None:
    """Spread a payload, tensors on their devices; all ranks call this, others return None."""
    import torch

    devices = communicator.capabilities.devices
    rank, root = communicator.rank, members[0]
    if not devices:
        return spread(communicator, members, payload, buffer) if rank in members else None
    there: list[torch.Tensor] = []
    places: list[int] = []
    row, shapes, full = payload, [], False
    if payload is not None:
        row, places, there = _without(payload, devices)
    if rank in members:
        row = spread(communicator, members, row, buffer)
        if rank != root:
            head, places, shapes = pickle.loads(row.head)
            row = replace(row, head=head)
    total = sum(each.nbytes for each in there)
    try:
        chunk = _empty((DEVICE_CHUNK_BYTES,), torch.uint8, next(iter(devices)))
        there += [_empty(*each) for each in shapes]
    except RuntimeError:  # torch's error for a device without memory is one
        full = True
    said = communicator.allgather_bytes(bytes([full]) + total.to_bytes(8, "little"))
    if any(each[0] for each in said):
        if rank in members:
            there = list(spread(communicator, members, StatePayload(b"", there)).tensors)
    else:
        _broadcast_there(communicator, root, there, int.from_bytes(said[root][1:], "little"), chunk)
    if row is None or payload is not None:
        return payload
    tensors = list(row.tensors)
    for place, tensor in zip(places, there, strict=True):
        tensors[place] = tensor
    return replace(row, tensors=tensors)


def allgather_object(communicator: Communicator, value: object) -> list[Any]:
    """Return the `value` of each rank, in their order."""
    data = dumps(value)
    space = _SLOT_BYTES - _LENGTH_BYTES
    slot = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:space]
    slots = communicator.allgather_bytes(slot.ljust(_SLOT_BYTES, b"\0"))
    lengths = [int.from_bytes(each[:_LENGTH_BYTES], "little") for each in slots]
    contents = [each[_LENGTH_BYTES:] for each in slots]
    if max(lengths) > space:
        contents = communicator.allgather_bytes(data.ljust(max(lengths), b"\0"))
    return [pickle.loads(each[:n]) for each, n in zip(contents, lengths, strict=True)]


# On the wire: two integers (length of the index, length of everything), then everything in chunks.


def _serve(communicator: Communicator, children: Sequence[int], payload: StatePayload) -> None:
    import torch

    length, total, pieces = flatten(payload)
    sends = _Sends(communicator, children)
    sends.send([torch.tensor([length, total], dtype=torch.int64)])
    buffers: list[torch.Tensor] = []
    if not communicator.capabilities.stops_sending_on_failure:
        most = min(total, CHUNK_BYTES)
        buffers = [torch.empty(most, dtype=torch.uint8) for _ in range(_AHEAD + 1)]
    for number, parts in enumerate(_chunks(pieces, total, CHUNK_BYTES)):
        if buffers:
            chunk = buffers[number % len(buffers)][: sum(map(len, parts))]
            parts = [torch.cat(parts, out=chunk)]  # noqa: PLW2901
        sends.wait(_AHEAD - 1)
        sends.send(parts)
    sends.wait()


def _pass_on(
    communicator: Communicator, parent: int, children: Sequence[int], buffer: ReceiveBuffer | None
) -> StatePayload:
    import torch

    sends = _Sends(communicator, children)
    header = torch.zeros(2, dtype=torch.int64)
    communicator.receive(header, parent)
    sends.send([header])
    length, total = header.tolist()
    if buffer is None or len(buffer.bytes) < total:
        buffer = ReceiveBuffer(total)
    starts = range(0, total, CHUNK_BYTES)
    chunks = [buffer.bytes[at : min(at + CHUNK_BYTES, total)] for at in starts]
    arriving: deque[Handle] = deque()
    for number, chunk in enumerate(chunks):
        for later in chunks[number + len(arriving) : number + _AHEAD]:
            arriving.append(communicator.receive_async(later, parent))
        arriving.popleft().wait()
        sends.send([chunk])
    sends.wait()
    return unflatten(buffer, length)


# Between devices: in the row, a tensor's place is empty, and the head says what belongs there.


def _without(
    payload: StatePayload, devices: frozenset[str]
) -> tuple[StatePayload, list[int], list[torch.Tensor]]:
    """Return a payload without its tensors on devices, their places, and these."""
    import torch

    tensors = list(payload.tensors)
    kinds = list(payload.devices) or [each.device.type for each in tensors]
    places = [n for n, each in enumerate(tensors) if each.device.type in devices and each.numel()]
    there = [tensors[n].detach().resolve_conj().contiguous() for n in places]
    shapes = [(tuple(each.shape), each.dtype, each.device.type) for each in there]
    for place in places:
        tensors[place] = torch.empty(0)
    head = pickle.dumps((payload.head, places, shapes))
    return replace(payload, head=head, tensors=tensors, devices=kinds), places, there


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    import torch

    return torch.empty(shape, dtype=dtype, device=device)


def _broadcast_there(
    communicator: Communicator,
    root: int,
    tensors: Sequence[torch.Tensor],
    total: int,
    chunk: torch.Tensor,
) -> None:
    """Fill tensors from the root's, by way of a chunk; ranks outside the tree have no tensors."""
    import torch

    rows = [each.view(-1).view(torch.uint8) for each in tensors]
    pieces = _chunks(iter(rows), total, len(chunk)) if rows else itertools.repeat([])
    for start, parts in zip(range(0, total, len(chunk)), pieces, strict=False):
        part = chunk[: min(len(chunk), total - start)]
        places = torch.split(part, [len(each) for each in parts]) if parts else ()
        if communicator.rank == root:
            torch._foreach_copy_(places, parts)
            communicator.broadcast(part, root)
        else:
            communicator.broadcast(part, root)
            if parts:
                torch._foreach_copy_(parts, places)


class _Sends:
    """Sends of chunks to the same ranks."""

    def __init__(self, communicator: Communicator, children: Sequence[int]) -> None:
        self._communicator = communicator
        self._children = children
        self._pending: deque[list[Handle]] = deque()

    def send(self, parts: list[torch.Tensor]) -> None:
        sends = [self._communicator.send_parts_async(parts, to) for to in self._children]
        self._pending.append(sends)

    def wait(self, left: int = 0) -> None:
        """Wait until so many chunks are under way."""
        while len(self._pending) > left:
            for handle in self._pending.popleft():
                handle.wait()


def _chunks(pieces: Iterator[torch.Tensor], total: int, size: int) -> Iterator[list[torch.Tensor]]:
    """Yield the parts of pieces that each chunk consists of."""
    piece = next(pieces)
    for start in range(0, total, size):
        left = min(size, total - start)
        parts: list[torch.Tensor] = []
        while left:
            if not len(piece):
                piece = next(pieces)
            part, piece = piece[:left], piece[left:]
            if len(part):
                parts.append(part)
                left -= len(part)
        yield parts
