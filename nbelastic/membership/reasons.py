"""Reasons for what happens to a job: fields for programs, sentences for people.

History, outcomes, orders to ranks and the status carry them. ``str(reason)`` is the sentence,
without a full stop.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_TRANSPORTS = {
    "gloo": "Gloo",
    "shm": "shared memory",
    "hierarchical": "shared memory and Gloo",
    "cuda_ipc": "CUDA IPC",
    "cuda_ipc+gloo": "CUDA IPC and Gloo",
    "cuda_ipc+nccl": "CUDA IPC and NCCL",
    "nccl": "NCCL",
}


def over(backend: str) -> str:
    """Return how tensors travel: ``over Gloo``, …; empty for one rank, or unknown."""
    return "" if backend in ("", "solo") else f"over {_TRANSPORTS.get(backend, backend)}"


@dataclass(frozen=True)
class RankId:
    """Identity of a rank at one moment; `rank` is None outside a generation."""

    start: int
    rank: int | None
    worker: str

    def __str__(self) -> str:
        return f"{self.short} on {self.worker}"

    @property
    def short(self) -> str:
        """The identity without the worker."""
        return f"start {self.start}" if self.rank is None else f"rank {self.rank}"


@dataclass(frozen=True)
class Reason:
    """Base of all reasons."""


@dataclass(frozen=True)
class Text(Reason):
    """A text that a rank or the kernel made."""

    text: str

    def __str__(self) -> str:
        return self.text


def _listed(reasons: Iterable[Reason]) -> str:
    return "; ".join(dict.fromkeys(map(str, reasons)))


def _causes(reasons: tuple[Reason, ...]) -> str:
    return _listed(reasons) or "a planned change"


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number != 1)}"


# -- ranks ---------------------------------------------------------------------------------------


class LossReason(str, enum.Enum):
    """Why a rank is lost, in words with the fields of :class:`Lost`."""

    RAISED = "{detail}"
    PROCESS_ENDED = "its process has ended"
    PROCESS_STOPPED = "its process is stopped"
    WORKER_GONE = "its worker left the cluster"
    WORKER_SILENT = "its worker has sent no heartbeat for {seconds:.0f} s (heartbeat_timeout)"
    UNREADABLE = "its worker has sent a message that cannot be read: {detail}"
    NOT_READY = "not ready {seconds:g} s after its start (elastic_timeout)"
    NOT_CONNECTED = "not connected to the other ranks after {seconds:g} s"
    NOT_LEFT = "did not leave its generation within {seconds:g} s (stall_timeout)"
    STALLED = "held up the others for {seconds:g} s (stall_timeout)"
    UNREACHABLE = "the other ranks cannot connect to it"
    LEFT = "as planned: {detail}"
    ENDED = "ended without an order"


@dataclass(frozen=True)
class Lost(Reason):
    """Loss of a rank."""

    rank: RankId
    reason: LossReason
    detail: str = ""  # the exception in one line, the cause of death, or the problem
    seconds: float = 0.0  # the time limit that it exceeded, or how long its worker was silent

    def __str__(self) -> str:
        return f"{self.rank}: {self.cause}"

    @property
    def cause(self) -> str:
        """The cause, without the rank."""
        if self.reason == LossReason.PROCESS_ENDED and self.detail:
            return self.detail
        return self.reason.value.format(detail=self.detail, seconds=self.seconds)


class EndReason(str, enum.Enum):
    """Why a rank is ordered to end while its job goes on, or has finished."""

    WORKER_LEAVING = "its worker was asked to leave"
    WORKER_EXCLUDED = "its worker is excluded for a while"
    SCALED_DOWN = "the job was scaled down"
    SHARED = "another job of the cluster is to have its slot"
    LEFT_BEHIND = "the other ranks are past the point where it could join"
    FINISHING = "the job is finishing"


@dataclass(frozen=True)
class EndOrder(Reason):
    """Order to end that is no rank's fault."""

    reason: EndReason

    def __str__(self) -> str:
        return self.reason.value


