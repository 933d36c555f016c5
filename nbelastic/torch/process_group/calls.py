"""Calls of torch.distributed, as operations on a group's communicator.

torch calls the methods by their names, from Python and from C++. Where these have two spellings,
the methods have both. Its options say whether a call waits.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import BarrierOptions

from nbelastic.collectives import Op
from nbelastic.torch.ops.coordination.coordination import coordination_over
from nbelastic.torch.ops.functions import splits_of
from nbelastic.torch.ops.operation.reduction import BitwiseOp
from nbelastic.torch.ops.operation.tensor_operations import (
    AllgatherInto,
    Allreduce,
    AlltoallInto,
    Barrier,
    Broadcast,
    ReducescatterInto,
    SparseAllreduce,
    kinds,
)
from nbelastic.torch.process_group.messages import PointToPoint
from nbelastic.torch.process_group.work import OperationQueue, OperationWork

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.collectives import Communicator
    from nbelastic.elastic.ranks.context import Context
    from nbelastic.torch.ops.operation.reduction import AnyOp
    from nbelastic.torch.ops.operation.tensor_operations import TensorOperation

    Base = object  # torch declares the overloads of the base class, which has more names
else:
    Base = dist.ProcessGroup

Tensors = list[torch.Tensor]
ReduceOp = dist.ReduceOp

_OPS: dict[Any, tuple[AnyOp, str]] = {
    ReduceOp.SUM: (Op.SUM, "sum"),
    ReduceOp.AVG: (Op.AVERAGE, "avg"),
    ReduceOp.MIN: (Op.MIN, "min"),
    ReduceOp.MAX: (Op.MAX, "max"),
    ReduceOp.PRODUCT: (Op.PRODUCT, "product"),
    ReduceOp.BAND: (BitwiseOp.BAND, "band"),
    ReduceOp.BOR: (BitwiseOp.BOR, "bor"),
    ReduceOp.BXOR: (BitwiseOp.BXOR, "bxor"),
    ReduceOp.PREMUL_SUM: (Op.SUM, "premul_sum"),
}


class CollectiveCalls(Base):
    """Collective operations and messages among the ranks of a group."""

    rank: Callable[[], int]  # the position of this rank at present
    size: Callable[[], int]
    communicator: Callable[[], Communicator]  # of the next operation
    here: Callable[[], CollectiveCalls]  # whose operations are those of the calling thread

    def __init__(self, context: Context, timeout_s: float) -> None:
        super().__init__(context.rank, context.size)  # type: ignore[call-arg]
        self.context = context
        self.queue = OperationQueue(timeout_s)
        self._collected: list[OperationWork] | None = None  # between start and end of coalescing

    # -- reductions --------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> OperationWork:
        tensors, (op, factor, word) = _listed(tensors), _reduction(opts, tensors)
        head = f"all_reduce ({word})"
        operation: TensorOperation[Any]
        if any(each.layout is not torch.strided for each in tensors):
            sparse = [t.detach().coalesce() if t.is_sparse else t for t in tensors]
            operation = SparseAllreduce(sparse, op, outputs=tensors)
            operation.pattern = head, kinds(tensors)
        else:
            operation = Allreduce(tensors, tensors, op, factor, head=head)
        return self._begin(operation, tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None
    ) -> OperationWork:
        (tensor,), root = _listed(tensors), _root(opts)
        how, factor, word = _reduction(op if isinstance(opts, int) else opts, tensors)
        head = f"reduce ({word}) to rank {root}"
        # Transports reduce to all ranks only, so on the others a copy takes the sum.
        into = [tensor if self.rank() == root else tensor.detach().clone()]
        return self._begin(Allreduce(into, into, how, factor, head=head), [tensor], opts)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> OperationWork:
        return self._reduce_scatter(_listed(outputs)[:1], [_inner(inputs)], opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None
    ) -> OperationWork:
        return self.reduce_scatter([output], [self._parts(whole, output.shape)], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, wholes: Tensors, opts: Any = None
    ) -> OperationWork:
        lists = [self._parts(w, o.shape) for o, w in zip(outputs, wholes, strict=True)]
        return self._reduce_scatter(outputs, lists, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, outputs: Tensors, lists: list[Tensors], opts: Any) -> OperationWork:
        op, factor, word = _reduction(opts, outputs)
        pattern = f"reduce_scatter ({word})", kinds([*itertools.chain(*lists)])
        return self._begin(ReducescatterInto(outputs, lists, op, factor, pattern), outputs, opts)

    # -- copies ------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> OperationWork:
        tensors, root = _listed(tensors), 0 if opts is None else _root(opts)
        return self._begin(Broadcast(tensors, tensors, root), tensors, opts)

    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> OperationWork:
        lists = outputs if isinstance(outputs[0], (list, tuple)) else [outputs]
        filled = [lists[0] if len(lists) == 1 else lists]
        return self._begin(AllgatherInto(lists, _listed(inputs)), filled, opts)

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> OperationWork:
        return self.allgather([list(each) for each in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> OperationWork:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> OperationWork:
        lists = [self._parts(o, t.shape) for o, t in zip(outputs, inputs, strict=True)]
        return self._begin(AllgatherInto(lists, inputs), outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> OperationWork:
        (tensor,), root, into = _listed(inputs), _root(opts), _inner(outputs)
        pattern = f"gather to rank {root}", kinds([tensor])
        nothing = [tensor.new_empty(0)] * self.size()  # transports have no gather of their own
        sent = [*nothing[:root], tensor, *nothing[root + 1 :]]
        received = into if self.rank() == root else nothing
        return self._begin(AlltoallInto(received, sent, pattern), [into], opts)

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> OperationWork:
        (output,), root = _listed(outputs), _root(opts)
        pattern = f"scatter from rank {root}", kinds([output])
        nothing = [output.new_empty(0)] * self.size()
        sent = _inner(inputs) if self.rank() == root else nothing
        received = [*nothing[:root], output, *nothing[root + 1 :]]
        return self._begin(AlltoallInto(received, sent, pattern), [output], opts)

    def alltoall(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, timeout: Any = None
    ) -> OperationWork:
        pattern = "all_to_all", ((inputs[0].dtype, ("*",)),)  # lengths may differ by rank
        return self._begin(AlltoallInto(outputs, inputs, pattern), outputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
        timeout: Any = None,
    ) -> OperationWork:
        outputs, inputs = self._rows(output, output_splits), self._rows(tensor, input_splits)
        pattern = "all_to_all", ((tensor.dtype, ("*",)),)
        return self._begin(AlltoallInto(outputs, inputs, pattern), [output], opts)

    alltoall_base = all_to_all_single

    # -- barriers and messages ---------------------------------------------------------------------

    def barrier(self, opts: Any = None, timeout: Any = None) -> OperationWork:
        options = opts if isinstance(opts, BarrierOptions) else None
        return self._begin(Barrier(foreseen=True), (), options)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()  # Lightning asks any group for it

    def send(self, tensors: Any, to: int, tag: int = 0) -> OperationWork:
        (tensor,) = _listed(tensors)
        return self._begin(PointToPoint(lambda mailbox: mailbox.send(tensor, to, tag)), [tensor])

    def recv(self, tensors: Any, source: int | None, tag: int = 0) -> OperationWork:
        (tensor,) = _listed(tensors)
        operation = PointToPoint(lambda mailbox: mailbox.receive(tensor, source, tag))
        return self._begin(operation, [tensor])

    def recv_anysource(self, tensors: Any, tag: int = 0) -> OperationWork:
        return self.recv(tensors, None, tag)

    # -- coalescing --------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self.here()._collected = []

    def _end_coalescing(self, device: torch.device | None = None) -> OperationWork:
        here = self.here()
        works, here._collected = here._collected or [], None
        return OperationWork.of_several(here.queue, works)

    # -- from call to communicator -----------------------------------------------------------------

    def _begin(
        self, operation: TensorOperation[Any], outputs: Sequence[Any], opts: Any = None
    ) -> OperationWork:
        """Begin an operation; ranks compare it first, unless foreseen."""
        here = self.here()
        if here is not self:
            return here._begin(operation, outputs, opts)
        waits = opts is not None and not getattr(opts, "asyncOp", True)
        work = OperationWork(self.queue, operation, outputs)
        try:
            if self._compare(work, waits):
                work.launch()
                work.check()
        except BaseException:
            if self.queue.in_backward:
                self.queue.fail()  # DDP's reducer, left half-way, is made anew by this count
            raise
        if self._collected is not None:
            self._collected.append(work)
        elif waits:
            work.complete()  # dist.* does not wait for it in all versions of torch
        return work

    def _compare(self, work: OperationWork, waits: bool) -> bool:
        """Compare an operation before its launch; False if that is deferred."""
        context, queue, pattern = self.context, self.queue, work.operation.pattern
        if not context.is_ranks_thread():
            waits = True  # only the rank's thread launches what is deferred
            communicator = work.communicator = self.communicator()
        else:
            context.defers, before = True, context.defers  # it may queue behind deferred ones
            try:
                communicator = work.communicator = self.communicator()
            finally:
                context.defers = before
        # In an elastic loop a failed operation must not touch its caller's tensors, but gradients.
        work.operation.fuses, work.operation.lends = False, not context.loops or queue.in_backward
        if pattern is None or communicator.size == 1:
            return True
        coordination = queue.coordination = coordination_over(communicator)
        comparison = None
        if waits:
            coordination.compare(communicator, pattern, limit_s=queue.timeout_s)
        else:
            comparison = coordination.expect(communicator, pattern, for_good=True)
        deferred = coordination.deferred
        # In backward, sums that would not overlap with it are launched at its end.
        delays = queue.in_backward and not communicator.capabilities.overlaps
        behind = communicator in [each for each, *_ in deferred]  # it must not overtake
        if comparison is None and (waits or not delays) and not behind:
            return True
        deferred.append((communicator, comparison, work.launch))
        if self._settle not in context.before_exchange:  # Horovod's must not overtake deferred ones
            context.before_exchange += (self._settle,)
        return False

    def _settle(self) -> None:
        """Launch deferred operations before an operation outside of groups begins."""
        its, context = self.queue.coordination, self.context
        if its is not None and its.deferred and not context.defers:
            self.queue.launch_deferred(
                lambda: not any(each.part_of is None for each, *_ in its.deferred)
            )
        if its is None or not its.deferred:
            others = context.before_exchange
            context.before_exchange = tuple(each for each in others if each != self._settle)

    def _parts(self, whole: torch.Tensor, shape: torch.Size) -> Tensors:
        """Return the part of each rank in a tensor of all parts in a row."""
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
        return list(torch.split(tensor.detach(), splits_of(tensor, splits or None, self.size())))


def _listed(tensors: Any) -> Tensors:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _reduction(opts: Any, tensors: Sequence[torch.Tensor]) -> tuple[AnyOp, float, str]:
    """Return a reduction, the factor of values before it, and its name in torch."""
    how: Any = ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
    kind = getattr(how, "op", how)  # a ReduceOp, or the kind itself
    op, word = _OPS.get(kind, (None, ""))
    if op is None:
        raise ValueError(f"{kind} is not a reduction of tensors; use SUM, AVG, MIN, MAX, …")
    if isinstance(op, BitwiseOp):
        for each in tensors:
            if each.is_floating_point() or each.is_complex():
                raise ValueError(f"{kind} is for whole numbers, not {each.dtype}")
    return op, how.__getstate__()[1] if word == "premul_sum" else 1.0, word


def _root(opts: Any) -> int:
    return opts if isinstance(opts, int) else int(opts.rootRank)


def _inner(tensors: Any) -> Any:
    """Return the only list in a list of lists, or a list of tensors as it is."""
    return tensors[0] if tensors and isinstance(tensors[0], (list, tuple)) else tensors
