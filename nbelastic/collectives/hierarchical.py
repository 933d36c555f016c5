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

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from nbelastic.collectives.buffers import copy_back, copy_parts, slice_bounds
from nbelastic.collectives.gloo.communicator import GlooCommunicator
from nbelastic.collectives.operations import OperationHandle, OrderedExecutor, abortable
from nbelastic.collectives.reduction_tree import Blocks, merged
from nbelastic.collectives.rendezvous.client import Rendezvous
from nbelastic.collectives.shm.segment import (
    abort_with,
    allocate,
    reduction_codes,
    tree_of,
)
from nbelastic.collectives.transport import Handle, Op
from nbelastic.errors import CollectiveError

if TYPE_CHECKING:
    from nbelastic.collectives.abort_signal import AbortSignal
    from nbelastic.collectives.topology import Topology
    from nbelastic.collectives.transport import Nodes, Tensors
    from nbelastic.native._core import Group

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

    def __init__(
        self,
        rendezvous: Rendezvous,
        topology: Topology,
        group: Group | None,
        abort_signal: AbortSignal,
    ) -> None:
        super().__init__(rendezvous, abort_signal)
        self._group = group
        self._topology = topology
        self._local_ranks = topology.local_ranks(rendezvous.rank)
        # The ranks with this rank's slice, if it has any.
        peers, slice_ = topology.cross_ranks(self.rank), self._local_ranks.index(self.rank)
        its = rendezvous.part(f"cross-{slice_}", peers) if peers else None
        self._cross = None if its is None else GlooCommunicator(its, abort_signal)
        name = f"nbelastic-hierarchical-{self.generation}-{self.rank}"
        self._executor = OrderedExecutor(name, rendezvous.timeout_s)
        if group is not None:
            abort_with(group, abort_signal, self.rank)

    def connect(self) -> HierarchicalCommunicator:
        super().connect()
        if self._cross is not None:
            self._cross.connect()  # second on all ranks, so no two wait for each other
        return self

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        self._abort_signal.check()
        if self._group is None:
            return super().empty(count, dtype)
        try:
            return allocate(self._group, count, dtype)
        except MemoryError as error:
            raise CollectiveError(f"shared memory is full: {error}") from None

    def begin_allreduce(self, tensors: Tensors, op: Op) -> Handle:
        self.check()
        own = tensors[0].view(1, -1)
        if self._group is None or self._group.holds(own.data_ptr(), own.nbytes):
            return self._submit(own, op)
        return self._begin_staged([tensors], tensors, op)

    def begin_allreduce_tree(self, nodes: Nodes, blocks: Blocks, outputs: Tensors) -> Handle:
        if not self._topology.in_order:
            return super().begin_allreduce_tree(nodes, blocks, outputs)
        self.check()
        return self._begin_staged(nodes, outputs, Op.SUM, blocks)

    def _begin_staged(
        self, nodes: Nodes, outputs: Tensors, op: Op, blocks: Blocks | None = None
    ) -> Handle:
        """Reduce copies of `nodes` in the segment, and fill `outputs`."""
        count = sum(tensor.numel() for tensor in outputs)
        # Nodes lie one after the other. The first gives way to the outcome.
        memory = self.empty(max(len(nodes), 1) * count, outputs[0].dtype).view(-1, count)
        for row, tensors in zip(memory, nodes, strict=False):
            copy_parts(tensors, row)
        return self._submit(memory, op, blocks, lambda: copy_back(memory[0], outputs))

    def _submit(
        self,
        memory: torch.Tensor,
        op: Op,
        blocks: Blocks | None = None,
        deliver: Callable[[], object] | None = None,
    ) -> Handle:
        task = abortable(self._abort_signal, lambda: self._reduce(memory, op, blocks))
        return OperationHandle(self, self._executor.submit(task), deliver)

    def _reduce(self, memory: torch.Tensor, op: Op, blocks: Blocks | None) -> None:
        """Reduce the rows of `memory`, in the segment, to its first, in the executor's thread.

        They are this rank's values, or its nodes of a tree over `blocks`.
        """
        group, topology, position = self._group, self._topology, self._local_ranks.index(self.rank)
        bounds = slice_bounds(memory.shape[1], topology.slices, _LINE)
        counts = [end - begin for begin, end in itertools.pairwise(bounds)]
        counts += [0] * (len(self._local_ranks) - topology.slices)
        first = sum(counts[:position])
        own = memory[:, first : first + counts[position]]
        sums = [*own]
        whole = Op.SUM if op is Op.AVERAGE else op
        if blocks is not None:
            hosts = merged(blocks, topology.hosts)
            left = len(hosts.covers[topology.hosts.index(self._local_ranks)])
            # What remains of a host may be more than this rank's nodes, so it lies elsewhere.
            sums = sums[:left] if group is None else [torch.empty_like(own[0]) for _ in range(left)]
        if group is not None:
            kind, code = reduction_codes(memory.dtype, whole)
            if sums:  # none where no rank of this host has a leaf, and there is no tree either
                tree = None if blocks is None else tree_of(blocks, self._local_ranks)
                places = [each.data_ptr() for each in sums]
                parts = group.reduce_scatter_async
                group.wait(parts(memory.data_ptr(), counts, places, kind, code, tree))
        if self._cross is not None and blocks is not None:
            self._cross.allreduce_tree([[each] for each in sums], hosts, [own[0]])
        elif self._cross is not None:
            self._cross.allreduce(own[0], whole)
            if op is Op.AVERAGE:
                own[0].div_(self.size)  # at the end: hosts differ in their numbers of ranks
        if group is not None:
            group.wait(group.gather_parts_async(memory.data_ptr(), counts, kind))

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
        self._executor.join()  # the abort ends a stage under way
        if self._group is not None:
            self._group.close()  # after the executor, whose stages use it

    def __del__(self) -> None:
        if hasattr(self, "_executor"):
            self.close()
