"""Process group of torch.distributed over the present generation.

torch calls the methods by their names, from Python and from C++. Where these have two spellings,
the methods have both. Its options say whether a call waits.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import BarrierOptions
from torch.distributed.constants import default_pg_timeout

from nbelastic.collectives import Communicator, Op, SoloCommunicator
from nbelastic.elastic.ranks.groups import Group
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
    from nbelastic.elastic.ranks.context import Context
    from nbelastic.torch.ops.operation.reduction import AnyOp
    from nbelastic.torch.ops.operation.tensor_operations import TensorOperation

    Base = object  # torch declares the overloads of the base class, which has more names
else:
    Base = dist.ProcessGroup

Tensors = list[torch.Tensor]
ReduceOp = dist.ReduceOp

NAME = "nbelastic"

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


class ElasticProcessGroup(Base):
    """All ranks of the job at the time of each call, or some of them.

    After a reset, a group of some consists of those that are left. An operation's limit is
    `timeout`, if that is shorter than torch's own half hour; else it is the job's.
    """

    supports_splitting = supports_coalescing = supports_time_estimate = False
    supports_tensor_alloc = supports_reconfigure = False
    group_name, group_desc = NAME, ""  # in place of the properties of torch's class
    options = None  # of the back end: none but the timeout of the job

    def __init__(self, context: Context, timeout: Any = None, its: Group | None = None) -> None:
        super().__init__(context.rank, context.size)  # type: ignore[call-arg]
        self.context = context
        self.queue = OperationQueue(_short(timeout))
        self._its = its or Group(context)
        self._second: ElasticProcessGroup | None = None  # the same ranks, for other threads
        self._alone: SoloCommunicator | None = None
        self._latest: Communicator | None = None  # of the last operation
        self._collected: list[OperationWork] | None = None  # between start and end of coalescing

    # -- who is in it ------------------------------------------------------------------------------

    def rank(self) -> int:
        return 0 if self._alone is not None else self._its.rank

    def size(self) -> int:
        return 1 if self._alone is not None else self._its.size

    getRank, getSize = rank, size  # noqa: N815 - C++ names

    @property
    def ranks(self) -> list[int]:
        """The ranks of the job that are in the group."""
        return self._its.ranks

    @property
    def generation(self) -> int:
        """The number of the present generation; 0 before the first."""
        return self.context.generation

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Make the group one of this rank alone, which waits for no other, in a ``with`` block."""
        before = self._alone
        self._alone = before or SoloCommunicator(generation=self.context.generation)
        try:
            yield
        finally:
            self._alone = before

    def communicator(self) -> Communicator:
        self._latest = self._alone or self._its.communicator()  # abort() must not form another
        return self._latest

    def here(self) -> ElasticProcessGroup:
        """Return this group; for a second thread that uses all ranks, its own of the same ranks."""
        if self._alone or not self._its.is_global or self.context.is_ranks_thread():
            return self
        if self._second is None:  # ranks pair operations by order; two threads have none
            self._second = ElasticProcessGroup(self.context, None, self._its.apart("threads"))
            self._second.queue.timeout_s = self.queue.timeout_s
        return self._second

    def new_group(
        self,
        ranks: Sequence[int],
        timeout: Any = None,
        pg_options: Any = None,
        group_name: str = "",
        group_desc: str | None = None,
    ) -> ElasticProcessGroup | None:
        """Return a group of some ranks; None if this rank is none of them."""
        # On all ranks, because they count their groups.
        its = Group.of_ranks(self.context, [self.ranks[each] for each in ranks], group_name)
        if its.rank < 0:
            return None
        group = ElasticProcessGroup(self.context, timeout, its)
        if self.context.generation:
            its.connected_to(its.parent())  # all members are here
        group.setGroupName(group_name)
        group.setGroupDesc(group_desc or "undefined")
        return group

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

    # -- names -------------------------------------------------------------------------------------

    def name(self) -> str:
        return NAME

    getBackendName = _get_backend_name = name  # noqa: N815

    def getGroupName(self) -> str:  # noqa: N802
        return self.group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self.group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self.group_desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self.group_desc = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(each) for each in kinds]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def __repr__(self) -> str:
        return f"<nbelastic process group {self.group_name!r}: rank {self.rank()} of {self.size()}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _group_of_this_process, (self.group_name,)  # connections do not travel

    def __deepcopy__(self, memo: dict[int, Any]) -> ElasticProcessGroup:
        return self  # a copied DDP reduces among the same ranks

    # -- life --------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        self.queue.timeout_s = _short(timeout)

    _set_default_timeout = set_timeout

    def _has_hooks(self) -> bool:
        return False

    def shutdown(self) -> None:
        """Forget operations, and close the communicator of a part; the generation goes on."""
        self.queue.drop()
        whole, name, _ = (self._latest and self._latest.part_of) or (lambda: None, "", [])
        if (parent := whole()) is not None:
            parent.close_subgroup(name)

    def abort(self) -> None:
        """End all operations under way on this rank, and with them the generation; any thread."""
        if self._latest is not None and self._latest.generation == self.generation:
            self._latest.abort("the process group was aborted")


def _short(timeout: Any) -> float:
    """Return a limit in seconds; 0 for torch's own and for longer ones."""
    short = isinstance(timeout, timedelta) and timeout < default_pg_timeout
    return timeout.total_seconds() if short else 0.0


def _group_of_this_process(name: str) -> Any:
    """Return the group of a name in this process, for an unpickled object."""
    if not dist.is_initialized():
        return None
    groups = dist.distributed_c10d._world.pg_names.items()
    found = (group for group, each in groups if each == name)
    return next(found, dist.group.WORLD)


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