@dataclass(frozen=True)
class DidNotEnd(Reason):
    """A rank did not end in time after it was ordered to."""

    rank: RankId
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.rank} did not end within {self.seconds:g} s of the order to: its worker is "
            "restarted, or closed if it has no nanny"
        )


@dataclass(frozen=True)
class CutOff(Reason):
    """The process of a rank that had returned did not end by itself."""

    rank: RankId
    how: str

    def __str__(self) -> str:
        return (
            f"{self.rank.short} was cut off after its function had returned: {self.how}\n"
            "Threads, exit handlers and child processes of a rank may go on for exit_timeout "
            "after its function. What they were writing may be incomplete. Wait for them in the "
            "function, or pass a larger exit_timeout."
        )


@dataclass(frozen=True)
class Exiting(Reason):
    """Ranks have returned, and their processes have not ended."""

    number: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"all ranks have returned; threads, exit handlers or children of {_ranks(self.number)} "
            f"still run, for {self.seconds:g} s at most (exit_timeout)"
        )


@dataclass(frozen=True)
class RankError(Reason):
    """An error of user code that the job has survived."""

    rank: RankId = field(compare=False)
    error: str

    def __str__(self) -> str:
        return self.at("")

    def at(self, place: str) -> str:
        """Return the warning with the line at which it was raised."""
        where = f", at {place}" if place else ""
        return (
            f"{self.rank.short} raised {self.error}{where}\n"
            "The other ranks went on from their last commit. A worker whose rank raises is left "
            "out, unless others raise the same. Fix the error, or handle it in the function."
        )


@dataclass(frozen=True)
class Exclusion(Reason):
    """Exclusion of a ``worker`` or a ``host``."""

    kind: str
    name: str
    seconds: float | None  # None: for good
    times: int = 1  # how often it was excluded, in a row; each time for longer

    def __str__(self) -> str:
        length = "for good" if self.seconds is None else f"for {self.seconds:.1f} s"
        again = f", {self.times} times in a row" if self.times > 1 else ""
        return f"{self.kind} {self.name} is excluded {length}{again}"


@dataclass(frozen=True)
class CannotJoin(Reason):
    """A rank has built another state than the others have."""

    rank: RankId
    error: str

    def __str__(self) -> str:
        return (
            f"{self.rank} could not join: its function builds another state than the others have\n"
            f"{self.error}\n"
            "The others go on without it, and its worker is tried again later. Whatever training "
            "adds to the model or the optimizer must be there, on each rank, before the state is "
            "made."
        )


# -- the end of a generation -----------------------------------------------------------------------


@dataclass(frozen=True)
class GenerationLeft(Reason):
    """A rank has left its generation, after a failed operation or unasked."""

    rank: RankId
    failed: bool
    detail: str = ""

    def __str__(self) -> str:
        unasked = "an operation failed" if self.failed else "left its generation unasked"
        return f"{self.rank}: {self.detail or unasked}"


@dataclass(frozen=True)
class NotConnected(Reason):
    """Ranks of a plan did not connect in time."""

    ranks: tuple[RankId, ...]
    seconds: float

    def __str__(self) -> str:
        return f"not connected after {self.seconds:g} s: {', '.join(map(str, self.ranks))}"


@dataclass(frozen=True)
class Unreachable(Reason):
    """One rank cannot reach another."""

    one: RankId
    other: RankId

    def __str__(self) -> str:
        return f"{self.one} cannot reach {self.other}"


@dataclass(frozen=True)
class AllWaited(Reason):
    """All ranks waited for each other, in their loop or after it."""

    seconds: float
    after_loop: bool = False

    def __str__(self) -> str:
        words = f"all ranks waited for each other for {self.seconds:g} s (stall_timeout)"
        return f"{words} after their elastic loop" if self.after_loop else words


