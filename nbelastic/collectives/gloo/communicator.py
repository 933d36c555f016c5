"""Communicator over Gloo: TCP between any ranks.

It adds to Gloo that waiting threads can be freed, and that whatever is left behind ends by itself
(:mod:`nbelastic.collectives.gloo.group`).

Operations that only move data move bytes, so they take any type. An average is a sum that is
divided on completion.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceOp,
    Work,
)

from nbelastic.collectives.abort_signal import AbortSignal
from nbelastic.collectives.buffers import as_bytes, as_number, concatenate, copy_back
from nbelastic.collectives.gloo.group import GlooGroupOwner, GlooOperation
from nbelastic.collectives.operations import (
    AsyncCommunicator,
    Operation,
    OperationHandle,
    QueuedOperation,
    Task,
    first_sentence,
)
from nbelastic.collectives.rendezvous.client import Rendezvous
from nbelastic.collectives.transport import Handle, Op
from nbelastic.collectives.tree_exchange import flattened, sum_shares

if TYPE_CHECKING:
    from nbelastic.collectives.reduction_tree import Blocks
    from nbelastic.collectives.transport import Nodes, Tensors


_TREE_TAG = 1  # of messages; users' messages have 0


class GlooCommunicator(AsyncCommunicator):
    """A communicator of two or more ranks.

    As a part of another communicator it has that one's abort signal.
    """

    name = "gloo"

    def __init__(self, rendezvous: Rendezvous, abort_signal: AbortSignal | None = None) -> None:
        super().__init__(rendezvous, abort_signal or AbortSignal())
        self._owner = GlooGroupOwner(rendezvous, self._abort_signal)

    def connect(self) -> GlooCommunicator:
        self._abort_signal.check()
        self._owner.form()
        self._check_peers()
        self._owner.lift_limit()
        return self

    # -- operations ------------------------------------------------------------------------------

    def begin_allreduce(self, tensors: Tensors, op: Op) -> Handle:
        (tensor,) = tensors
        dtype, how = as_number(tensor.dtype, op)
        values, options = [tensor.view(dtype)], _OPTIONS[how]
        return self._begin(
            lambda: self._owner.group.allreduce(values, options),
            (lambda: tensor.div_(self.size)) if op is Op.AVERAGE else None,
        )

    def begin_allreduce_tree(self, nodes: Nodes, blocks: Blocks, outputs: Tensors) -> Handle:
        vectors, target = flattened(nodes, outputs)
        owner, signal, rank = self._owner, self._abort_signal, self.rank  # a task keeps no self

        def task(limit: timedelta) -> None:
            def exchange(received: Tensors, sent: Tensors) -> Handle:
                return _Messages(owner, signal, rank, limit, received, sent)

            sum_shares(rank, vectors, target, blocks, exchange).wait()

        return self._begin(lambda: task, lambda: copy_back(target, outputs), direction="tree")

    def begin_broadcast(self, tensor: torch.Tensor, root: int) -> Handle:
        options = BroadcastOptions()
        options.rootRank = root
        return self._begin(lambda: self._owner.group.broadcast([as_bytes(tensor)], options))

    def begin_allgather(self, outputs: Tensors, tensor: torch.Tensor) -> Handle:
        filled, source = [list(map(as_bytes, outputs))], [as_bytes(tensor)]
        return self._begin(lambda: self._owner.group.allgather(filled, source))

    def begin_all_to_all(self, outputs: Tensors, inputs: Tensors) -> Handle:
        sent = concatenate([as_bytes(tensor) for tensor in inputs])
        lengths = [[tensor.nbytes for tensor in tensors] for tensors in (outputs, inputs)]
        received = torch.empty(sum(lengths[0]), dtype=torch.uint8)
        return self._begin(
            lambda: self._owner.group.alltoall_base(received, sent, *lengths),
            lambda: copy_back(received, [as_bytes(output) for output in outputs]),
        )

    def begin_barrier(self) -> Handle:
        options = BarrierOptions()
        return self._begin(lambda: self._owner.group.barrier(options))

    def begin_send(self, parts: Tensors, to: int) -> Handle:
        message = as_bytes(parts[0] if len(parts) == 1 else torch.cat(list(parts)))
        # Begun here, in the order of calls; the executor only waits for its end.
        return self._begin(
            lambda: self._owner.group.send([message], to, 0).wait, direction=f"to-{to}"
        )

    def begin_receive(self, tensor: torch.Tensor, source: int) -> Handle:
        message = as_bytes(tensor)
        return self._begin(
            lambda: self._owner.group.recv([message], source, 0).wait, direction=f"from-{source}"
        )

    # -- state -----------------------------------------------------------------------------------

    def cut_connections(self) -> int:
        # A fork has its parent's sockets: a shutdown there would cut the parent off.
        return 0 if self._abort_signal.forked else self._owner.cut_connections()

    def close(self) -> None:
        if self._abort_signal.forked:
            return  # the owner's thread is in the parent
        self.close_subgroups()
        self._abort_signal.abort("the communicator is closed", orderly=self.idle)

    @property
    def idle(self) -> bool:
        """Whether no operation is under way."""
        return all(each.done() for each in self._owner.operations())

    def __del__(self) -> None:
        if hasattr(self, "_owner"):
            self.close()

    # -- from beginning to end -------------------------------------------------------------------

    def _begin(
        self,
        start: Callable[[], Work | Task],
        deliver: Callable[[], object] | None = None,
        direction: str | None = None,
    ) -> Handle:
        """Begin an operation, unless one under way turns out to have failed."""
        self.check()
        for earlier in self._owner.operations():
            failure = earlier.failure()
            if failure is not None:
                self._fail(failure)
            if earlier.done():
                self._release(earlier)  # it has succeeded, and may never be awaited
        failure = None
        with self._owner.use_lock:
            self._abort_signal.check()  # again: after an abort the owner waits for this lock once
            try:
                operation: GlooOperation | QueuedOperation
                if direction is None:
                    operation = GlooOperation(cast("Work", start()), self._owner.use_lock)
                else:
                    operation = self._owner.executor(direction).submit(cast("Task", start()))
                self._owner.under_way.add(operation)
            except RuntimeError as error:
                failure = first_sentence(error)  # raised outside the lock: an abort calls back
        if failure is not None:
            self._fail(failure)
        return OperationHandle(self, operation, deliver)

    def _release(self, operation: Operation) -> None:
        self._owner.under_way.difference_update([operation])


class _Messages:
    """An all-to-all of a sum along a tree, by messages, which have an order of their own.

    Gloo's own operations cannot be put together to a sum: ranks begin them in one order.
    """

    def __init__(
        self,
        owner: GlooGroupOwner,
        abort_signal: AbortSignal,
        rank: int,
        limit: timedelta,
        outputs: Tensors,
        inputs: Tensors,
    ) -> None:
        self._works: list[Work] = []
        self._limit = limit
        ranks = len(inputs)
        outputs[rank].copy_(inputs[rank])
        # Each rank begins with the next one, so that none is the first of all others.
        for step in range(1, ranks):
            to, source = (rank + step) % ranks, (rank - step) % ranks
            with owner.use_lock:
                abort_signal.check()
                if inputs[to].numel():  # both ends know the blocks, so both leave it out
                    self._works.append(owner.group.send([as_bytes(inputs[to])], to, _TREE_TAG))
                if outputs[source].numel():
                    message = [as_bytes(outputs[source])]
                    self._works.append(owner.group.recv(message, source, _TREE_TAG))

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait(self._limit)  # without the use lock, because the owner joins this thread


def _options(op: Op) -> AllreduceOptions:
    options = AllreduceOptions()
    options.reduceOp = getattr(ReduceOp, "SUM" if op is Op.AVERAGE else op.name)
    return options


_OPTIONS = {op: _options(op) for op in Op}
