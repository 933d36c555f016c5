"""Communicator over CUDA IPC inside hosts, and another kind between them.

As :mod:`nbelastic.collectives.hierarchical`, with GPUs: the ranks of a host reduce a slice
each in the exchange buffers, then the ranks with one slice reduce it over the hosts, by NCCL or by
Gloo from pinned memory, then the ranks of a host copy the slices of each other. So all ranks of a
host use the network at once, and each byte crosses it once a host.

A rank alone on its host has a buffer, too, so that all hosts have the same rounds.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from nbelastic.collectives.cuda_ipc.communicator import (
    CudaIpcCommunicator,
    adding_along,
    as_reducible,
    copy_in,
    copy_out,
    reducing,
    rounds,
    slice_bounds,
)
from nbelastic.collectives.reduction_tree import additions
from nbelastic.collectives.transport import Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbelastic.collectives.abort_signal import AbortSignal
    from nbelastic.collectives.communicator import Communicator, Rendezvous
    from nbelastic.collectives.cuda_ipc.communicator import Exchange
    from nbelastic.collectives.gpu.communicator import Host
    from nbelastic.collectives.reduction_tree import Blocks
    from nbelastic.collectives.topology import Topology


class CudaIpcHostsCommunicator(CudaIpcCommunicator):
    """A communicator over CUDA IPC inside hosts, and another kind between them.

    It owns all its parts: `host`, of all ranks, for what is not on GPUs; `local`, for the meetings
    of this host's ranks; `across`, the ranks with this rank's slice, or None if it has none.
    `between` is how slices travel: ``nccl`` or ``gloo``.
    """

    # The executor's thread alone uses `local` and `across`, one operation after the other in the
    # order of the rank's calls. What ends one part ends all, so a failure between hosts frees the
    # ranks that meet inside them.

    def __init__(
        self,
        rendezvous: Rendezvous,
        host: Host,
        exchange: Exchange,
        abort_signal: AbortSignal,
        topology: Topology,
        local: Communicator,
        across: Communicator | None,
        between: str,
    ) -> None:
        self.name = f"cuda_ipc+{between}"
        super().__init__(rendezvous, host, exchange, abort_signal)
        self._topology = topology
        self._local = local
        self._ranks = topology.local_ranks(self.rank)
        self._across = across
        self._sums_along = topology.in_order  # else sums along a tree are for the hosts

    # -- in the executor's thread ----------------------------------------------------------------

    def _reduce_now(self, tensors: Sequence[torch.Tensor], op: Op) -> None:
        values, op = as_reducible(tensors, op)
        whole = Op.SUM if op is Op.AVERAGE else op

        def finish(places: torch.Tensor, sums: Sequence[torch.Tensor]) -> None:
            own = places[0]
            own.copy_(sums[0])
            if self._across is not None:
                self._device.drain()
                self._across.allreduce(own, whole)
            if op is Op.AVERAGE:
                own.div_(self.size)

        what, counts = f"allreduce ({op.value})", [1] * len(self._ranks)
        self._exchange_rounds(what, [values], values, counts, 1, reducing(whole), finish)

    def _sum_along_now(
        self,
        nodes: Sequence[Sequence[torch.Tensor]],
        blocks: Blocks,
        outputs: Sequence[torch.Tensor],
    ) -> None:
        of_hosts = blocks.merged(self._topology.hosts)
        covers = [blocks.covers[rank] for rank in self._ranks]
        counts = [len(cover) for cover in covers]
        order = additions([*itertools.chain(*covers)], blocks.leaves)
        rows = max(map(len, (*blocks.covers, *of_hosts.covers)))

        def finish(places: torch.Tensor, sums: Sequence[torch.Tensor]) -> None:
            # All sums first: they may be parts of this rank's buffer, where they are put.
            made = [each.clone() for each in sums]
            for place, each in zip(places, made, strict=False):
                place.copy_(each)
            if self._across is not None:
                self._device.drain()
                own = [[place] for place in places[: len(made)]]
                self._across.allreduce_tree(own, of_hosts, [places[0]])

        what = f"sum along the tree of {blocks.quotas}"
        combine = adding_along(order)
        self._exchange_rounds(what, nodes, outputs, counts, rows, combine, finish)

    def _broadcast_now(self, tensor: torch.Tensor, root: int) -> None:
        flat = tensor.detach().view(-1).view(torch.uint8)
        of_root = self._topology.local_ranks(root)
        here, its_host = root in self._ranks, self._topology.hosts.index(of_root)
        for parts in rounds([flat], self._exchange.capacity(torch.uint8)):
            halves = self._exchange.next(torch.uint8)
            own, count = halves[self._local.rank], sum(part.values.numel() for part in parts)
            bounds = self._bounds(count)
            mine = slice(bounds[self._local.rank], bounds[self._local.rank + 1])
            what = f"broadcast of {flat.numel()} bytes from rank {root}"
            if self.rank == root:
                copy_in(own, parts)
            if here:
                self._meet(what)
                if self.rank != root:
                    own[mine].copy_(halves[of_root.index(root)][mine])
            if self._across is not None and mine.start < mine.stop:
                self._device.drain()
                self._across.broadcast(own[mine], its_host)
            self._meet(what)
            if self.rank != root:
                for rank, half in enumerate(halves):
                    copy_out(half, bounds[rank], bounds[rank + 1], parts)

    def _each_adds_all(self, nbytes: int) -> bool:  # noqa: ARG002 - slices cross to other hosts
        return False

    def _bounds(self, count: int) -> list[int]:
        slices = self._topology.slices
        return slice_bounds(count, slices) + [count] * (len(self._ranks) - slices)

    # -- state -----------------------------------------------------------------------------------

    def cut_connections(self) -> int:
        across = 0 if self._across is None else self._across.cut_connections()
        return super().cut_connections() + across

    def _leave_parts(self) -> None:
        self._local.close()
        if self._across is not None:
            self._across.close()