@dataclass(frozen=True)
class StepsDiffer(Reason):
    """Ranks left their loop at different steps."""

    def __str__(self) -> str:
        return "the ranks left their elastic loop at different steps"


class Counted(str, enum.Enum):
    """What is counted until a job ends, in words."""

    SAME_ERROR = "ranks ended their generation with the same error"
    ERRORS = "ranks ended their generation with an error"
    SAME_WORKER = "the same worker was lost"
    STATE = "the job's state was lost"
    WAITS = "all ranks waited for each other"
    UNFORMED = "the ranks could not connect"
    ANY = "ranks failed without a commit"


@dataclass(frozen=True)
class Tally(Reason):
    """How many times in a row something set the job back, and the limit that ends it."""

    counted: Counted
    times: int
    limit: int
    commit: int  # below 0: before the first generation

    @property
    def reached(self) -> bool:
        """Whether the job ends."""
        return self.times >= self.limit

    def __str__(self) -> str:
        place = "before the first generation" if self.commit < 0 else f"at commit {self.commit}"
        times = f"{self.times} times in a row {place}"
        return f"{self.counted.value} {times}; the limit is {self.limit}"


@dataclass(frozen=True)
class Reset(Reason):
    """Change of membership, and the new size."""

    causes: tuple[Reason, ...]  # none: a planned change
    size: int
    count: Tally | None = None  # of the setbacks so far, the one closest to its limit

    def __str__(self) -> str:
        again = f" ({self.count})" if self.count is not None and self.count.times > 1 else ""
        return f"{_causes(self.causes)} → {_ranks(self.size)}{again}"


@dataclass(frozen=True)
class Connected(Reason):
    """The members of a generation are connected."""

    size: int
    backend: str

    def __str__(self) -> str:
        return f"{_ranks(self.size)} {over(self.backend)}".rstrip()


@dataclass(frozen=True)
class Transport(Reason):
    """Remark of a rank on why its communicator is none of a faster kind."""

    backend: str
    remark: str

    def __str__(self) -> str:
        return f"tensors go {over(self.backend)}: {self.remark}"


@dataclass(frozen=True)
class StateLost(Reason):
    """No rank is left that holds the state."""

    commit: int  # newest known one, or 0

    def __str__(self) -> str:
        state = f"commit {self.commit}, the newest known one" if self.commit else "the state"
        return f"no rank is left that holds {state}"


# -- the end of a job ------------------------------------------------------------------------------


@dataclass(frozen=True)
class UserErrors(Reason):
    """Errors of user code."""

    errors: tuple[str, ...]
    presence: Presence | None = None  # the workers that are there, if these are too few

    def __str__(self) -> str:
        return "; ".join([*self.errors, *([str(self.presence)] if self.presence else [])])


@dataclass(frozen=True)
class RepeatedError(Reason):
    """The same error of user code on several workers."""

    error: str
    workers: int
    one_generation: bool

    def __str__(self) -> str:
        how = "in one generation" if self.one_generation else "one after another"
        return f"{self.error} (raised on {self.workers} workers, {how})"


@dataclass(frozen=True)
class NoNewCommit(Reason):
    """Resets in a row led to no progress, up to a limit of the failure policy."""

    causes: tuple[Reason, ...]
    count: Tally
    last_death: str = ""  # what the last process died of, if it is not among the causes

    def __str__(self) -> str:
        death = "" if self.last_death in str(self.causes) else f"; before that, {self.last_death}"
        return f"{_causes(self.causes)} ({self.count}, without progress{death})"


@dataclass(frozen=True)
class ResetLimit(Reason):
    """The reset limit is reached."""

    limit: int
    causes: tuple[Reason, ...]  # of the next reset; none for a planned change

    def __str__(self) -> str:
        return f"reset_limit={self.limit} is reached; next reset: {_causes(self.causes)}"


