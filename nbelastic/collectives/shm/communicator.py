"""Communicator over shared memory, for ranks that are all on one host.

The operations themselves are in :mod:`nbelastic.native`; this module maps tensors to addresses.

Memory lent to an operation is kept until the operation has ended, even if its handle is dropped.
After a failure it is kept until the group is closed, because the group's thread may be in the
middle of a copy. Messages are moved by one executor a direction, as over Gloo.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from nbelastic.collectives.arguments import (
    check_contiguous,
    check_exchange,
    check_gather,
    check_op,
    check_peer,
    check_rank,
    check_scatter,
    check_together,
    check_tree,
)
from nbelastic.collectives.buffers import copy_back, copying_back, on_host
from nbelastic.collectives.communicator import Handle, Op, Rendezvous
from nbelastic.collectives.operations import AsyncCommunicator, OperationHandle, OrderedExecutor
from nbelastic.collectives.shm.segment import (
    OPS,
    TYPES,
    SegmentOperation,
    Transfer,
    abort_with,
    allocate,
    concatenate_in,
    error_type,
    memory_of,
    reduction_arguments,
    reduction_codes,
    tree_arguments,
    usable_processors,
)
from nbelastic.native import core

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.collectives.abort_signal import AbortSignal
    from nbelastic.collectives.operations import QueuedOperation
    from nbelastic.collectives.reduction_tree import Blocks
    from nbelastic.native._core import Group

EXIT_LIMIT_S = 2.0
MOST_SHARED = 16 << 10
_AVERAGE = Op.AVERAGE


class SharedMemoryCommunicator(AsyncCommunicator):
    """A communicator of ranks that share a segment.

    Parameters
    ----------
    rendezvous : Rendezvous
        The generation and its ranks.
    group : Group
        The segment, open on all ranks. The communicator owns it from here on.
    abort_signal : AbortSignal
        Ends the communicator.
    """

    name = "shm"
    coalesces = True
    carries_descriptions = True
    stops_sending_on_failure = True

    def __init__(self, rendezvous: Rendezvous, group: Group, abort_signal: AbortSignal) -> None:
        super().__init__(rendezvous, abort_signal)
        # Sums take processor time: they overlap with backward only on spare processors.
        self.overlaps = usable_processors() >= 2 * self.size
        self._timeout_s = rendezvous.timeout_s
        self._group = group
        self._reduce = group.allreduce
        self._lent: deque[tuple[SegmentOperation, object]] = deque()
        self._executors: dict[str, OrderedExecutor] = {}
        self._closed = False
        abort_with(group, abort_signal, self.rank)
        _living.add(self)

    def connect(self) -> SharedMemoryCommunicator:
        """Raise: it is connected when it is made."""
        self._abort_signal.check()
        raise RuntimeError("connect() is called once")

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new vector in the segment."""
        self._abort_signal.check()
        try:
            return allocate(self._group, count, dtype)
        except MemoryError:
            return super().empty(count, dtype)

    # -- operations ------------------------------------------------------------------------------

    def allgather_bytes(self, record: bytes) -> list[bytes]:
        """Return the `record` of every rank, and wait for it. Lengths may differ."""
        self._abort_signal.check()
        if len(record) > MOST_SHARED:
            return super().allgather_bytes(record)
        self._drop_lent()
        try:
            records = self._group.share(record)
        except core.Broken as error:
            self._fail(str(error), error_type(error))
        self._completed += 1
        return records

    def allreduce(self, tensor: torch.Tensor, op: Op = Op.SUM) -> None:
        """Reduce `tensor` over all ranks and wait for it, without a handle where possible."""
        count = tensor.numel()
        if (
            self._lent
            or self._closed
            or not (count and tensor.is_cpu and tensor.is_contiguous())
            or (op is _AVERAGE and not tensor.is_floating_point())
        ):
            self.allreduce_async(tensor, op).wait()
            return
        try:
            self._reduce(tensor.data_ptr(), count, TYPES[tensor.dtype], OPS[op._value_])
        except KeyError:  # a type that is summed as another type
            self.allreduce_async(tensor, op).wait()
            return
        except core.Broken as error:
            self._fail(str(error), error_type(error))
        self._completed += 1

    def allreduce_async(self, tensor: torch.Tensor, op: Op = Op.SUM) -> Handle:
        """Reduce `tensor` over all ranks, in place."""
        check_contiguous(tensor)
        check_op(tensor, op)
        if tensor.numel() == 0:
            return self._nothing_to_do()
        buffer = on_host(tensor)
        return self._begin(
            self._group.allreduce_async,
            (buffer.data_ptr(), buffer.numel(), *reduction_codes(buffer.dtype, op)),
            buffer,
            lambda: copy_back(tensor, buffer),
        )

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], op: Op = Op.SUM) -> None:
        """Reduce `tensors` over all ranks and wait for it, without a handle where possible."""
        check_together(tensors, op)
        if self._lent or self._closed or not tensors[0].is_cpu:
            self.allreduce_coalesced_async(tensors, op).wait()
            return
        try:
            self._group.allreduce_coalesced(*reduction_arguments(tensors, op))
        except core.Broken as error:
            self._fail(str(error), error_type(error))
        self._completed += 1

    def allreduce_coalesced_async(self, tensors: Sequence[torch.Tensor], op: Op = Op.SUM) -> Handle:
        """Reduce `tensors` over all ranks, in place, as one operation."""
        check_together(tensors, op)
        buffers = [on_host(tensor) for tensor in tensors]
        return self._begin(
            self._group.allreduce_coalesced_async,
            reduction_arguments(buffers, op),
            buffers,
            copying_back(tensors, buffers),
        )

    def allreduce_tree(
        self,
        nodes: Sequence[Sequence[torch.Tensor]],
        blocks: Blocks,
        outputs: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Sum tensors along a tree and wait for it, without a handle where possible."""
        found = check_tree(nodes, blocks, outputs, self.rank, self.size)
        if self._lent or self._closed or not found[0].is_cpu:
            self.allreduce_tree_async(nodes, blocks, outputs).wait()
            return
        try:
            self._group.allreduce_tree(*tree_arguments(nodes, found, blocks))
        except core.Broken as error:
            self._fail(str(error), error_type(error))
        self._completed += 1

    def allreduce_tree_async(
        self,
        nodes: Sequence[Sequence[torch.Tensor]],
        blocks: Blocks,
        outputs: Sequence[torch.Tensor] | None = None,
    ) -> Handle:
        """Sum tensors along a tree, as one operation."""
        found = check_tree(nodes, blocks, outputs, self.rank, self.size)
        buffers = [on_host(tensor, load=found is nodes[0] if nodes else False) for tensor in found]
        sources = [
            buffers if node is found else [on_host(tensor) for tensor in node] for node in nodes
        ]
        return self._begin(
            self._group.allreduce_tree_async,
            tree_arguments(sources, buffers, blocks),
            (sources, buffers),
            copying_back(found, buffers),
        )

    def broadcast_async(self, tensor: torch.Tensor, root: int = 0) -> Handle:
        """Copy the `tensor` of rank `root` into that of all others."""
        check_contiguous(tensor)
        check_rank(root, self.size, "root")
        if tensor.numel() == 0:
            return self._nothing_to_do()
        buffer = on_host(tensor, load=self.rank == root)

        def deliver() -> None:
            if self.rank != root:
                copy_back(tensor, buffer)

        return self._begin(self._group.broadcast_async, (*memory_of(buffer), root), buffer, deliver)

    def allgather_async(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Handle:
        """Collect every rank's `tensor` into `outputs`."""
        check_gather(outputs, tensor, self.size)
        if tensor.numel() == 0:
            return self._nothing_to_do()
        source = on_host(tensor)
        buffers = [on_host(output, load=False) for output in outputs]
        return self._begin(
            self._group.allgather_async,
            ([buffer.data_ptr() for buffer in buffers], *memory_of(source)),
            (source, buffers),
            copying_back(outputs, buffers),
        )

    def reduce_scatter_async(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Op = Op.SUM
    ) -> Handle:
        """Reduce ``inputs[i]`` of all ranks into `output` of rank ``i``."""
        check_scatter(output, inputs, self.rank, self.size, op)
        counts = [tensor.numel() for tensor in inputs]
        if not any(counts):
            return self._nothing_to_do()
        self._abort_signal.check()
        try:
            source = concatenate_in(self._group, inputs)
        except MemoryError as error:
            self._fail(f"shared memory is full: {error}")
        buffer = on_host(output, load=False)
        return self._begin(
            self._group.reduce_scatter_async,
            (buffer.data_ptr(), source.data_ptr(), counts, *reduction_codes(output.dtype, op)),
            (source, buffer),
            lambda: copy_back(output, buffer),
        )

    def all_to_all_async(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Handle:
        """Send ``inputs[i]`` to rank ``i``, receive ``outputs[i]`` from it."""
        check_exchange(outputs, inputs, self.rank, self.size)
        sources = [on_host(tensor) for tensor in inputs]
        buffers = [on_host(output, load=False) for output in outputs]
        return self._begin(
            self._group.all_to_all_async,
            ([memory_of(buffer) for buffer in buffers], [memory_of(source) for source in sources]),
            (sources, buffers),
            copying_back(outputs, buffers),
        )

    def barrier_async(self) -> Handle:
        """Complete when all ranks have arrived."""
        return self._begin(self._group.barrier_async, (), None, None)

    def send_async(self, tensor: torch.Tensor, to: int) -> Handle:
        """Send `tensor` to rank `to`."""
        check_contiguous(tensor)
        check_peer(to, self.rank, self.size, "to")
        if tensor.numel() == 0:
            return self._nothing_to_do()
        return self._send([tensor], to)

    def send_parts_async(self, parts: Sequence[torch.Tensor], to: int) -> Handle:
        """Send `parts` as one message, without concatenating them."""
        check_peer(to, self.rank, self.size, "to")
        return self._send(parts, to)

    def _send(self, parts: Sequence[torch.Tensor], to: int) -> Handle:
        buffers = [on_host(part) for part in parts]
        arguments = ([memory_of(buffer) for buffer in buffers], to)
        operation = self._post(f"to-{to}", self._group.send, arguments, buffers)
        return OperationHandle(self, operation, None)

    def receive_async(self, tensor: torch.Tensor, source: int) -> Handle:
        """Fill `tensor` with what rank `source` sends."""
        check_contiguous(tensor)
        check_peer(source, self.rank, self.size, "source")
        if tensor.numel() == 0:
            return self._nothing_to_do()
        buffer = on_host(tensor, load=False)
        arguments = (*memory_of(buffer), source)
        operation = self._post(f"from-{source}", self._group.receive, arguments, buffer)
        return OperationHandle(self, operation, lambda: copy_back(tensor, buffer))

    # -- state -----------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether the rank's thread is waiting for an operation."""
        return super().waiting or self._group.waiting

    @property
    def dead_ranks(self) -> tuple[int, ...]:
        """Ranks whose processes are known to have ended."""
        return tuple(self._group.dead)

    def cut_connections(self) -> int:
        """Break the segment as the death of a peer would; return the number of other ranks."""
        if self._closed or self._abort_signal.forked or self._group.failure is not None:
            return 0
        self._group.abort(f"rank {self.rank} was cut off")
        return self.size - 1

    @property
    def idle(self) -> bool:
        """Whether no operation is under way."""
        lent = [operation for operation, _ in self._lent]
        executors = self._executors.values()
        return all(each.done() for each in lent) and all(each.idle for each in executors)

    def close(self) -> None:
        """Leave the segment; in an orderly way if no operation is under way."""
        if self._closed or self._abort_signal.forked:
            return  # a fork has none of the group's threads
        self._closed = True
        self.close_subgroups()
        self._abort_signal.abort("the communicator is closed", orderly=self.idle)
        for executor in self._executors.values():
            executor.join()
        self._group.close()
        self._lent.clear()

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self.close()

    # -- from beginning to end -------------------------------------------------------------------

    def _begin(
        self,
        start: Callable[..., int],
        arguments: tuple[Any, ...],
        lent: object,
        deliver: Callable[[], None] | None,
    ) -> Handle:
        self._abort_signal.check()
        self._drop_lent()
        try:
            operation = SegmentOperation(self._group, start(*arguments))
        except core.Broken as error:
            self._fail(str(error), error_type(error))
        self._lent.append((operation, lent))
        return OperationHandle(self, operation, deliver)

    def _drop_lent(self) -> None:
        """Drop memory that was lent to operations that have ended. They end in order."""
        while self._lent and self._lent[0][0].done():
            if self._group.failure is not None:
                return
            self._lent.popleft()

    def _release(self, _operation: object) -> None:
        self._drop_lent()

    def _post(
        self, direction: str, move: Callable[..., None], arguments: tuple[object, ...], lent: object
    ) -> QueuedOperation:
        """Send or receive by the executor of a direction."""
        self._abort_signal.check()
        if direction not in self._executors:
            name = f"nbelastic-shm-{self.generation}-{self.rank}-{direction}"
            self._executors[direction] = OrderedExecutor(name, self._timeout_s)
        return self._executors[direction].submit(Transfer(move, arguments, lent))


_living: weakref.WeakSet[SharedMemoryCommunicator] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Free waiting threads: none may return into an interpreter that has gone."""
    communicators = list(_living)
    for communicator in communicators:
        communicator.abort("the process is exiting")
    deadline = time.monotonic() + EXIT_LIMIT_S
    while any(each.waiting for each in communicators) and time.monotonic() < deadline:
        time.sleep(0.001)


def _forget_all_in_fork() -> None:
    for communicator in _living:
        communicator._closed = True  # or an allreduce would skip the abort signal
    _living.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all_in_fork)
