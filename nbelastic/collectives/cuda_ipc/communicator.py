"""Communicator of ranks on a host, over the memory of each other's GPUs.

Every rank has an exchange buffer, which all others have opened. A sum proceeds in rounds: each rank
copies its values to its own buffer, meets the others, and adds what is in all buffers in the order
of ranks. Where that would read too much, each rank adds one slice, and all copy the others' slices
after another meeting. The halves of a buffer serve rounds in turns: when a rank writes to a half
again, the meeting of the round between has shown that no peer reads it any more.

Before a meeting a rank waits, on the host, for its *own* stream. So no stream ever waits for
another process, and the death of a peer leaves none waiting.

Meetings are operations of the shared-memory communicator, and so keep the order of the rank's calls
(:mod:`nbelastic.collectives.gpu.communicator`).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from nbelastic.collectives.gpu.communicator import DeviceCommunicator
from nbelastic.collectives.gpu.device import DeviceError
from nbelastic.collectives.reduction_tree import fold
from nbelastic.collectives.transport import Capabilities, Op

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbelastic.collectives.abort_signal import AbortSignal
    from nbelastic.collectives.communicator import Communicator, Rendezvous
    from nbelastic.collectives.gpu.communicator import Host
    from nbelastic.collectives.gpu.device import Device, Memory
    from nbelastic.collectives.reduction_tree import Blocks
    from nbelastic.collectives.transport import Handle

logger = logging.getLogger(__name__)

BUFFER_BYTES = 64 << 20
"""Bytes of a rank's exchange buffer. What exceeds a half of it is reduced in several rounds."""

AT_ONCE_BYTES = 4 << 20
"""Bytes of all ranks together that each rank adds by itself: a meeting takes longer."""

OPEN_LIMIT_S = 10.0
"""Limit for what a GPU has still to do when its communicator is made."""

CLOSE_LIMIT_S = 2.0
"""The same when it is closed. Past it, memory of peers stays mapped until the process ends."""

_LINE = 128
"""Slices begin at multiples of so many elements."""

_SMALLER = (torch.float16, torch.bfloat16)
_PROBE_BYTES = 64