@dataclass(frozen=True)
class LoopsDiffer(Reason):
    """A rank waits in an operation for one whose elastic loop has ended."""

    done: RankId
    waiting: RankId

    def __str__(self) -> str:
        return (
            f"{self.done} has reached the end of its elastic loop, but {self.waiting} waits for it "
            "in another operation, because it has more batches or commits. Give all ranks the same "
            "number of batches (hvd.elastic.ElasticSampler does), and commit on all of them; or "
            "end the loop over batches by hvd.join(), with which a rank waits for those that have "
            "more"
        )


@dataclass(frozen=True)
class OperationsDiffer(Reason):
    """Ranks wait for each other in different operations."""

    ranks: tuple[RankId, ...]
    operations: tuple[str, ...]

    def __str__(self) -> str:
        sides = zip(self.ranks, self.operations, strict=True)
        words = "; ".join(f"{rank}: {operation}" for rank, operation in sides)
        return (
            f"ranks wait for each other in different operations: {words}. All ranks must call the "
            "same operations in the same order"
        )


@dataclass(frozen=True)
class PastFirstLoop(Reason):
    """No rank can join any more, because the others are in a later elastic loop."""

    loop: int
    ranks: int | None = None  # that are left; None while they are enough
    low: int = 0  # fewest ranks of the job

    def __str__(self) -> str:
        what = "no rank can join any more"
        if self.ranks is not None:
            what = f"{self.ranks} of at least {self.low} ranks are left, and none can join"
        return (
            f"{what}: the others are in elastic loop {self.loop} of the function, and a rank that "
            "joins starts at its top, with the first loop. To let ranks join in all phases, put "
            "the phases into one elastic loop, with the phase among the values of the state"
        )


@dataclass(frozen=True)
class PlacesDiffer(Reason):
    """Ranks wait at different places of the function."""

    def __str__(self) -> str:
        return (
            "ranks wait at different places of the function. All ranks must enter the same elastic "
            "loops in the same order"
        )


@dataclass(frozen=True)
class ReturnedEarly(Reason):
    """A rank has returned while others train, or some have while `ranks` wait."""

    ranks: tuple[RankId, ...]
    waiting: bool

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        if self.waiting:
            return f"ranks returned while others wait to train: {ranks}"
        return f"{ranks} returned while others train"


@dataclass(frozen=True)
class NoLoop(Reason):
    """A fault in a function without an elastic loop."""

    cause: Reason

    def __str__(self) -> str:
        return f"{self.cause}; the function has no elastic loop, so it cannot go back to a commit"


@dataclass(frozen=True)
class RanksMissing(Reason):
    """Ranks ended before they returned."""

    missing: int
    expected: int
    causes: tuple[Reason, ...]

    def __str__(self) -> str:
        lost = f"{self.missing} of {self.expected} ranks ended before they returned"
        return "; ".join(filter(None, [lost, _listed(self.causes)]))


@dataclass(frozen=True)
class SchedulerLost(Reason):
    """The scheduler cannot be reached any more."""

    detail: str

    def __str__(self) -> str:
        return self.detail


class StopReason(str, enum.Enum):
    """Reason for which a job is stopped."""

    STOPPED = "stopped by its user"
    CANCELLED = "cancelled by its user"
    UNATTENDED = "ended without a kernel"


@dataclass(frozen=True)
class Stopping(Reason):
    """A job is stopped, now or at a commit."""

    reason: StopReason
    at_commit: bool = False
    seconds: float = 0.0  # the lease of an unattended job

    def __str__(self) -> str:
        if self.reason == StopReason.UNATTENDED:
            return f"ended, because no kernel attached to it within {self.seconds:g} s"
        return f"{self.reason.value}{' at a commit' if self.at_commit else ''}"


# -- warnings --------------------------------------------------------------------------------------


