"""Communicator over Gloo: TCP between any ranks.

It adds to Gloo that waiting threads can be freed, and that whatever is left behind ends by itself
(:mod:`nbelastic.collectives.gloo.group`).

Operations that only move data move bytes, so they take any type. An average is a sum that is
divided on completion.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceOp,
)

from nbelastic.collectives.abort_signal import AbortSignal
from nbelastic.collectives.buffers import as_bytes, concatenate
from nbelastic.collectives.communicator import Rendezvous
from nbelastic.collectives.gloo.group import GlooGroupOwner, GlooOperation
from nbelastic.collectives.operations import AsyncCommunicator, OperationHandle, first_sentence
from nbelastic.collectives.transport import Handle, Op
from nbelastic.collectives.tree_exchange import flattened, sum_shares

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from torch._C._distributed_c10d import Work

    from nbelastic.collectives.operations import BlockingTask, Operation, QueuedOperation
    from nbelastic.collectives.reduction_tree import Blocks


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
        return self

    # -- operations ------------------------------------------------------------------------------

    def begin_allreduce(self, tensors: Sequence[torch.Tensor], op: Op) -> Handle:
        (tensor,) = tensors
        flat, options = tensor, _OPTIONS[op]
        if tensor.dtype is torch.bool:
            flat, options = as_bytes(tensor), _OPTIONS_FOR_BOOL[op]
        average = op is Op.AVERAGE
        return self._begin(
            lambda: self._owner.group.allreduce([flat], options),
            (lambda: tensor.div_(self.size)) if average else None,
        )

    def begin_allreduce_tree(
        self,
        nodes: Sequence[Sequence[torch.Tensor]],
        blocks: Blocks,
        outputs: Sequence[torch.Tensor],
    ) -> Handle:
        vectors, target = flattened(nodes, outputs)
        task = TreeSum(self._owner, self._abort_signal, self.rank, vectors, target.vector, blocks)
        return self._begin(lambda: task, target.deliver, direction="tree")

    def begin_broadcast(self, tensor: torch.Tensor, root: int) -> Handle:
        options = BroadcastOptions()
        options.rootRank = root
        return self._begin(lambda: self._owner.group.broadcast([as_bytes(tensor)], options))

    def begin_allgather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Handle:
        filled, source = [list(map(as_bytes, outputs))], [as_bytes(tensor)]
        return self._begin(lambda: self._owner.group.allgather(filled, source))

    def begin_all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Handle:
        sent = concatenate([as_bytes(tensor) for tensor in inputs])
        sent_bytes = [tensor.nbytes for tensor in inputs]
        received_bytes = [tensor.nbytes for tensor in outputs]
        received = torch.empty(sum(received_bytes), dtype=torch.uint8)

        def deliver() -> None:
            for output, piece in zip(outputs, torch.split(received, received_bytes), strict=True):
                as_bytes(output).copy_(piece)

        return self._begin(
            lambda: self._owner.group.alltoall_base(received, sent, received_bytes, sent_bytes),
            deliver,
        )

    def begin_barrier(self) -> Handle:
        options = BarrierOptions()
        return self._begin(lambda: self._owner.group.barrier(options))

    def begin_send(self, parts: Sequence[torch.Tensor], to: int) -> Handle:
        message = as_bytes(parts[0] if len(parts) == 1 else torch.cat(list(parts)))
        return self._begin(lambda: self._owner.group.send([message], to, 0), direction=f"to-{to}")

    def begin_receive(self, tensor: torch.Tensor, source: int) -> Handle:
        message = as_bytes(tensor)
        return self._begin(
            lambda: self._owner.group.recv([message], source, 0), direction=f"from-{source}"
        )

    # -- state -----------------------------------------------------------------------------------

    def cut_connections(self) -> int:
        return 0 if self._abort_signal.forked else self._owner.cut_connections()

    def close(self) -> None:
        if self._abort_signal.forked:
            return
        self.close_subgroups()
        self._abort_signal.abort("the communicator is closed", orderly=self.idle)

    @property
    def idle(self) -> bool:
        """Whether no operation is under way."""
        return all(each.done() for each in self._owner.operations())

    def check(self) -> None:
        self._owner.check_formed()
        self._abort_signal.check()

    def __del__(self) -> None:
        if hasattr(self, "_owner"):
            self.close()

    # -- from beginning to end -------------------------------------------------------------------

    def _begin(
        self,
        start: Callable[[], Work | BlockingTask],
        deliver: Callable[[], object] | None = None,
        direction: str | None = None,
    ) -> Handle:
        """Begin an operation, unless one under way turns out to have failed."""
        self._abort_signal.check()
        self._owner.check_formed()
        for earlier in self._owner.operations():
            failure = earlier.failure()
            if failure is not None:
                self._fail(failure)
            if earlier.done():
                self._owner.release(earlier)
        failure = None
        with self._owner.use_lock:
            self._abort_signal.check()
            try:
                operation = self._start(start, direction)
            except RuntimeError as error:
                failure = first_sentence(error)
        if failure is not None:
            self._fail(failure)
        return OperationHandle(self, operation, deliver)

    def _start(
        self, start: Callable[[], Work | BlockingTask], direction: str | None
    ) -> GlooOperation | QueuedOperation:
        operation: GlooOperation | QueuedOperation
        if direction is None:
            operation = GlooOperation(cast("Work", start()), self._owner.use_lock)
        else:
            operation = self._owner.executor(direction).submit(start())
        self._owner.track(operation)
        return operation

    def _release(self, operation: Operation) -> None:
        self._owner.release(operation)


class TreeSum:
    """A sum along a tree, for an executor: by messages, which have an order of their own.

    Gloo's own operations cannot be put together to this: ranks begin them in one order.
    """

    def __init__(
        self,
        owner: GlooGroupOwner,
        abort_signal: AbortSignal,
        rank: int,
        vectors: Sequence[torch.Tensor],
        output: torch.Tensor,
        blocks: Blocks,
    ) -> None:
        self._owner = owner
        self._abort_signal = abort_signal
        self._rank = rank
        self._arguments = rank, vectors, output, blocks
        self._limit: timedelta

    def wait(self, limit: timedelta) -> None:
        """Perform it. Raises ``RuntimeError`` if a message fails, or the group is aborted."""
        self._limit = limit
        sum_shares(*self._arguments, self._exchange).wait()

    def _exchange(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> _Messages:
        ranks = len(inputs)
        outputs[self._rank].copy_(inputs[self._rank])
        works = []
        # Each rank begins with the next one, so that none is the first of all others.
        for step in range(1, ranks):
            to, source = (self._rank + step) % ranks, (self._rank - step) % ranks
            with self._owner.use_lock:
                self._abort_signal.check()
                if inputs[to].numel():
                    works.append(self._owner.group.send([as_bytes(inputs[to])], to, _TREE_TAG))
                if outputs[source].numel():
                    received = [as_bytes(outputs[source])]
                    works.append(self._owner.group.recv(received, source, _TREE_TAG))
        return _Messages(works, self._limit)


class _Messages:
    """A handle on messages under way."""

    def __init__(self, works: Sequence[Work], limit: timedelta) -> None:
        self._works = works
        self._limit = limit

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait(self._limit)


def _options(op: ReduceOp.RedOpType) -> AllreduceOptions:
    options = AllreduceOptions()
    options.reduceOp = ReduceOp(op)
    return options


_OPTIONS = {
    Op.SUM: _options(ReduceOp.SUM),
    Op.AVERAGE: _options(ReduceOp.SUM),
    Op.MIN: _options(ReduceOp.MIN),
    Op.MAX: _options(ReduceOp.MAX),
    Op.PRODUCT: _options(ReduceOp.PRODUCT),
}
# A sum of booleans is whether any is true, a product whether all are; bytes would overflow.
_OPTIONS_FOR_BOOL = {
    Op.SUM: _OPTIONS[Op.MAX],
    Op.MIN: _OPTIONS[Op.MIN],
    Op.MAX: _OPTIONS[Op.MAX],
    Op.PRODUCT: _OPTIONS[Op.MIN],
}
