"""Communicator of ranks on several hosts, some of which share memory.

An allreduce has three stages. Within each host, every rank reduces a slice of the host's buffers.
Gloo reduces each slice over the hosts, between the ranks that hold it. Within each host the slices
are gathered. So all ranks of a host use the network at once, and each byte crosses it once a host.
There are as many slices as the smallest host has ranks; on larger hosts the other ranks take part
in the first and last stage only. A sum along a tree has the same stages, if the blocks of each
host's ranks follow each other: a host's sums are then nodes of the tree, too. All other operations
are those of the flat Gloo group.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING

import torch

from nbelastic.collectives.communicator import Rendezvous
from nbelastic.collectives.gloo.communicator import GlooCommunicator
from nbelastic.collectives.operations import AbortableTask, OperationHandle, OrderedExecutor
from nbelastic.collectives.reduction_tree import additions
from nbelastic.collectives.transport import Capabilities, Handle, Op
from nbelastic.errors import CollectiveError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.collectives.abort_signal import AbortSignal
    from nbelastic.collectives.reduction_tree import Blocks
    from nbelastic.collectives.topology import Topology
    from nbelastic.native._core import Group, Tree

_LINE = 16
"""Slices begin at multiples of so many elements, so that no two ranks write to one cache line."""


class HierarchicalCommunicator(GlooCommunicator):
    """A communicator of ranks on two or more hosts.

    It owns `group`, the segment that the ranks of this host share; None for a rank that is alone on
    its host. A stage that fails gives the abort signal: that breaks the segment and cuts the
    connections to other hosts, whose stages fail in turn.
    """

    # The rank's thread uses the flat group, and allocates memory in the segment. The executor's
    # thread performs the stages, one allreduce after the other in the order of the rank's calls,
    # so it alone uses the segment's operations and the group of the slice.

    name = "hierarchical"
    capabilities = Capabilities(reduces_in_place=False, averages=True)

    def __init__(
        self,
        rendezvous: Rendezvous,
        topology: Topology,
        group: Group | None,
        abort_signal: AbortSignal,
    ) -> None:
        super().__init__(rendezvous, abort_signal)
        self._group = group
        self._local_ranks = topology.local_ranks(rendezvous.rank)
        self._cross = _cross_communicator(rendezvous, topology, abort_signal)
        self._stages = _Stages(rendezvous, topology, group, self._cross)
        name = f"nbelastic-hierarchical-{self.generation}-{self.rank}"
        self._executor = OrderedExecutor(name, rendezvous.timeout_s)
        if group is not None:
            from nbelastic.collectives.shm.segment import abort_with

            abort_with(group, abort_signal, self.rank)

    def connect(self) -> HierarchicalCommunicator:
        super().connect()
        if self._cross is not None:
            self._cross.connect()
        return self

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        self._abort_signal.check()
        return self._stages.empty(count, dtype)

    def begin_allreduce(self, tensors: Sequence[torch.Tensor], op: Op) -> Handle:
        self.check()
        own = tensors[0].view(-1)
        if self._stages.holds(own):
            return self._submit(lambda: self._stages.perform(own, op), None)
        buffer = self._stages.empty(own.numel(), own.dtype)
        buffer.copy_(own)
        return self._submit(lambda: self._stages.perform(buffer, op), lambda: own.copy_(buffer))

    def begin_allreduce_tree(
        self,
        nodes: Sequence[Sequence[torch.Tensor]],
        blocks: Blocks,
        outputs: Sequence[torch.Tensor],
    ) -> Handle:
        if not self._stages.in_order:
            return super().begin_allreduce_tree(nodes, blocks, outputs)
        self.check()
        lengths = [tensor.numel() for tensor in outputs]
        count = sum(lengths)
        # Nodes lie one after the other. The first gives way to the sum.
        memory = self._stages.empty(max(len(nodes), 1) * count, outputs[0].dtype).view(-1, count)
        for row, tensors in zip(memory, nodes, strict=False):
            for part, tensor in zip(torch.split(row, lengths), tensors, strict=True):
                part.copy_(tensor.view(-1))

        def deliver() -> None:
            for part, tensor in zip(torch.split(memory[0], lengths), outputs, strict=True):
                tensor.view(-1).copy_(part)

        return self._submit(lambda: self._stages.perform_along(memory, blocks), deliver)

    def _submit(self, perform: Callable[[], None], deliver: Callable[[], object] | None) -> Handle:
        operation = self._executor.submit(AbortableTask(self._abort_signal, perform, _kind_of))
        return OperationHandle(self, operation, deliver)

    @property
    def dead_ranks(self) -> tuple[int, ...]:
        dead = () if self._group is None else self._group.dead
        return tuple(self._local_ranks[position] for position in dead)

    def cut_connections(self) -> int:
        across = 0 if self._cross is None else self._cross.cut_connections()
        return super().cut_connections() + across

    @property
    def idle(self) -> bool:
        return super().idle and self._executor.idle

    def close(self) -> None:
        super().close()
        if self._abort_signal.forked:
            return  # a fork has none of the threads
        self._executor.join()
        if self._group is not None:
            self._group.close()

    def __del__(self) -> None:
        if hasattr(self, "_executor"):
            self.close()


def _cross_communicator(
    rendezvous: Rendezvous, topology: Topology, abort_signal: AbortSignal
) -> GlooCommunicator | None:
    """Return a communicator of the ranks with this rank's slice, if it has any."""
    peers = topology.cross_ranks(rendezvous.rank)
    if not peers:
        return None
    position = topology.local_ranks(rendezvous.rank).index(rendezvous.rank)
    its = dataclasses.replace(
        rendezvous,
        job=f"{rendezvous.job}/cross-{position}",
        rank=peers.index(rendezvous.rank),
        size=len(peers),
    )
    return GlooCommunicator(its, abort_signal)