class Exchange:
    """The exchange buffers of a host's ranks, in their order: the own one, and opened ones."""

    def __init__(self, device: Device, memories: Sequence[Memory]) -> None:
        self.device = device
        self._memories = list(memories)
        self._turn = 0

    def next(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the half of each rank's buffer that is next, as elements of a type."""
        self._turn = 1 - self._turn
        return [memory.tensor.view(2, -1)[self._turn].view(dtype) for memory in self._memories]

    def capacity(self, dtype: torch.dtype) -> int:
        """Return how many elements are in a half."""
        return self._memories[0].tensor.numel() // 2 // dtype.itemsize

    def close(self) -> None:
        """Close the peers' buffers, and give back the own buffer. No stream may be using any."""
        for memory in self._memories:
            memory.close()
        self._memories = []


def open_exchange(
    local: Communicator,
    device: Device,
    compare: Callable[[bytes], list[bytes]],
    ranks: Sequence[int],
) -> tuple[Exchange | None, str]:
    """Open exchange buffers between the ranks of a host; all ranks of all hosts call this.

    `local` carries handles between the host's ranks, whose numbers in the generation are `ranks`.
    `compare` returns what every rank of all hosts gives to it; a rank that leaves after that fails
    no other. The exchange is None on all ranks, or on none; the text says why, for people.
    """
    with contextlib.ExitStack() as stack:
        own: Memory | None = None
        memories: list[Memory] = []
        problem = ""
        try:
            device.drain(OPEN_LIMIT_S)  # of what an earlier generation has left in its stream
            own = device.allocate(BUFFER_BYTES)
            stack.callback(own.close)
        except (DeviceError, RuntimeError) as error:
            problem = str(error)
        offers = local.allgather_bytes(b"" if own is None else own.handle)
        if own is not None and all(offers):
            problem = _mark_own(local.rank, device, own, offers)
            local.barrier()
            problem = problem or _open_others(local.rank, device, own, offers, memories, ranks)
            for memory in memories:
                stack.callback(memory.close)
        said = compare(problem.encode()[:1000])
        problems = [each.decode(errors="replace") for each in said]
        for rank, each in enumerate(problems):
            if each:
                return None, f"rank {rank}: {each}"
        stack.pop_all()
        return Exchange(device, memories), ""


def _probe_of(offer: bytes) -> bytes:
    return hashlib.blake2b(offer, digest_size=_PROBE_BYTES).digest()


def _mark_own(rank: int, device: Device, own: Memory, offers: Sequence[bytes]) -> str:
    """Write the peers' data to the own buffer; return a failure."""
    try:
        with device.after(device.mark()):
            values = torch.frombuffer(bytearray(_probe_of(offers[rank])), dtype=torch.uint8)
            own.tensor[:_PROBE_BYTES].copy_(values)
        device.drain(OPEN_LIMIT_S)
    except (DeviceError, RuntimeError) as error:
        return str(error)
    return ""


def _open_others(
    rank: int,
    device: Device,
    own: Memory,
    offers: Sequence[bytes],
    memories: list[Memory],
    ranks: Sequence[int],
) -> str:
    """Open the buffers of all peers, and read their data; return a failure."""
    try:
        for peer, offer in enumerate(offers):
            memories.append(own if peer == rank else device.open(offer, own.tensor.numel()))
            with device.after(device.mark()):
                found = bytes(memories[-1].tensor[:_PROBE_BYTES].cpu().tolist())
            if found != _probe_of(offer):
                return f"it reads something else in the memory of the GPU of rank {ranks[peer]}"
    except (DeviceError, RuntimeError) as error:
        return f"it cannot open the memory of the GPU of rank {ranks[peer]}: {error}"
    return ""


class RoundPart(NamedTuple):
    """A piece of a tensor, and where it lies in a round."""

    values: torch.Tensor
    at: int


Combine = Callable[[Sequence[Sequence[torch.Tensor]], "torch.Tensor | None"], list[torch.Tensor]]
"""Combines the nodes of ranks, by rank, and returns what remains: one, if the ranks are all.

That is in `out`, if it is given and the result fits there.
"""

Finish = Callable[[torch.Tensor, Sequence[torch.Tensor]], None]
"""Puts the result of a slice in the first of its places, of a row each, from what remains."""


def put_total(places: torch.Tensor, sums: Sequence[torch.Tensor]) -> None:
    """Put the combined values of a host's ranks."""
    (total,) = sums
    places[0].copy_(total)


def reducing(op: Op) -> Combine:
    """Return what combines a value of each rank."""
    return lambda slices, out: [_combined([each for (each,) in slices], op, out)]


def adding_along(order: Sequence[int]) -> Combine:
    """Return what adds nodes in an order of ``reduction_tree.additions``."""

    def combine(
        slices: Sequence[Sequence[torch.Tensor]], out: torch.Tensor | None
    ) -> list[torch.Tensor]:
        remaining = sum(order)

        def add(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            nonlocal remaining
            remaining -= 1
            return torch.add(first, second, out=out if remaining == 0 else None)

        return fold([each for of_rank in slices for each in of_rank], order, add)

    return combine


class CudaIpcCommunicator(DeviceCommunicator):
    """A communicator of ranks that share a host and can read each other's GPUs.

    It owns `host`, the communicator of the same ranks, and the exchange.
    """

    name = "cuda_ipc"
    capabilities = Capabilities(coalesces=True, averages=True, stops_sending_on_failure=True)

    def __init__(
        self,
        rendezvous: Rendezvous,
        host: Host,
        exchange: Exchange,
        abort_signal: AbortSignal,
    ) -> None:
        super().__init__(rendezvous, host, exchange.device, abort_signal)
        self._exchange = exchange
        # The ranks of this host, which meet; ranks on other hosts see nothing of this one's memory.
        self._local: Communicator = host
        self._ranks: Sequence[int] = range(rendezvous.size)
        self._sums_along = True  # whether the ranks' blocks are in an order for sums along a tree

    # -- operations on devices -------------------------------------------------------------------

    def begin_allreduce(self, tensors: Sequence[torch.Tensor], op: Op) -> Handle:
        if not self._device.holds(tensors[0]):
            return super().begin_allreduce(tensors, op)
        return self._on_device(tensors, lambda: self._reduce_now(tensors, op))

    def begin_allreduce_tree(
        self,
        nodes: Sequence[Sequence[torch.Tensor]],
        blocks: Blocks,
        outputs: Sequence[torch.Tensor],
    ) -> Handle:
        if not (self._sums_along and self._device.holds(outputs[0])):
            return super().begin_allreduce_tree(nodes, blocks, outputs)
        used = [*outputs, *(each for node in nodes for each in node)]
        return self._on_device(used, lambda: self._sum_along_now(nodes, blocks, outputs))

    def begin_broadcast(self, tensor: torch.Tensor, root: int) -> Handle:
        if not self._device.holds(tensor):
            return super().begin_broadcast(tensor, root)
        return self._on_device([tensor], lambda: self._broadcast_now(tensor, root))

    # -- in the executor's thread ----------------------------------------------------------------

    def _meet(self, what: str) -> None:
        """Wait for the own stream, then until this host's ranks have, in the same operation."""
        self._device.drain()
        records = self._local.allgather_bytes(what.encode())
        if len(set(records)) > 1:
            pairs = zip(self._ranks, records, strict=True)
            said = ", ".join(f"rank {rank}: {each.decode()}" for rank, each in pairs)
            raise RuntimeError(f"ranks disagree on the operation ({said})")

    def _reduce_now(self, tensors: Sequence[torch.Tensor], op: Op) -> None:
        values, op = as_reducible(tensors, op)
        what = f"allreduce ({op.value})"
        self._exchange_rounds(what, [values], values, [1] * self.size, 1, reducing(op))

    def _sum_along_now(
        self,
        nodes: Sequence[Sequence[torch.Tensor]],
        blocks: Blocks,
        outputs: Sequence[torch.Tensor],
    ) -> None:
        counts = [len(cover) for cover in blocks.covers]
        what = f"sum along the tree of {blocks.quotas}"
        combine = adding_along(blocks.order)
        self._exchange_rounds(what, nodes, outputs, counts, max(counts), combine)

    def _exchange_rounds(
        self,
        what: str,
        nodes: Sequence[Sequence[torch.Tensor]],
        outputs: Sequence[torch.Tensor],
        counts: Sequence[int],
        rows: int,
        combine: Combine,
        finish: Finish = put_total,
    ) -> None:
        """Combine the nodes of this host's ranks, each of which has as many as `counts` says.

        There is room for `rows` nodes, the same number on all hosts: their rounds are the same.
        """
        nodes = [[tensor.detach().view(-1) for tensor in node] for node in nodes]
        outputs = [each.detach().view(-1) for each in outputs]
        dtype = outputs[0].dtype
        what = f"{what} of {sum(each.numel() for each in outputs)} values of {dtype}"
        width = self._exchange.capacity(dtype) // rows // _LINE * _LINE
        pieces = [rounds(node, width) for node in nodes]
        for parts in rounds(outputs, width):
            halves = [each[: rows * width].view(rows, width) for each in self._exchange.next(dtype)]
            mine, count = halves[self._local.rank], sum(part.values.numel() for part in parts)
            for row, its in zip(mine, pieces, strict=False):
                copy_in(row, next(its))
            self._meet(what)
            by_rank = [[*half[:nodes_of]] for half, nodes_of in zip(halves, counts, strict=True)]
            if self._each_adds_all(sum(counts) * count * dtype.itemsize):
                _combine_to(parts, by_rank, combine)
                continue
            bounds = self._bounds(count)
            low, high = bounds[self._local.rank], bounds[self._local.rank + 1]
            if low < high:
                slices = [[row[low:high] for row in of_rank] for of_rank in by_rank]
                finish(mine[:, low:high], combine(slices, None))
            self._meet(what)
            for rank, half in enumerate(halves):
                copy_out(half[0], bounds[rank], bounds[rank + 1], parts)

    def _each_adds_all(self, nbytes: int) -> bool:
        return self.size == 2 or nbytes <= AT_ONCE_BYTES

    def _bounds(self, count: int) -> list[int]:
        """Return where the slice of each of this host's ranks begins, and the end."""
        return slice_bounds(count, self.size)

    def _broadcast_now(self, tensor: torch.Tensor, root: int) -> None:
        flat = tensor.detach().view(-1).view(torch.uint8)
        for parts in rounds([flat], self._exchange.capacity(torch.uint8)):
            buffer = self._exchange.next(torch.uint8)[root]
            if self.rank == root:
                copy_in(buffer, parts)
            self._meet(f"broadcast of {flat.numel()} bytes from rank {root}")
            if self.rank != root:
                copy_out(buffer, 0, len(buffer), parts)

    # -- state -----------------------------------------------------------------------------------

    def _leave_device(self) -> None:
        # Its meetings end at once. A stream has only work of this process, but that may hang.
        try:
            if not self._executor.join(CLOSE_LIMIT_S):
                raise DeviceError(f"its GPU has not ended its work within {CLOSE_LIMIT_S:g} s")
            self._device.drain(CLOSE_LIMIT_S)
        except (DeviceError, RuntimeError) as error:
            logger.warning(
                "rank %d of generation %d: %s; memory of its peers stays open until its process "
                "ends",
                self.rank,
                self.generation,
                error,
            )
        else:
            self._exchange.close()


def rounds(tensors: Sequence[torch.Tensor], capacity: int) -> Iterator[list[RoundPart]]:
    """Yield the pieces that fit into a buffer at a time. Ranks may split values differently."""
    parts: list[RoundPart] = []
    used = 0
    for tensor in tensors:
        start = 0
        while start < tensor.numel():
            length = min(tensor.numel() - start, capacity - used)
            parts.append(RoundPart(tensor[start : start + length], used))
            start += length
            used += length
            if used == capacity:
                yield parts
                parts, used = [], 0
    if parts:
        yield parts


def slice_bounds(count: int, slices: int) -> list[int]:
    """Return where each slice begins, and the end."""
    each = -(-count // slices)
    each += -each % _LINE
    return [min(index * each, count) for index in range(slices + 1)]


def as_reducible(tensors: Sequence[torch.Tensor], op: Op) -> tuple[list[torch.Tensor], Op]:
    """Return vectors to reduce and their operator: booleans as bytes, without overflow."""
    dtype = tensors[0].dtype
    if dtype is torch.bool:  # whether any is true, or all are
        dtype = torch.uint8
        op = Op.MAX if op in (Op.SUM, Op.MAX) else Op.MIN
    return [tensor.detach().view(-1).view(dtype) for tensor in tensors], op


def _combined(
    slices: Sequence[torch.Tensor], op: Op, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Reduce slices in their order. Smaller floats are reduced as float32, and rounded once."""
    first, *rest = slices
    if first.dtype in _SMALLER:
        total, out = first.float(), None
    else:
        total = first
    for each in rest:
        # Never in place in `first`, which is a rank's buffer.
        target = total if total is not first else out
        if op in (Op.SUM, Op.AVERAGE):
            total = torch.add(total, each, out=target)
        elif op is Op.PRODUCT:
            total = torch.mul(total, each, out=target)
        elif op is Op.MIN:
            total = torch.minimum(total, each.to(total.dtype), out=target)
        else:
            total = torch.maximum(total, each.to(total.dtype), out=target)
    if op is Op.AVERAGE:
        total.div_(len(slices))
    return total


def copy_in(buffer: torch.Tensor, parts: Sequence[RoundPart]) -> None:
    """Copy pieces to where they lie in a round."""
    places = [buffer[part.at : part.at + part.values.numel()] for part in parts]
    torch._foreach_copy_(places, [part.values for part in parts])


def _combine_to(
    parts: Sequence[RoundPart], by_rank: Sequence[Sequence[torch.Tensor]], combine: Combine
) -> None:
    """Combine all values of a round, to the pieces."""
    count = sum(part.values.numel() for part in parts)
    slices = [[row[:count] for row in of_rank] for of_rank in by_rank]
    out = parts[0].values if len(parts) == 1 else None
    if out is not None and any(row.device != out.device for row in itertools.chain(*slices)):
        out = None  # it lies on another GPU of this process
    (total,) = combine(slices, out)
    if out is None or total.data_ptr() != out.data_ptr():
        copy_out(total, 0, count, parts)


def copy_out(buffer: torch.Tensor, low: int, high: int, parts: Sequence[RoundPart]) -> None:
    """Copy a slice of a buffer to its pieces."""
    places, values = [], []
    for part, at in parts:
        first, last = max(low, at), min(high, at + part.numel())
        if first < last:
            places.append(part[first - at : last - at])
            values.append(buffer[first:last])
    if places:
        torch._foreach_copy_(places, values)
