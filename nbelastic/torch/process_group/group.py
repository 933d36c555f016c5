"""Process group of torch.distributed over the present generation."""

from __future__ import annotations

import contextlib
import functools
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import BarrierOptions, ErrorType
from torch.distributed.constants import default_pg_timeout

from nbelastic.collectives import SoloCommunicator
from nbelastic.elastic.ranks.subgroups import Subgroup
from nbelastic.errors import CollectiveError, NbelasticError
from nbelastic.torch.ops.operation import description
from nbelastic.torch.process_group import operations
from nbelastic.torch.process_group.messages import Mailbox, mailbox_of
from nbelastic.torch.process_group.operations import Started
from nbelastic.torch.process_group.work import OperationQueue, OperationWork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nbelastic.collectives import Communicator
    from nbelastic.elastic.ranks.context import Context

    Base = object  # torch declares the overloads of the base class, which has more names
else:
    Base = dist.ProcessGroup

NAME = "nbelastic"

Tensors = list[torch.Tensor]

_BARRIER_TAG = 2**62  # tag of messages of a monitored barrier

_JOB_CHOOSES = (
    "{}(): the ranks of this group are those of the job, which chooses them; train in "
    "hvd.elastic.run, where the group follows each change by itself"
)


class ElasticProcessGroup(Base):
    """All ranks that the job has at the time of each call.

    torch calls the methods by their names, from Python and from C++. Where these have two
    spellings, the methods have both.

    An operation's limit is `timeout`, if that is shorter than torch's own half hour; else it is the
    job's.
    """

    supports_splitting = supports_coalescing = supports_time_estimate = False
    supports_tensor_alloc = False
    # Who calls reconfigure() chooses the ranks, and here the job chooses them. The group follows by
    # itself, in `hvd.elastic.run`.
    supports_reconfigure = False

    def __init__(self, context: Context, timeout: Any = None) -> None:
        super().__init__(context.rank, context.size)  # type: ignore[call-arg]
        self.context = context
        self.queue = OperationQueue(_short(timeout))
        self._alone: SoloCommunicator | None = None
        self._latest: Communicator | None = None  # of the last operation
        self._collected: list[OperationWork] | None = None  # between start and end of coalescing
        self._name, self._desc = NAME, ""
        self._sequence = 0

    # -- who is in it ------------------------------------------------------------------------------

    def rank(self) -> int:
        """Return the position of this rank at present."""
        return 0 if self._alone is not None else self.context.rank

    def size(self) -> int:
        """Return the number of ranks at present."""
        return 1 if self._alone is not None else self.context.size

    getRank, getSize = rank, size  # noqa: N815 - C++ names

    @property
    def ranks(self) -> list[int]:
        """The ranks of the job that are in the group."""
        return list(range(self.context.size))

    @property
    def generation(self) -> int:
        """Number of the present generation; 0 before the first."""
        return self.context.generation

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Make the group one of this rank alone, for the length of a ``with`` block.

        Before the first generation a rank that joins others must not wait for them.
        """
        before = self._alone
        self._alone = before or SoloCommunicator(generation=self.context.generation)
        try:
            yield
        finally:
            self._alone = before

    def communicator(self) -> Communicator:
        """Return the communicator of the next operation."""
        self._latest = self._alone or self.context.communicator()
        return self._latest

    def new_group(
        self,
        ranks: Sequence[int],
        timeout: Any = None,
        pg_options: Any = None,
        group_name: str = "",
        group_desc: str | None = None,
    ) -> SubProcessGroup | None:
        """Return a group of some ranks; None if this rank is none of them."""
        del pg_options
        members = [self.ranks[each] for each in ranks]
        if self.context.rank not in members:
            Subgroup(self.context, members, group_name)  # counts, as on its members
            return None
        group = SubProcessGroup(self.context, members, group_name, timeout)
        if self.context.generation:
            group.communicator()  # all members are here
        group.setGroupName(group_name)
        group.setGroupDesc(group_desc or "undefined")
        return group

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: Any = None,
        opts: Any = None,
        group_name: str = "",
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> SubProcessGroup | None:
        """Return the group of some ranks of this one."""
        del device_types
        return self.new_group(ranks, timeout, opts, group_name, group_desc)

    splitGroup = split_group  # noqa: N815

    def _private(self) -> bool:
        """Return whether a failed operation must not touch the tensors of its caller."""
        return getattr(self.context, "loops", 0) > 0 and not self.queue.in_backward

    # -- names -------------------------------------------------------------------------------------

    def name(self) -> str:
        """Return the name of the back end."""
        return NAME

    getBackendName = _get_backend_name = name  # noqa: N815

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name of the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name of the group."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the description of the group."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Set the description of the group."""
        self._desc = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    @property
    def group_name(self) -> str:
        """The name of the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The description of the group."""
        return self._desc

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(each) for each in kinds]

    def _get_backend(self, device: torch.device) -> Any:
        del device
        return self

    @property
    def options(self) -> Any:
        """Options of the back end: none but the timeout of the job."""
        return None

    def __repr__(self) -> str:
        return f"<nbelastic process group {self._name!r}: rank {self.rank()} of {self.size()}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _group_of_this_process, (self._name,)

    def __deepcopy__(self, memo: dict[int, Any]) -> ElasticProcessGroup:
        return self

    # -- reductions --------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> OperationWork:
        """Reduce tensors over all ranks, in place."""
        del timeout
        tensors = _listed(tensors)
        op, delay = _reduction(opts), not self._overlaps()
        return self._begin(
            lambda communicator, private: operations.allreduce(communicator, tensors, op, private),
            tensors,
            delay=delay,
        )

    allreduce_coalesced = allreduce

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None
    ) -> OperationWork:
        """Reduce a tensor over all ranks, on the root only."""
        del timeout
        (tensor,) = _listed(tensors)
        root = opts if isinstance(opts, int) else opts.rootRank
        how = _reduction(op if isinstance(opts, int) else opts)
        return self._begin(
            lambda communicator, private: operations.reduce(
                communicator, tensor, root, how, private
            ),
            [tensor],
            opts,
            lambda: description.of_tensors(f"reduce ({_word(how)}) to rank {root}", [tensor]),
        )

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> OperationWork:
        """Reduce a list of tensors; each rank keeps its own."""
        del timeout
        output, *_ = _listed(outputs)
        parts = inputs[0] if isinstance(inputs[0], (list, tuple)) else inputs
        op = _reduction(opts)
        return self._begin(
            lambda communicator, private: operations.reduce_scatter(
                communicator, output, parts, op, private
            ),
            [output],
            opts,
            lambda: description.of_tensors(f"reduce_scatter ({_word(op)})", parts),
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None
    ) -> OperationWork:
        """Reduce a tensor; each rank keeps its part along the first dimension."""
        parts = self._parts(whole, output.shape)
        return self.reduce_scatter([output], [parts], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, wholes: Tensors, opts: Any = None
    ) -> OperationWork:
        """Reduce several tensors; each rank keeps its parts."""
        op = _reduction(opts)
        pairs = [
            (out, self._parts(each, out.shape)) for out, each in zip(outputs, wholes, strict=True)
        ]

        def start(communicator: Communicator, private: bool) -> Started:
            return Started(
                [
                    operations.reduce_scatter(communicator, out, parts, op, private)
                    for out, parts in pairs
                ]
            )

        return self._begin(start, outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- copies ------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> OperationWork:
        """Copy tensors of the root to all others."""
        del timeout
        tensors = _listed(tensors)
        root = opts if isinstance(opts, int) else 0 if opts is None else opts.rootRank
        return self._begin(
            lambda communicator, private: operations.broadcast(
                communicator, tensors, root, private
            ),
            tensors,
            opts,
            lambda: description.broadcast(root, tensors),
        )

    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> OperationWork:
        """Collect tensors of all ranks."""
        del timeout
        inputs = _listed(inputs)
        lists = outputs if isinstance(outputs[0], (list, tuple)) else [outputs]

        def start(communicator: Communicator, private: bool) -> Started:
            return Started(
                [
                    operations.allgather(communicator, into, each, private)
                    for into, each in zip(lists, inputs, strict=True)
                ]
            )

        filled = lists[0] if len(lists) == 1 else lists
        return self._begin(
            start, [filled], opts, lambda: description.of_tensors("all_gather", inputs)
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
        pairs = [
            (self._parts(output, tensor.shape), tensor)
            for output, tensor in zip(outputs, inputs, strict=True)
        ]

        def start(communicator: Communicator, private: bool) -> Started:
            return Started(
                [
                    operations.allgather(communicator, parts, tensor, private)
                    for parts, tensor in pairs
                ]
            )

        return self._begin(
            start, outputs, opts, lambda: description.of_tensors("all_gather", inputs)
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> OperationWork:
        """Collect tensors of all ranks on the root."""
        del timeout
        (tensor,) = _listed(inputs)
        root = opts if isinstance(opts, int) else opts.rootRank
        into = outputs[0] if outputs and isinstance(outputs[0], (list, tuple)) else outputs
        return self._begin(
            lambda communicator, private: operations.gather(
                communicator, into, tensor, root, private
            ),
            [into],
            opts,
            lambda: description.of_tensors(f"gather to rank {root}", [tensor]),
        )

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> OperationWork:
        """Copy tensors of the root to the ranks, one to each."""
        del timeout
        (output,) = _listed(outputs)
        root = opts if isinstance(opts, int) else opts.rootRank
        parts = inputs[0] if inputs and isinstance(inputs[0], (list, tuple)) else inputs
        return self._begin(
            lambda communicator, private: operations.scatter(
                communicator, output, parts, root, private
            ),
            [output],
            opts,
            lambda: description.of_tensors(f"scatter from rank {root}", [output]),
        )

    def alltoall(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, timeout: Any = None
    ) -> OperationWork:
        """Exchange tensors between all pairs of ranks."""
        del timeout
        return self._begin(
            lambda communicator, private: operations.all_to_all(
                communicator, outputs, inputs, private
            ),
            outputs,
            opts,
            lambda: f"all_to_all of {description.kind(inputs[0].dtype, ['*'])}",
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
        del timeout
        outputs, inputs = self._rows(output, output_splits), self._rows(tensor, input_splits)
        return self._begin(
            lambda communicator, private: operations.all_to_all(
                communicator, outputs, inputs, private
            ),
            [output],
            opts,
            lambda: f"all_to_all of {description.kind(tensor.dtype, ['*'])}",
        )

    alltoall_base = all_to_all_single

    # -- barriers and messages ---------------------------------------------------------------------

    def barrier(self, opts: Any = None, timeout: Any = None) -> OperationWork:
        """Wait for all ranks."""
        del timeout
        return self._begin(
            lambda communicator, _: operations.barrier(communicator),
            (),
            opts if isinstance(opts, BarrierOptions) else None,
            lambda: "barrier",
        )

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; those that do not come are named on rank 0."""
        if isinstance(timeout, (int, float)):
            timeout = timedelta(seconds=timeout)
        limit_s = timeout.total_seconds() if isinstance(timeout, timedelta) else 0.0
        mailbox, rank, size = self._messages(), self.rank(), self.size()
        if timeout == timedelta(0):
            raise RuntimeError(f"Rank {rank} timed out in monitoredBarrier after 0 ms")
        token = torch.zeros(1, dtype=torch.uint8)
        if rank != 0:
            try:
                mailbox.send(token, 0, _BARRIER_TAG).wait(limit_s)
                mailbox.receive(token, 0, _BARRIER_TAG).wait(limit_s)
            except CollectiveError as error:
                self.context.communicator().check()
                raise RuntimeError(
                    f"Rank 0 timed out in monitoredBarrier after {limit_s * 1000:.0f} ms"
                ) from error
            return
        waiting = {other: mailbox.receive(token, other, _BARRIER_TAG) for other in range(1, size)}
        end, late = time.monotonic() + limit_s, []
        for other, receive in waiting.items():
            try:
                receive.wait(max(end - time.monotonic(), 1e-3) if limit_s else 0.0)
            except CollectiveError:
                self.context.communicator().check()
                late.append(other)
                if not wait_all_ranks:
                    break
        if late:
            names = ", ".join(map(str, late))
            raise RuntimeError(
                f"Ranks {names} failed to pass monitoredBarrier in {limit_s * 1000:.0f} ms"
                if len(late) > 1
                else f"Rank {names} failed to pass monitoredBarrier in {limit_s * 1000:.0f} ms"
            )
        for sent in [mailbox.send(token, other, _BARRIER_TAG) for other in waiting]:
            sent.wait()

    def send(self, tensors: Any, to: int, tag: int = 0) -> OperationWork:
        """Send a tensor to another rank."""
        (tensor,) = _listed(tensors)

        def start(_: Communicator, __: bool) -> Started:
            sending = self._messages().send(tensor, to, tag)
            return _Message(sending)

        return self._begin(start, [tensor])

    def recv(self, tensors: Any, source: int | None, tag: int = 0) -> OperationWork:
        """Receive a tensor from another rank."""
        (tensor,) = _listed(tensors)

        def start(_: Communicator, __: bool) -> Started:
            receiving = self._messages().receive(tensor, source, tag)

            def note() -> None:
                work.source = receiving.source  # type: ignore[attr-defined]

            return _Message(receiving, note)

        work = OperationWork(self.queue, functools.partial(self._start, start), [tensor])
        return self.queue.add(work, delay=False)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> OperationWork:
        """Receive a tensor from any rank."""
        return self.recv(tensors, None, tag)

    # -- coalescing --------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        del device
        self._collected = []

    def _end_coalescing(self, device: torch.device | None = None) -> OperationWork:
        del device
        works, self._collected = self._collected or [], None

        def start() -> Started:
            return Started(works)

        work = OperationWork(self.queue, start)
        work.start()
        return work

    # -- life --------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of each operation, if it is shorter than torch's own half hour."""
        self.queue.timeout_s = _short(timeout)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """Do nothing: the ranks are connected as a generation forms."""

    def _has_hooks(self) -> bool:
        return False

    def shutdown(self) -> None:
        """Forget operations; the generation goes on."""
        self.queue.drop()

    def abort(self) -> None:
        """End all operations under way on this rank, and with them the generation; any thread."""
        latest = self._latest
        if latest is not None and latest.generation == self.generation:
            latest.abort("the process group was aborted")

    def get_error(self) -> Any:
        """Return whether the group works, in torch's words; any thread may ask."""
        latest = self._latest
        if latest is not None and latest.generation == self.generation:
            try:
                latest.check()
            except CollectiveError:
                return ErrorType.COMM_ERROR
        return ErrorType.SUCCESS

    def get_reconfigure_handle(self) -> str:
        """Refuse: see :attr:`supports_reconfigure`."""
        raise NbelasticError(_JOB_CHOOSES.format("get_reconfigure_handle"))

    def reconfigure(self, opts: Any = None) -> None:
        """Refuse: see :attr:`supports_reconfigure`."""
        del opts
        raise NbelasticError(_JOB_CHOOSES.format("reconfigure"))

    # -- from call to communicator -----------------------------------------------------------------

    def _overlaps(self) -> bool:
        if self._alone is not None or not self.queue.in_backward or not self.context.generation:
            return True
        return self.communicator().capabilities.overlaps

    def _messages(self) -> Mailbox:
        return mailbox_of(self.communicator())

    def _begin(
        self,
        start: Callable[[Communicator, bool], Started],
        outputs: Sequence[Any],
        opts: Any = None,
        describe: Callable[[], str] | None = None,
        *,
        delay: bool = False,
    ) -> OperationWork:
        """Begin an operation; one that is waited for at once is compared with the other ranks'."""
        compared = describe if opts is not None and not getattr(opts, "asyncOp", True) else None
        begin = functools.partial(self._start, start, compared)
        work = self.queue.add(OperationWork(self.queue, begin, outputs), delay=delay)
        if self._collected is not None:
            self._collected.append(work)
        elif compared is not None:
            work.complete()  # dist.* does not wait for it in all versions of torch
        return work

    def _start(
        self,
        start: Callable[[Communicator, bool], Started],
        describe: Callable[[], str] | None = None,
    ) -> Started:
        self._sequence += 1
        communicator = self.communicator()
        # A comparison waits for all ranks, and knows no shorter limit.
        if describe is not None and communicator.size > 1 and not self.queue.timeout_s:
            self._agree(communicator, describe())
        return start(communicator, self._private())

    def _agree(self, communicator: Communicator, what: str) -> None:
        """Compare the operation over the ranks; whether a change is coming rides on that."""
        flags = communicator.agree(what, self.context.change_flag())
        self.context.agree(any(flags))

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


class SubProcessGroup(ElasticProcessGroup):
    """Some of the ranks of the job; after a reset, those of them that are left.

    Its `ranks` are those of the present generation, this one among them.
    """

    def __init__(
        self, context: Context, ranks: Sequence[int], name: str, timeout: Any = None
    ) -> None:
        self._members = Subgroup(context, ranks, name)
        super().__init__(context, timeout)

    def rank(self) -> int:
        """Return the position of this rank in the group at present."""
        return 0 if self._alone is not None else self._members.rank

    def size(self) -> int:
        """Return the number of members at present."""
        return 1 if self._alone is not None else self._members.size

    getRank, getSize = rank, size  # noqa: N815 - C++ names

    @property
    def ranks(self) -> list[int]:
        """The ranks of the job that are in the group."""
        return self._members.ranks

    def communicator(self) -> Communicator:
        """Return the communicator of the next operation."""
        self._latest = self._alone or self._members.communicator()
        return self._latest

    def shutdown(self) -> None:
        """Forget operations, and close the group's connections."""
        super().shutdown()
        self._members.close()

    def _agree(self, communicator: Communicator, what: str) -> None:
        """Compare the operation over the members."""
        communicator.agree(what)


class _Message(Started):
    """A send or a receive, which advances others while it waits."""

    def __init__(self, message: Any, finish: Callable[[], object] | None = None) -> None:
        super().__init__([message], finish)
        self._message = message

    def wait(self, timeout_s: float = 0.0) -> None:
        """Wait for the message."""
        self._message.wait(timeout_s)
        super().wait()


def _short(timeout: Any) -> float:
    """Return a limit in seconds; 0 for torch's own and for longer ones."""
    short = isinstance(timeout, timedelta) and timeout < default_pg_timeout
    return float(timeout.total_seconds()) if short else 0.0


def _listed(tensors: Any) -> Tensors:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _reduction(opts: Any) -> Any:
    if opts is None:
        return dist.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)


def _word(op: Any) -> str:
    return str(getattr(op, "op", op)).rpartition(".")[2].lower()


def _group_of_this_process(name: str) -> Any:
    """Return the group of a name in this process, for an object that was pickled with it."""
    if not dist.is_initialized():
        return None
    world = dist.distributed_c10d._world
    found = [group for group, each in world.pg_names.items() if each == name]
    return found[0] if found else dist.distributed_c10d._get_default_group()
