"""Communicator over shared memory, for ranks on a single host.

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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from nbelastic.collectives.buffers import copy_parts
from nbelastic.collectives.operations import (
    AsyncCommunicator,
    OperationHandle,
    OrderedExecutor,
    abortable,
)
from nbelastic.collectives.rendezvous.client import Rendezvous
from nbelastic.collectives.shm.segment import (
    OPS,
    TYPES,
    SegmentOperation,
    abort_with,
    allocate,
    memory_of,
    place_of,
    reduction_codes,
    tree_of,
)
from nbelastic.collectives.transport import Capabilities, Handle, Op
from nbelastic.errors import CollectiveError

if TYPE_CHECKING:
    from nbelastic.collectives.abort_signal import AbortSignal
    from nbelastic.collectives.reduction_tree import Blocks
    from nbelastic.collectives.transport import Nodes, Tensors
    from nbelastic.native._core import Group

EXIT_LIMIT_S = 2.0  # an exit must end, even if a thread stays in the core
MOST_SHARED = 16 << 10  # travels with the post: one step of all ranks, not two
_AVERAGE = Op.AVERAGE


class SharedMemoryCommunicator(AsyncCommunicator):
    """A communicator of ranks on a shared segment, its own `group`."""

    name = "shm"

    def __init__(self, rendezvous: Rendezvous, group: Group, abort_signal: AbortSignal) -> None:
        super().__init__(rendezvous, abort_signal)
        self.capabilities = Capabilities(
            # Sums take processor time: they overlap with backward only on spare processors.
            overlaps=len(os.sched_getaffinity(0)) >= 2 * self.size,
            coalesces=True,
            carries_descriptions=True,
            stops_sending_on_failure=True,
        )
        self._group = group
        self._reduce = group.allreduce  # looked up once: it shows in small sums
        self._lent: deque[tuple[SegmentOperation, object]] = deque()
        self._executors: dict[str, OrderedExecutor] = {}
        self._closed = False
        abort_with(group, abort_signal, self.rank)
        _living.add(self)

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        self._abort_signal.check()
        try:
            return allocate(self._group, count, dtype)
        except MemoryError:  # ordinary memory works, too, by the staging area
            return super().empty(count, dtype)

    # -- operations ------------------------------------------------------------------------------

    def allgather_bytes(self, record: bytes) -> list[bytes]:
        self._abort_signal.check()
        if len(record) > MOST_SHARED:
            return super().allgather_bytes(record)
        self._drop_lent()
        try:
            records = self._group.share(record)
        except CollectiveError as error:
            self._fail(str(error), type(error))
        self._completed += 1
        return records

    def allreduce(self, tensor: torch.Tensor, op: Op = Op.SUM) -> None:
        count = tensor.numel()
        if (
            self._lent
            or self._closed  # in a fork, too: the call below reads no abort signal
            or not (count and tensor.is_cpu and tensor.is_contiguous())
            or (op is _AVERAGE and not tensor.is_floating_point())  # `allreduce_async` raises
        ):
            self.allreduce_async(tensor, op).wait()
            return
        try:
            self._reduce(tensor.data_ptr(), count, TYPES[tensor.dtype], OPS[op._value_])
        except KeyError:  # a type that is summed as another type
            self.allreduce_async(tensor, op).wait()
            return
        except CollectiveError as error:
            self._fail(str(error), type(error))
        self._completed += 1

    def begin_allreduce(self, tensors: Tensors, op: Op) -> Handle:
        arguments = (list(map(place_of, tensors)), *reduction_codes(tensors[0].dtype, op))
        return self._begin(self._group.allreduce_async, arguments, tensors)

    def begin_allreduce_tree(self, nodes: Nodes, blocks: Blocks, outputs: Tensors) -> Handle:
        places = list(map(place_of, outputs))
        ours = [places if node is outputs else list(map(place_of, node)) for node in nodes]
        arguments = (ours, places, tree_of(blocks), TYPES[outputs[0].dtype])
        return self._begin(self._group.allreduce_tree_async, arguments, (nodes, outputs))

    def begin_broadcast(self, tensor: torch.Tensor, root: int) -> Handle:
        return self._begin(self._group.broadcast_async, (*memory_of(tensor), root), tensor)

    def begin_allgather(self, outputs: Tensors, tensor: torch.Tensor) -> Handle:
        arguments = ([output.data_ptr() for output in outputs], *memory_of(tensor))
        return self._begin(self._group.allgather_async, arguments, (tensor, outputs))

    def begin_reduce_scatter(self, output: torch.Tensor, inputs: Tensors, op: Op) -> Handle:
        self._abort_signal.check()
        # The core reduces parts where they lie, so peers must be able to read them.
        try:
            source = allocate(self._group, sum(each.numel() for each in inputs), output.dtype)
        except MemoryError as error:
            self._fail(f"shared memory is full: {error}")  # only an abort frees the peers
        copy_parts(inputs, source)
        counts, how = [each.numel() for each in inputs], reduction_codes(output.dtype, op)
        arguments = (source.data_ptr(), counts, [output.data_ptr()], *how)
        return self._begin(self._group.reduce_scatter_async, arguments, (source, output))

    def begin_all_to_all(self, outputs: Tensors, inputs: Tensors) -> Handle:
        arguments = (list(map(memory_of, outputs)), list(map(memory_of, inputs)))
        return self._begin(self._group.all_to_all_async, arguments, (inputs, outputs))

    def begin_barrier(self) -> Handle:
        return self._begin(self._group.barrier_async, (), None)

    def begin_send(self, parts: Tensors, to: int) -> Handle:
        return self._post(f"to-{to}", self._group.send, (list(map(memory_of, parts)), to), parts)

    def begin_receive(self, tensor: torch.Tensor, source: int) -> Handle:
        arguments = (*memory_of(tensor), source)
        return self._post(f"from-{source}", self._group.receive, arguments, tensor)

    # -- state -----------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        return super().waiting or self._group.waiting

    @property
    def dead_ranks(self) -> tuple[int, ...]:
        return tuple(self._group.dead)

    def cut_connections(self) -> int:
        if self._closed or self._abort_signal.forked or self._group.failure is not None:
            return 0
        self._group.abort(f"rank {self.rank} was cut off")
        return self.size - 1  # the segment is the connection to all peers

    @property
    def idle(self) -> bool:
        """Whether no operation is under way."""
        lent = [operation for operation, _ in self._lent]
        executors = self._executors.values()
        return all(each.done() for each in lent) and all(each.idle for each in executors)

    def close(self) -> None:
        if self._closed or self._abort_signal.forked:
            return  # a fork has none of the group's threads
        self._closed = True
        self.close_subgroups()  # before the abort, which would fail them
        self._abort_signal.abort("the communicator is closed", orderly=self.idle)
        for executor in self._executors.values():
            executor.join()  # its thread may still be in a call of the group
        self._group.close()
        self._lent.clear()  # only now: until here the group's thread may have copied

    def __del__(self) -> None:
        if hasattr(self, "_closed"):  # else `__init__` has raised
            self.close()

    # -- from beginning to end -------------------------------------------------------------------

    def _begin(self, start: Callable[..., int], arguments: tuple[Any, ...], lent: object) -> Handle:
        self._abort_signal.check()
        self._drop_lent()
        try:
            operation = SegmentOperation(self._group, start(*arguments))
        except CollectiveError as error:
            self._fail(str(error), type(error))
        self._lent.append((operation, lent))  # a dropped handle must not free what peers read
        return OperationHandle(self, operation)

    def _drop_lent(self) -> None:
        """Drop memory lent to ended operations, which end in order."""
        while self._lent and self._lent[0][0].done():
            if self._group.failure is not None:  # all count as done, but a copy may go on
                return
            self._lent.popleft()

    def _release(self, _operation: object) -> None:
        self._drop_lent()

    def _post(
        self, direction: str, move: Callable[..., None], arguments: tuple[object, ...], lent: object
    ) -> Handle:
        """Send or receive by the executor of a direction."""
        self._abort_signal.check()
        if direction not in self._executors:
            name = f"nbelastic-shm-{self.generation}-{self.rank}-{direction}"
            self._executors[direction] = OrderedExecutor(name, self._rendezvous.timeout_s)

        def transfer(_lent: object = lent) -> None:
            move(*arguments)

        task = abortable(self._abort_signal, transfer)
        return OperationHandle(self, self._executors[direction].submit(task))


_living: weakref.WeakSet[SharedMemoryCommunicator] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Free waiting threads: none may return into an interpreter that has gone."""
    communicators = list(_living)
    for communicator in communicators:
        communicator.abort("the process is exiting")
    deadline = time.monotonic() + EXIT_LIMIT_S
    while any(each.waiting for each in communicators) and time.monotonic() < deadline:
        time.sleep(0.001)  # leaves the interpreter to the threads that return


def _forget_all_in_fork() -> None:
    for communicator in _living:
        communicator._closed = True  # or an allreduce would skip the abort signal
    _living.clear()  # the exit of a fork must abort nothing of its parent's


os.register_at_fork(after_in_child=_forget_all_in_fork)
