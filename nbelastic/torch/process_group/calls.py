"""Calls of torch.distributed, as operations on a group's communicator.

torch calls the methods by their names, from Python and from C++. Where these have two spellings,
the methods have both.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import BarrierOptions

from nbelastic.torch.ops.coordination import coordination_over
from nbelastic.torch.process_group import operations
from nbelastic.torch.process_group.messages import monitored_barrier
from nbelastic.torch.process_group.work import OperationQueue, OperationWork

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.collectives import Communicator
    from nbelastic.elastic.ranks.context import Context
    from nbelastic.torch.process_group.operations import Started

    Base = object  # torch declares the overloads of the base class, which has more names
else:
    Base = dist.ProcessGroup

Tensors = list[torch.Tensor]


class CollectiveCalls(Base):
    """Collective operations and messages among the ranks of a group."""

    def __init__(self, context: Context, timeout_s: float) -> None:
        super().__init__(context.rank, context.size)  # type: ignore[call-arg]
        self.context = context
        self.queue = OperationQueue(timeout_s)
        self._collected: list[OperationWork] | None = None  # between start and end of coalescing
        self._sequence = 0  # of operations begun

    def size(self) -> int:
        """Return the number of ranks at present."""
        raise NotImplementedError

    def communicator(self) -> Communicator:
        """Return the communicator of the next operation."""
        raise NotImplementedError

    # -- reductions --------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> OperationWork:
        """Reduce tensors over all ranks, in place."""
        tensors, delay = _listed(tensors), not self._overlaps()
        how = _reduction(opts)
        what = f"all_reduce ({_word(how)})", _kinds(tensors)
        return self._begin(operations.allreduce, (tensors, how), tensors, what, opts, delay=delay)

    allreduce_coalesced = allreduce

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None
    ) -> OperationWork:
        """Reduce a tensor over all ranks, on the root only."""
        (tensor,), root = _listed(tensors), _root(opts)
        how = _reduction(op if isinstance(opts, int) else opts)
        return self._begin(
            operations.reduce,
            (tensor, root, how),
            [tensor],
            (f"reduce ({_word(how)}) to rank {root}", _kinds([tensor])),
            opts,
        )

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> OperationWork:
        """Reduce a list of tensors; each rank keeps its own."""
        output, *_ = _listed(outputs)
        parts, op = _inner(inputs), _reduction(opts)
        return self._begin(
            operations.reduce_scatter,
            (output, parts, op),
            [output],
            (f"reduce_scatter ({_word(op)})", _kinds(parts)),
            opts,
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None
    ) -> OperationWork:
        """Reduce a tensor; each rank keeps its part along the first dimension."""
        return self.reduce_scatter([output], [self._parts(whole, output.shape)], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, wholes: Tensors, opts: Any = None
    ) -> OperationWork:
        """Reduce several tensors; each rank keeps its parts."""
        op = _reduction(opts)
        each = [(o, self._parts(w, o.shape), op) for o, w in zip(outputs, wholes, strict=True)]
        what = f"reduce_scatter ({_word(op)})", _kinds(wholes)
        return self._begin(
            operations.each_of, (operations.reduce_scatter, each), outputs, what, opts
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- copies ------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> OperationWork:
        """Copy tensors of the root to all others."""
        tensors, root = _listed(tensors), 0 if opts is None else _root(opts)
        return self._begin(
            operations.broadcast,
            (tensors, root),
            tensors,
            (f"broadcast from rank {root}", _kinds(tensors)),
            opts,
        )

    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> OperationWork:
        """Collect tensors of all ranks."""
        inputs = _listed(inputs)
        lists = outputs if isinstance(outputs[0], (list, tuple)) else [outputs]
        return self._begin(
            operations.each_of,
            (operations.allgather, [*zip(lists, inputs, strict=True)]),
            [lists[0] if len(lists) == 1 else lists],
            ("all_gather", _kinds(inputs)),
            opts,
        )

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> OperationWork:
        """Collect several tensors of all ranks; `outputs` has a list for each rank."""
        return self.allgather([list(each) for each in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> OperationWork:
        """Collect tensors of all ranks in one."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> OperationWork:
        """Collect several tensors of all ranks, each in one."""
        each = [(self._parts(o, t.shape), t) for o, t in zip(outputs, inputs, strict=True)]
        return self._begin(
            operations.each_of,
            (operations.allgather, each),
            outputs,
            ("all_gather", _kinds(inputs)),
            opts,
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> OperationWork:
        """Collect tensors of all ranks on the root."""
        (tensor,), root, into = _listed(inputs), _root(opts), _inner(outputs)
        return self._begin(
            operations.gather,
            (into, tensor, root),
            [into],
            (f"gather to rank {root}", _kinds([tensor])),
            opts,
        )

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> OperationWork:
        """Copy tensors of the root to the ranks, one to each."""
        (output,), root = _listed(outputs), _root(opts)
        return self._begin(
            operations.scatter,
            (output, _inner(inputs), root),
            [output],
            (f"scatter from rank {root}", _kinds([output])),
            opts,
        )

    def alltoall(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, timeout: Any = None
    ) -> OperationWork:
        """Exchange tensors between all pairs of ranks."""
        return self._begin(
            operations.all_to_all,
            (outputs, inputs),
            outputs,
            ("all_to_all", ((inputs[0].dtype, ("*",)),)),
            opts,
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
        timeout: Any = None,
    ) -> OperationWork:
        """Exchange rows between all pairs of ranks."""
        return self._begin(
            operations.all_to_all,
            (self._rows(output, output_splits), self._rows(tensor, input_splits)),
            [output],
            ("all_to_all", ((tensor.dtype, ("*",)),)),
            opts,
        )

    alltoall_base = all_to_all_single

    # -- barriers and messages ---------------------------------------------------------------------

    def barrier(self, opts: Any = None, timeout: Any = None) -> OperationWork:
        """Wait for all ranks."""
        options = opts if isinstance(opts, BarrierOptions) else None
        return self._begin(operations.barrier, (), (), "barrier", options)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; those that do not come are named on rank 0."""
        monitored_barrier(self.communicator(), timeout, wait_all_ranks)

    def send(self, tensors: Any, to: int, tag: int = 0) -> OperationWork:
        """Send a tensor to another rank."""
        (tensor,) = _listed(tensors)
        return self._begin(operations.send, (tensor, to, tag), [tensor])

    def recv(self, tensors: Any, source: int | None, tag: int = 0) -> OperationWork:
        """Receive a tensor from another rank."""
        (tensor,) = _listed(tensors)
        return self._begin(operations.receive, (tensor, source, tag), [tensor])

    def recv_anysource(self, tensors: Any, tag: int = 0) -> OperationWork:
        """Receive a tensor from any rank."""
        return self.recv(tensors, None, tag)

    # -- coalescing --------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._collected = []

    def _end_coalescing(self, device: torch.device | None = None) -> OperationWork:
        works, self._collected = self._collected or [], None
        work = OperationWork(self.queue, lambda: operations.Started(works))
        work.start()
        return work

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    # -- from call to communicator -----------------------------------------------------------------

    def _overlaps(self) -> bool:
        if not self.queue.in_backward or not self.context.generation:
            return True
        return self.communicator().capabilities.overlaps

    def _private(self) -> bool:
        """Return whether a failed operation must not touch the tensors of its caller."""
        return getattr(self.context, "loops", 0) > 0 and not self.queue.in_backward

    def _begin(
        self,
        operation: Callable[..., Started],
        arguments: tuple[Any, ...],
        outputs: Sequence[Any],
        pattern: Any = None,
        opts: Any = None,
        *,
        delay: bool = False,
    ) -> OperationWork:
        """Begin an operation, whose pattern the ranks compare unless they have foreseen it."""
        waits = opts is not None and not getattr(opts, "asyncOp", True) and not delay
        begin = functools.partial(self._start, operation, arguments, pattern, waits)
        work = self.queue.add(OperationWork(self.queue, begin, outputs), delay=delay)
        if self._collected is not None:
            self._collected.append(work)
        elif waits:
            work.complete()  # dist.* does not wait for it in all versions of torch
        return work

    def _start(
        self,
        operation: Callable[..., Started],
        arguments: tuple[Any, ...],
        pattern: Any,
        waits: bool,
    ) -> Started:
        self._sequence += 1
        context, queue = self.context, self.queue
        context.defers, before = True, context.defers
        try:
            communicator = queue.communicator = self.communicator()
        finally:
            context.defers = before
        begin = functools.partial(operation, communicator, *arguments, self._private())
        if pattern is None or communicator.size == 1:
            return begin()
        coordination = queue.coordination = coordination_over(communicator)
        if not communicator.capabilities.carries_descriptions:
            communicator.history.apart = True
        comparison = None
        if waits:
            coordination.compare(communicator, pattern, limit_s=queue.timeout_s)
        else:
            comparison = coordination.expect(communicator, pattern, for_good=True)
        deferred = coordination.deferred
        if comparison is None and not any(each.communicator is communicator for each in deferred):
            return begin()
        started = operations.DeferredStart(communicator, comparison, begin)
        deferred.append(started)
        if self._settle not in context.before_exchange:
            context.before_exchange += (self._settle,)
        return started

    def _settle(self) -> None:
        """Launch what is deferred before an operation that is not of a group begins."""
        its, context = self.queue.coordination, self.context
        if its is not None and its.deferred and not context.defers:
            self.queue.launch_deferred(
                lambda: not any(each.communicator.part_of is None for each in its.deferred)
            )
        if its is None or not its.deferred:
            others = context.before_exchange
            context.before_exchange = tuple(each for each in others if each != self._settle)

    def _parts(self, whole: torch.Tensor, shape: torch.Size) -> Tensors:
        """Return the part of each rank in a tensor that holds those of all, one after the other."""
        size = self.size()
        if whole.numel() != size * shape.numel():
            raise ValueError(
                f"a tensor for {size} ranks must have {size} times {shape.numel()} elements, as "
                f"{list(shape)} for each; it has {whole.numel()} in {list(whole.shape)}"
            )
        if not whole.is_contiguous():
            raise ValueError("the tensor that holds the parts of all ranks must be contiguous")
        return [each.view(shape) for each in whole.detach().view(size, -1).unbind()]

    def _rows(self, tensor: torch.Tensor, splits: Sequence[int]) -> Tensors:
        size = self.size()
        if splits:
            if len(splits) != size or sum(splits) != tensor.shape[0]:
                raise ValueError(
                    f"splits must be {size} numbers with the sum {tensor.shape[0]}, not "
                    f"{list(splits)}"
                )
            return list(torch.split(tensor.detach(), list(splits)))
        if tensor.shape[0] % size:
            raise ValueError(
                f"{tensor.shape[0]} rows cannot be dealt to {size} ranks evenly; give splits"
            )
        return list(torch.split(tensor.detach(), tensor.shape[0] // size))


def _listed(tensors: Any) -> Tensors:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _reduction(opts: Any) -> Any:
    if opts is None:
        return dist.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)


def _word(op: Any) -> str:
    return str(getattr(op, "op", op)).rpartition(".")[2].lower()


def _kinds(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    return tuple((tensor.dtype, tensor.shape) for tensor in tensors)


def _root(opts: Any) -> int:
    return opts if isinstance(opts, int) else int(opts.rootRank)


def _inner(tensors: Any) -> Any:
    """Return the only list in a list of lists, or a list of tensors as it is."""
    return tensors[0] if tensors and isinstance(tensors[0], (list, tuple)) else tensors