class _Stages:
    """The three stages of an allreduce."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        topology: Topology,
        group: Group | None,
        cross: GlooCommunicator | None,
    ) -> None:
        local_ranks = topology.local_ranks(rendezvous.rank)
        self._size = rendezvous.size
        self._position = local_ranks.index(rendezvous.rank)
        self._ranks = len(local_ranks)
        self._slices = topology.slices
        self._hosts = topology.hosts
        self._host = topology.hosts.index(local_ranks)
        self.in_order = topology.in_order
        self._group = group
        self._cross = cross

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        if self._group is None:
            return torch.empty(count, dtype=dtype)
        from nbelastic.collectives.shm.segment import allocate

        try:
            return allocate(self._group, count, dtype)
        except MemoryError as error:
            raise CollectiveError(f"shared memory is full: {error}") from None

    def holds(self, tensor: torch.Tensor) -> bool:
        return self._group is None or self._group.holds(tensor.data_ptr(), tensor.nbytes)

    def perform(self, buffer: torch.Tensor, op: Op) -> None:
        """Reduce `buffer`, which lies in the segment. Raises ``Broken`` or ``CollectiveError``."""
        counts = self._counts(buffer.numel())
        whole = Op.SUM if op is Op.AVERAGE else op
        group = self._group
        if group is not None:
            from nbelastic.collectives.shm.segment import reduction_codes

            kind, code = reduction_codes(buffer.dtype, whole)
            group.wait(group.reduce_parts_async(buffer.data_ptr(), counts, kind, code))
        if self._cross is not None:
            first = sum(counts[: self._position])
            own = buffer[first : first + counts[self._position]]
            self._cross.allreduce(own, whole)
            if op is Op.AVERAGE:
                own.div_(self._size)
        if group is not None:
            group.wait(group.gather_parts_async(buffer.data_ptr(), counts, kind))

    def perform_along(self, memory: torch.Tensor, blocks: Blocks) -> None:
        """Sum the rows of `memory`, this rank's nodes in the segment, along a tree to its first."""
        of_hosts = blocks.merged(self._hosts)
        nodes = len(of_hosts.covers[self._host])
        count = memory.shape[1]
        counts = self._counts(count)
        first = sum(counts[: self._position])
        own = slice(first, first + counts[self._position])
        sums = list(memory[:, own])
        group = self._group
        if group is not None:
            from nbelastic.collectives.shm.segment import TYPES

            kind = TYPES[memory.dtype]
            sums = [memory.new_empty(counts[self._position]) for _ in range(nodes)]
            if sums:
                places = [each.data_ptr() for each in sums]
                tree = _tree_of_host(blocks, self._hosts[self._host])
                parts = group.reduce_tree_parts_async
                group.wait(parts(memory.data_ptr(), counts, places, tree, kind))
        if self._cross is not None:
            self._cross.allreduce_tree(
                [[each] for each in sums[:nodes]], of_hosts, [memory[0, own]]
            )
        if group is not None:
            group.wait(group.gather_parts_async(memory.data_ptr(), counts, kind))

    def _counts(self, total: int) -> list[int]:
        """Return the number of elements in the slice of each rank of this host."""
        lines = -(-total // _LINE)
        bounds = [min(lines * i // self._slices * _LINE, total) for i in range(self._slices + 1)]
        counts = [end - begin for begin, end in itertools.pairwise(bounds)]
        return counts + [0] * (self._ranks - self._slices)


@functools.lru_cache(maxsize=64)
def _tree_of_host(blocks: Blocks, ranks: tuple[int, ...]) -> Tree:
    """Return the native core's tree for the ranks of a host, of which several sums may remain."""
    from nbelastic.native import core

    covers = [blocks.covers[rank] for rank in ranks]
    order = additions([*itertools.chain(*covers)], blocks.leaves)
    quotas = [blocks.quotas[rank] for rank in ranks]
    return core.Tree(quotas, [len(cover) for cover in covers], list(order))


def _kind_of(error: Exception) -> type[CollectiveError]:
    """Return the error to raise for that of a stage."""
    from nbelastic.collectives.shm.segment import error_type

    return error_type(error)
