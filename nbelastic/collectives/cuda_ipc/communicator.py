"""Communicator over CUDA IPC inside hosts, and NCCL or Gloo between hosts.

Every rank has an exchange buffer, which all others have opened. A sum proceeds in rounds: each rank
copies its values to its own buffer, meets the others, and adds what is in all buffers in the order
of ranks. Where that would read too much, each rank adds one slice, and all copy the others' slices
after another meeting. The halves of a buffer serve rounds in turns: when a rank writes to a half
again, the meeting of the round between has shown that no peer reads it any more.

Before a meeting a rank waits, on the host, for its *own* stream. So no stream ever waits for
another process, and the death of a peer leaves none waiting.

On several hosts, as in :mod:`nbelastic.collectives.hierarchical`, the ranks with one slice reduce
it over the hosts, by NCCL or by Gloo from pinned memory. So all ranks of a host use the network at
once, and each byte crosses it once a host. A rank alone on its host has a buffer, too, so that all
hosts have the same rounds.

Meetings are operations of a communicator of the host's ranks, and so keep the order of the rank's
calls (:mod:`nbelastic.collectives.gpu.communicator`).
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
    Finish,
    adding_along,
    combine_to,
    copy_in,
    copy_out,
    reducing,
    rounds,
)
from nbelastic.collectives.gpu.communicator import DeviceCommunicator
from nbelastic.collectives.gpu.device import Device, DeviceError, Memory, Unusable, as_reducible
from nbelastic.collectives.reduction_tree import Blocks, additions, merged
from nbelastic.collectives.transport import Capabilities, Handle, Op

if TYPE_CHECKING:
    from nbelastic.collectives.abort_signal import AbortSignal
    from nbelastic.collectives.communicator import Communicator, Rendezvous
    from nbelastic.collectives.gpu.communicator import Host
    from nbelastic.collectives.topology import Topology
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
    device: Device,
    its: Rendezvous,
    ranks: Sequence[int],
    gather: Callable[[bytes], list[bytes]],
) -> Exchange:
    """Open exchange buffers between the `ranks` of a host; all ranks of all hosts call this.

    `gather` returns what every rank of all hosts says; a rank that leaves after that fails no
    other. Raises :class:`Unusable` on all ranks, or on none.
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
            for peer in ranks:
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
    """A communicator of ranks that can read the GPUs of their hosts' other ranks.

    It owns all its parts: `host`, of all ranks, for what is not on GPUs; the exchange; `local`, for
    the meetings of this host's ranks, which is `host` if there is one host; `across`, the ranks of
    all hosts with this rank's slice, or None if it has none.
    """

    # The executor's thread alone uses `local` and `across`, one operation after the other in the
    # order of the rank's calls. What ends one part ends all, so a failure between hosts frees the
    # ranks that meet inside them.

    capabilities = Capabilities(coalesces=True, stops_sending_on_failure=True)

    def __init__(
        self,
        host: Host,
        exchange: Exchange,
        abort_signal: AbortSignal,
        topology: Topology,
        local: Communicator,
        across: Communicator | None = None,
        between: str = "",
    ) -> None:
        self.name = f"cuda_ipc+{between}" if between else "cuda_ipc"
        super().__init__(host, exchange.device, abort_signal)
        self._exchange = exchange
        self._topology = topology
        self._on_one_host = len(topology.hosts) == 1
        self._local = local
        self._ranks = topology.local_ranks(self.rank)
        self._across = across

    # -- operations on devices -------------------------------------------------------------------

    def begin_allreduce(self, tensors: Tensors, op: Op) -> Handle:
        if not self._device.holds(tensors[0]):
            return super().begin_allreduce(tensors, op)
        return self._on_device(tensors, lambda: self._reduce_now(tensors, op))

    def begin_allreduce_tree(self, nodes: Nodes, blocks: Blocks, outputs: Tensors) -> Handle:
        if not (self._topology.in_order and self._device.holds(outputs[0])):
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

    def _reduce_now(self, tensors: Tensors, op: Op) -> None:
        values, op = as_reducible(tensors, op)
        divides_last = op is Op.AVERAGE and not self._on_one_host  # hosts differ in size
        whole = Op.SUM if divides_last else op

        def finish(places: torch.Tensor, sums: Tensors) -> None:
            own = places[0]
            own.copy_(sums[0])
            if self._across is not None:
                self._device.drain()
                self._across.allreduce(own, whole)
            if divides_last:
                own.div_(self.size)

        what, counts = f"allreduce ({op.value})", [1] * len(self._ranks)
        self._exchange_rounds(what, [values], values, counts, 1, reducing(whole), finish)

    def _sum_along_now(self, nodes: Nodes, blocks: Blocks, outputs: Tensors) -> None:
        of_hosts = merged(blocks, self._topology.hosts)
        covers = [blocks.covers[rank] for rank in self._ranks]
        counts = [len(cover) for cover in covers]
        order = additions([*itertools.chain(*covers)], blocks.leaves)
        rows = max(map(len, (*blocks.covers, *of_hosts.covers)))

        def finish(places: torch.Tensor, sums: Tensors) -> None:
            # All sums first: they may be parts of this rank's buffer, where they are put.
            made = [each.clone() for each in sums] if len(sums) > 1 else sums
            for place, each in zip(places, made, strict=False):
                place.copy_(each)
            if self._across is not None:
                self._device.drain()
                own = [[place] for place in places[: len(made)]]
                self._across.allreduce_tree(own, of_hosts, [places[0]])

        what = f"sum along the tree of {blocks.quotas}"
        combine = adding_along(order)
        self._exchange_rounds(what, nodes, outputs, counts, rows, combine, finish)

    def _exchange_rounds(
        self,
        what: str,
        nodes: Nodes,
        outputs: Tensors,
        counts: Sequence[int],
        rows: int,
        combine: Combine,
        finish: Finish,
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
                combine_to(parts, by_rank, combine)
                continue
            bounds = self._bounds(count)
            low, high = bounds[self._local.rank], bounds[self._local.rank + 1]
            if low < high:
                slices = [[row[low:high] for row in of_rank] for of_rank in by_rank]
                finish(mine[:, low:high], combine(slices, None))
            self._meet(what)  # all slices are summed before any is copied
            for rank, half in enumerate(halves):
                copy_out(half[0], bounds[rank], bounds[rank + 1], parts)

    def _each_adds_all(self, nbytes: int) -> bool:
        # Two ranks read as much of each other either way, and so save a meeting.
        return self._on_one_host and (self.size == 2 or nbytes <= AT_ONCE_BYTES)

    def _bounds(self, count: int) -> list[int]:
        """Return where the slice of each of this host's ranks begins, and the end."""
        slices = self._topology.slices
        return slice_bounds(count, slices, _LINE) + [count] * (len(self._ranks) - slices)

    def _broadcast_now(self, tensor: torch.Tensor, root: int) -> None:
        flat = tensor.detach().view(-1).view(torch.uint8)
        of_root = self._topology.local_ranks(root)
        here, its_host = root in self._ranks, self._topology.hosts.index(of_root)
        what = f"broadcast of {flat.numel()} bytes from rank {root}"
        for parts in rounds([flat], self._exchange.capacity(torch.uint8)):
            halves = self._exchange.next(torch.uint8)
            own, count = halves[self._local.rank], sum(part.values.numel() for part in parts)
            bounds = self._bounds(count)
            mine = slice(bounds[self._local.rank], bounds[self._local.rank + 1])
            if self.rank == root:
                copy_in(own, parts)
            if here:  # on other hosts nothing has arrived yet
                self._meet(what)
                if self.rank != root and self._on_one_host:
                    copy_out(halves[root], 0, count, parts)
                elif self.rank != root:
                    own[mine].copy_(halves[of_root.index(root)][mine])
            if self._on_one_host:
                continue
            if self._across is not None and mine.start < mine.stop:
                self._device.drain()
                self._across.broadcast(own[mine], its_host)
            self._meet(what)
            if self.rank != root:
                for rank, half in enumerate(halves):
                    copy_out(half, bounds[rank], bounds[rank + 1], parts)

    # -- state -----------------------------------------------------------------------------------

    def cut_connections(self) -> int:
        across = 0 if self._across is None else self._across.cut_connections()
        return super().cut_connections() + across

    def _leave_parts(self) -> None:
        if self._local is not self._host:  # on one host, `close` closes it as the host's
            self._local.close()
        if self._across is not None:
            self._across.close()

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