JOINED = {
    "Lightning": 'import nbelastic.lightning and pass strategy="nbelastic" to the Trainer',
    "Trainer (transformers)": "import nbelastic.transformers and write, in the function, "
    "Trainer = nbelastic.transformers.elastic(Trainer)",
    "Keras": "import nbelastic.keras as hvd, wrap the optimizer with hvd.DistributedOptimizer, and "
    "call hvd.elastic.fit(hvd.elastic.KerasState(model), ...) in the place of model.fit(...)",
    "accelerate": "make the Accelerator in the function, keep what it has prepared in "
    "nbelastic.accelerate.AccelerateState(accelerator), and train in a function decorated with "
    "nbelastic.torch.elastic.run",
    "": "wrap the optimizer with nbelastic.torch.DistributedOptimizer and train in a function "
    "decorated with nbelastic.torch.elastic.run",
}
"""What makes one training of many, by the library that trains; the first that is there counts."""


@dataclass(frozen=True)
class NeverMet(Reason):
    """No two ranks ever exchanged anything."""

    ranks: int
    libraries: tuple[str, ...]  # for training, imported in the ranks

    def __str__(self) -> str:
        imported = f"Imported in the ranks: {', '.join(self.libraries)}.\n"
        how = next((JOINED[each] for each in JOINED if each in self.libraries), JOINED[""])
        return (
            f"ranks never met: {self.ranks} separate trainings\n"
            "No rank used an operation between ranks or an elastic loop, so each ran the whole "
            f"function alone.\n{imported if self.libraries else ''}To train one model, {how}."
        )


@dataclass(frozen=True)
class WeightsDiffer(Reason):
    """Ranks train different parameters."""

    optimizers: tuple[str, ...]  # classes of optimizers that are not wrapped

    def __str__(self) -> str:
        if self.optimizers:
            return (
                f"ranks train different parameters\n{', '.join(self.optimizers)} is not wrapped by "
                "nbelastic.torch.DistributedOptimizer, so that each rank steps with its own "
                "gradients.\nWrap each optimizer before the state is made: "
                "optimizer = hvd.DistributedOptimizer(optimizer)."
            )
        return (
            "ranks train different parameters\n"
            "They were never made equal, or something changes them on each rank by itself, or "
            "changes gradients after they are averaged.\n"
            "Give the model and its optimizer to the state, which makes them equal: "
            "hvd.elastic.TorchState(model, optimizer). Without an elastic loop, call "
            "hvd.broadcast_parameters(model.state_dict(), root_rank=0) first. A Keras model is "
            "compiled with hvd.DistributedOptimizer(optimizer), and trained by "
            "hvd.elastic.fit(hvd.elastic.KerasState(model), ...)."
        )


# -- too few workers, and the status ---------------------------------------------------------------


class UnusedReason(str, enum.Enum):
    """Why a job does not use a worker, in words with the detail of the worker."""

    CLOSING = "closing"
    LEAVING = "asked to leave"
    PAUSED = "paused by Dask because its memory is used up"
    NOT_IN_WORKERS = "not among workers="
    LACKS_RESOURCES = "without the resources ({detail})"
    TAKEN = "taken by job {detail!r}"
    RESERVED = "reserved for job {detail!r}"
    BEYOND_SHARE = "beyond the share of this job"
    BUSY = "busy with other tasks of Dask, which its rank waits for"
    OTHER_VERSIONS = "with {detail}"
    BEING_PREPARED = "being prepared"
    REFUSED = "refused, because {detail}"
    HOST_FULL = "on a host that has slots_per_host={detail} ranks already"
    TOO_LATE = "too late: the ranks are past the point where others can join"

    @property
    def chosen(self) -> bool:
        """Whether the job's own options exclude such a worker."""
        return self in (UnusedReason.NOT_IN_WORKERS, UnusedReason.LACKS_RESOURCES)


@dataclass(frozen=True)
class UnusedGroup(Reason):
    """Workers that a job does not use, for one reason."""

    reason: UnusedReason
    detail: str
    number: int
    workers: tuple[str, ...]  # addresses of some

    def __str__(self) -> str:
        more = self.number - len(self.workers)
        names = ", ".join(self.workers) + (f", and {more} more" if more > 0 else "")
        return f"{self.number} {self.reason.value.format(detail=self.detail)} ({names})"


