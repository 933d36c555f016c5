"""Communicator over CUDA IPC, for ranks of one host.

Every rank has an exchange buffer, which all others have opened. A sum proceeds in rounds: each rank
copies its values to its own buffer, meets the others, and adds what is in all buffers in the order
of ranks. Where that would read too much, each rank adds one slice, and all copy the others' slices
after another meeting. The halves of a buffer serve rounds in turns: when a rank writes to a half
again, the meeting of the round between has shown that no peer reads it any more.

Before a meeting a rank waits, on the host, for its *own* stream. So no stream ever waits for
another process, and the death of a peer leaves none waiting.

Meetings are operations of the host's communicator, and so keep the order of the rank's calls
(:mod:`nbelastic.collectives.gpu.communicator`).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from nbelastic.collectives.buffers import slice_bounds
from nbelastic.collectives.cuda_ipc.rounds import (
    Combine,
    adding_along,
    combine_to,
    copy_in,
    copy_out,
    reducing,
    rounds,
)
from nbelastic.collectives.gpu.communicator import DeviceCommunicator
from nbelastic.collectives.gpu.device import Device, DeviceError, Memory, Unusable, as_reducible
from nbelastic.collectives.reduction_tree import Blocks
from nbelastic.collectives.transport import Capabilities, Handle, Op

if TYPE_CHECKING:
    from nbelastic.collectives.abort_signal import AbortSignal
    from nbelastic.collectives.gpu.communicator import Host
    from nbelastic.collectives.rendezvous.client import Rendezvous
    from nbelastic.collectives.transport import Nodes, Tensors

logger = logging.getLogger(__name__)

BUFFER_BYTES = 64 << 20
"""Bytes of a rank's exchange buffer. What exceeds a half of it is reduced in several rounds."""

AT_ONCE_BYTES = 4 << 20
"""Bytes of all ranks together that each rank adds by itself: a meeting takes longer."""

OPEN_LIMIT_S = 10.0
"""Limit for what a GPU has still to do when its communicator is made; see ``forming_s``."""

CLOSE_LIMIT_S = 2.0
"""The same when it is closed. Past it, memory of peers stays mapped until the process ends."""

_LINE = 128  # slices begin at multiples of so many elements

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
    device: Device, its: Rendezvous, gather: Callable[[bytes], list[bytes]]
) -> Exchange:
    """Open exchange buffers between the ranks; all call this.

    `gather` returns what every rank says; a rank that leaves after that fails no other. Raises
    :class:`Unusable` on all ranks, or on none.
    """
    own: Memory | None = None
    memories: list[Memory] = []
    problem = ""
    limit_s = min(OPEN_LIMIT_S, its.forming_s / 8)  # after a trial of NCCL
    with contextlib.ExitStack() as stack:
        try:
            device.drain(limit_s)  # of what an earlier generation has left in its stream
            own = device.allocate(BUFFER_BYTES)
            stack.callback(own.close)
        except (DeviceError, RuntimeError) as error:
            problem = str(error)
        # A rank without memory takes part, too: its peers wait for it.
        offers = gather(b"" if own is None else own.handle)
        if own is not None and all(offers):
            probes = [hashlib.blake2b(each, digest_size=_PROBE_BYTES).digest() for each in offers]
            try:
                with device.after(device.mark()):
                    mine = torch.frombuffer(bytearray(probes[its.rank]), dtype=torch.uint8)
                    own.tensor[:_PROBE_BYTES].copy_(mine)
                device.drain(limit_s)  # peers' streams do not follow this one
            except (DeviceError, RuntimeError) as error:
                problem = str(error)
            gather(b"")  # all have written before any reads
            for peer in range(its.size):
                try:
                    memory = own if peer == its.rank else device.open(offers[peer], BUFFER_BYTES)
                    memories.append(memory)
                    stack.callback(memory.close)
                    with device.after(device.mark()):
                        found = bytes(memory.tensor[:_PROBE_BYTES].cpu().tolist())
                    if found != probes[peer]:
                        raise DeviceError("it reads something else there")
                except (DeviceError, RuntimeError) as error:
                    said = f"it cannot open the memory of the GPU of rank {peer}: {error}"
                    problem = problem or said
                    break
        for rank, each in enumerate(gather(problem.encode())):
            if each:
                raise Unusable(f"rank {rank}: {each.decode(errors='replace')}")
        stack.pop_all()  # the exchange closes them from here on
        return Exchange(device, memories)