@dataclass(frozen=True)
class Presence(Reason):
    """Number of workers there, needed and excluded, and those not used otherwise."""

    there: int
    needed: int
    excluded: int = 0
    unused: tuple[UnusedGroup, ...] = ()

    def __str__(self) -> str:
        words = f"{self.there} of at least {self.needed} workers"
        if self.excluded:
            words += f" ({self.excluded} more are there, but excluded because they failed)"
        return f"{words} (not used: {_listed(self.unused)})" if self.unused else words


@dataclass(frozen=True)
class Shortage(Reason):
    """Too few workers for too long."""

    presence: Presence
    min_np: int
    waited: float
    timeout: float
    excluded: tuple[str, ...] = ()
    last_error: str = ""
    last_death: str = ""

    def __str__(self) -> str:
        words = (
            f"{self.presence} (min_np={self.min_np}) after waiting {self.waited:.1f} s "
            f"(elastic_timeout={self.timeout:g})"
        )
        if self.excluded:
            words += f"; excluded after failures: {', '.join(self.excluded)}"
        if self.last_death:
            words += f"; the last process that died: {self.last_death}"
        return f"{words}; last error: {self.last_error}" if self.last_error else words


@dataclass(frozen=True)
class NotReady(Reason):
    """Ranks of a job that has not begun need too long for their set-up."""

    ranks: tuple[RankId, ...]
    timeout: float

    def __str__(self) -> str:
        return self.at({})

    def at(self, places: Mapping[int, str]) -> str:
        """Return the reason with the line at which each start stands, where that is known."""
        at = {rank: places.get(rank.start, "") for rank in self.ranks}
        ranks = [f"{rank}{f', which is at {at[rank]}' * bool(at[rank])}" for rank in self.ranks]
        more = f"; and {len(ranks) - 4} more" if len(ranks) > 4 else ""
        return (
            f"{_ranks(len(ranks))} {'has' if len(ranks) == 1 else 'have'} not reached the elastic "
            f"loop, nor an operation between ranks, {self.timeout:g} s after the start "
            f"(elastic_timeout): {'; '.join(ranks[:4])}{more}. Raise elastic_timeout, or prepare "
            "what takes so long before the job"
        )


@dataclass(frozen=True)
class Waiting(Reason):
    """A job waits for more workers."""

    presence: Presence
    waited: float
    timeout: float

    def __str__(self) -> str:
        missing = self.presence.needed - self.presence.there
        left = f"{self.waited:.0f} s of {self.timeout:g} s"
        return f"{self.presence}; waiting {left} for {missing} more"


@dataclass(frozen=True)
class NotUsed(Reason):
    """A job trains with fewer ranks than it may have, and does not use these workers."""

    groups: tuple[UnusedGroup, ...]

    def __str__(self) -> str:
        return f"not used: {_listed(self.groups)}"


def _others(names: tuple[str, ...], number: int) -> str:
    more = number - len(names)
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Sharing(Reason):
    """A job shares its cluster."""

    share: int  # most ranks that it may have now
    slots: int  # of the cluster that it could use
    others: tuple[str, ...]  # some of the jobs that it shares with, by name
    number: int  # of all these jobs
    suspended: bool = False  # it waits with one rank, which keeps its state, for slots of others

    def __str__(self) -> str:
        slots = f"{self.share} of {self.slots} slots"
        others = _others(self.others, self.number)
        if self.suspended and not self.share:
            return f"suspended: its state is in its checkpoint, while others go first: {others}"
        if self.suspended:
            return f"suspended: {slots} for its state, while others go first: {others}"
        return f"{slots}: shares with {others}"


@dataclass(frozen=True)
class ShareChanged(Reason):
    """Change of a job's share, from None or to None while it may have all slots."""

    before: int | None
    after: int | None
    others: tuple[str, ...] = ()
    number: int = 0

    def __str__(self) -> str:
        before, after = ("all" if each is None else each for each in (self.before, self.after))
        others = f": shares with {_others(self.others, self.number)}" if self.others else ""
        return f"{before} → {after}{others}"


class NoticeSource(str, enum.Enum):
    """Source of a notice that a machine, or a batch job on it, will end."""

    AWS = "AWS spot"
    GOOGLE = "Google Cloud"
    AZURE = "Azure"
    SLURM = "SLURM's time limit"
    PBS = "PBS's time limit"
    SIGNAL = "signal"
    CHAOS = "nbelastic.chaos"


@dataclass(frozen=True)
class NoticeGiven(Reason):
    """The machine or batch job of a worker ends in some seconds, or is at risk."""

    name: str  # of the worker
    source: NoticeSource
    action: str  # what will happen, in the source's own word
    seconds: float  # until then
    soft: bool = False  # at risk only, for an unknown time: left once another rank is ready

    def __str__(self) -> str:
        minutes, seconds = divmod(max(round(self.seconds), 0), 60)
        when = "once another is ready" if self.soft else f"in {minutes}:{seconds:02}"
        action = "" if self.action in ("", "end") else f" ({self.action})"
        return f"worker {self.name} leaves {when}: {self.source.value}{action}"


@dataclass(frozen=True)
class NoticeRevoked(Reason):
    """The machine of a worker with this name stays after all."""

    name: str
    source: NoticeSource

    def __str__(self) -> str:
        return f"worker {self.name} stays: {self.source.value} has revoked its notice"


@dataclass(frozen=True)
class GoneBeforeCommit(Reason):
    """A worker was gone before its rank reached a commit."""

    name: str  # of the worker
    seconds: float  # after the request to leave

    def __str__(self) -> str:
        return (
            f"worker {self.name} has gone before its rank came to a commit, "
            f"{self.seconds:.0f} s after it was asked to leave: steps since the last commit are "
            "done again. Call state.check_host_updates() after each batch, where ranks leave, too, "
            "or commit more often"
        )


@dataclass(frozen=True)
class NoneStays(Reason):
    """All workers with the state will go, and the job has no checkpoint."""

    def __str__(self) -> str:
        return (
            "all workers with the state will go, and the job has no checkpoint: it starts over "
            "unless another worker joins before. Pass checkpoint=, or add workers"
        )


@dataclass(frozen=True)
class Noticed(Reason):
    """Workers that will go."""

    notices: tuple[NoticeGiven, ...]  # of some of them, the first to go first
    number: int  # of all of them

    def __str__(self) -> str:
        more = self.number - len(self.notices)
        return _listed(self.notices) + (f"; and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class StopPending(Reason):
    """A job stops at its next commit."""

    def __str__(self) -> str:
        return "stopping at the next commit"


@dataclass(frozen=True)
class WaitingForRanks(Reason):
    """A job waits for ranks to leave a generation, or to be ready."""

    number: int
    generation: int  # 0: they are to be ready for the first time
    unused: tuple[UnusedGroup, ...] = ()  # workers that may be what holds them up
    operation: str = ""  # that their processes wait for

    def __str__(self) -> str:
        if self.generation:
            return f"waiting for {_ranks(self.number)} to leave generation {self.generation}"
        held_up = f" (not used: {_listed(self.unused)})" if self.unused else ""
        operation = f": {self.operation}" if self.operation else ""
        return f"waiting for {_ranks(self.number)} to be ready{operation}{held_up}"


@dataclass(frozen=True)
class KernelLost(Reason):
    """The kernel of a job is gone."""

    seconds: float  # that the job goes on without a kernel

    def __str__(self) -> str:
        return f"its kernel is gone; it goes on for up to {self.seconds:g} s"


@dataclass(frozen=True)
class KernelAttached(Reason):
    """A kernel has attached to a job."""

    def __str__(self) -> str:
        return "a kernel has attached to it"