class CudaIpcCommunicator(DeviceCommunicator):
    """A communicator of ranks with an exchange on their GPUs; it owns `host` and the exchange."""

    # The executor's thread alone uses the exchange, one operation after the other in the order of
    # the rank's calls.

    name = "cuda_ipc"
    staged = ("allgather", "all_to_all")
    capabilities = Capabilities(stops_sending_on_failure=True)

    def __init__(self, host: Host, exchange: Exchange, abort_signal: AbortSignal) -> None:
        super().__init__(host, exchange.device, abort_signal)
        self._exchange = exchange

    # -- operations on devices -------------------------------------------------------------------

    def begin_allreduce(self, tensors: Tensors, op: Op) -> Handle:
        if not self._device.holds(tensors[0]):
            return super().begin_allreduce(tensors, op)
        values, op = as_reducible(tensors, op)
        what, counts = f"allreduce ({op.value})", [1] * self.size
        return self._combining(what, [values], values, counts, reducing(op), tensors)

    def begin_allreduce_tree(self, nodes: Nodes, blocks: Blocks, outputs: Tensors) -> Handle:
        if not self._device.holds(outputs[0]):
            return super().begin_allreduce_tree(nodes, blocks, outputs)
        what, counts = f"sum along the tree of {blocks.quotas}", [*map(len, blocks.covers)]
        used = [*outputs, *itertools.chain(*nodes)]
        return self._combining(what, nodes, outputs, counts, adding_along(blocks.order), used)

    def begin_broadcast(self, tensor: torch.Tensor, root: int) -> Handle:
        if not self._device.holds(tensor):
            return super().begin_broadcast(tensor, root)
        return self._on_device([tensor], lambda: self._broadcast_now(tensor, root))

    # -- in the executor's thread ----------------------------------------------------------------

    def _meet(self, what: str) -> None:
        """Wait for the own stream, then until all ranks have, in the same operation."""
        self._device.drain()
        records = self._host.allgather_bytes(what.encode())
        if len(set(records)) > 1:
            said = ", ".join(f"rank {rank}: {each.decode()}" for rank, each in enumerate(records))
            raise RuntimeError(f"ranks disagree on the operation ({said})")

    def _combining(
        self,
        what: str,
        nodes: Nodes,
        outputs: Tensors,
        counts: Sequence[int],
        combine: Combine,
        used: Tensors,
    ) -> Handle:
        """Combine the nodes of all ranks, each of which has as many as `counts` says."""
        nodes = [[tensor.detach().view(-1) for tensor in node] for node in nodes]
        outputs = [each.detach().view(-1) for each in outputs]
        dtype, rows = outputs[0].dtype, max(counts)
        what = f"{what} of {sum(each.numel() for each in outputs)} values of {dtype}"
        width = self._exchange.capacity(dtype) // rows // _LINE * _LINE

        def perform() -> None:
            pieces = [rounds(node, width) for node in nodes]
            for parts in rounds(outputs, width):
                halves = [
                    each[: rows * width].view(rows, width) for each in self._exchange.next(dtype)
                ]
                mine, count = halves[self.rank], sum(part.values.numel() for part in parts)
                for row, its in zip(mine, pieces, strict=False):
                    copy_in(row, next(its))
                self._meet(what)
                vectors = [
                    row[:count]
                    for half, filled in zip(halves, counts, strict=True)
                    for row in half[:filled]
                ]
                # Two ranks read as much of each other either way, and so save a meeting.
                if self.size == 2 or len(vectors) * vectors[0].nbytes <= AT_ONCE_BYTES:
                    combine_to(parts, vectors, combine)
                    continue
                bounds = slice_bounds(count, self.size, _LINE)
                own = slice(bounds[self.rank], bounds[self.rank + 1])
                if own.start < own.stop:
                    mine[0, own].copy_(combine([each[own] for each in vectors], None))
                self._meet(what)  # all slices are summed before any is copied
                for half, bound in zip(halves, itertools.pairwise(bounds), strict=True):
                    copy_out(half[0], *bound, parts)

        return self._on_device(used, perform)

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
            self._exchange.close()  # no stream of this rank reads peers' memory now
