"""Reasons for what happens to a job, as codes and fields.

History, outcomes, orders to ranks and the status carry reasons. ``driver/describe.py`` makes
sentences of them for people. ``str(reason)`` is a short form for logs and for errors in ranks.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class RankId:
    """Identity of a rank at one moment; `rank` is None while it belongs to no generation."""

    start: int
    rank: int | None
    worker: str

    def __str__(self) -> str:
        which = f"start {self.start}" if self.rank is None else f"rank {self.rank}"
        return f"{which} on {self.worker}"


@dataclass(frozen=True)
class Reason:
    """Base of all reasons."""

    def __str__(self) -> str:
        name = re.sub("(?<!^)([A-Z])", r" \1", type(self).__name__).lower()
        values = [_brief(getattr(self, each.name)) for each in fields(self)]
        return ": ".join([name, *filter(None, values)])


def _brief(value: object) -> str:
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, tuple):
        return ", ".join(map(_brief, value))
    return str(value) if value not in (None, 0, False) else ""


@dataclass(frozen=True)
class Text(Reason):
    """A text that a rank or the kernel made."""

    text: str

    def __str__(self) -> str:
        return self.text


# -- ranks ---------------------------------------------------------------------------------------


class LossReason(str, enum.Enum):
    """Reason for which a rank is lost."""

    RAISED = "raised"
    PROCESS_ENDED = "process ended"
    PROCESS_STOPPED = "process stopped"
    WORKER_GONE = "worker gone"
    WORKER_SILENT = "worker sends no heartbeat"
    UNREADABLE = "unreadable message"
    NOT_READY = "not ready in time"
    NOT_CONNECTED = "not connected in time"
    NOT_LEFT = "generation not left in time"
    STALLED = "held up the others"
    UNREACHABLE = "cannot be reached by the others"
    LEFT = "left as planned"
    ENDED = "ended"


@dataclass(frozen=True)
class Lost(Reason):
    """Loss of a rank.

    Attributes
    ----------
    rank : RankId
        The rank.
    reason : LossReason
        The reason.
    detail : str
        The exception in one line for ``RAISED``, the problem for ``UNREADABLE``.
    seconds : float
        The time limit that the rank exceeded, or how long its worker was silent.
    """

    rank: RankId
    reason: LossReason
    detail: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.rank}: {self.detail or self.reason.value}"


class EndReason(str, enum.Enum):
    """Reason for which a rank is ordered to end while its job goes on, or has finished."""

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
    """A rank did not end in time after it was ordered to: its worker is restarted."""

    rank: RankId
    seconds: float


@dataclass(frozen=True)
class Exclusion(Reason):
    """Exclusion of a ``worker`` or a ``host`` for some seconds, or None for good."""

    kind: str
    name: str
    seconds: float | None


@dataclass(frozen=True)
class CannotJoin(Reason):
    """A rank has built another state than the others have."""

    rank: RankId
    error: str


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


@dataclass(frozen=True)
class Unreachable(Reason):
    """One rank cannot reach another."""

    one: RankId
    other: RankId


@dataclass(frozen=True)
class AllWaited(Reason):
    """All ranks waited for each other, so many times in a row, or after their loop."""

    seconds: float
    times: int = 1
    after_loop: bool = False


@dataclass(frozen=True)
class StepsDiffer(Reason):
    """Ranks left their loop at different steps."""


@dataclass(frozen=True)
class Reset(Reason):
    """Change of membership: its causes, none for a planned change, and the new size."""

    causes: tuple[Reason, ...]
    size: int


@dataclass(frozen=True)
class Connected(Reason):
    """The members of a generation are connected."""

    size: int
    backend: str


@dataclass(frozen=True)
class Transport(Reason):
    """Remark of a rank on why its communicator is none of a faster kind."""

    backend: str
    remark: str


@dataclass(frozen=True)
class StateLost(Reason):
    """No rank is left that holds the state; its newest known commit, or 0."""

    commit: int


# -- the end of a job ------------------------------------------------------------------------------


@dataclass(frozen=True)
class UserErrors(Reason):
    """Errors of user code; with the workers that are there, if these are too few."""

    errors: tuple[str, ...]
    presence: Presence | None = None


@dataclass(frozen=True)
class RepeatedError(Reason):
    """The same error of user code on several workers."""

    error: str
    workers: int
    one_generation: bool


@dataclass(frozen=True)
class OwnFailures(Reason):
    """Generations in a row that ranks ended themselves, without progress."""

    last: GenerationLeft
    times: int
    commit: int


@dataclass(frozen=True)
class RepeatedLoss(Reason):
    """The same loss, of a worker or of the state, several times without progress.

    `commit` is ``FRESH`` if it was before the first generation.
    """

    losses: tuple[Lost, ...]
    times: int
    commit: int
    state_lost: bool
    last_death: str = ""


@dataclass(frozen=True)
class NoCommit(Reason):
    """Failures in a row without a commit."""

    times: int
    causes: tuple[Reason, ...]


@dataclass(frozen=True)
class CannotForm(Reason):
    """Plans in a row did not form."""

    causes: tuple[Reason, ...]


@dataclass(frozen=True)
class ResetLimit(Reason):
    """The reset limit is reached; the causes of the next reset, none for a planned change."""

    limit: int
    causes: tuple[Reason, ...]


@dataclass(frozen=True)
class LoopsDiffer(Reason):
    """A rank waits in an operation for one whose elastic loop has ended."""

    done: RankId
    waiting: RankId


@dataclass(frozen=True)
class OperationsDiffer(Reason):
    """Ranks wait for each other in different operations."""

    ranks: tuple[RankId, ...]
    operations: tuple[str, ...]


@dataclass(frozen=True)
class PastFirstLoop(Reason):
    """No rank can join any more: the others are in a later elastic loop, of at least `low` ranks.

    `ranks` are left; it is None while they are enough.
    """

    loop: int
    ranks: int | None = None
    low: int = 0


@dataclass(frozen=True)
class PlacesDiffer(Reason):
    """Ranks wait at different places of the function."""


@dataclass(frozen=True)
class ReturnedEarly(Reason):
    """A rank has returned while others train, or some have while `ranks` wait."""

    ranks: tuple[RankId, ...]
    waiting: bool


@dataclass(frozen=True)
class NoLoop(Reason):
    """A fault in a function without an elastic loop."""

    cause: Reason


@dataclass(frozen=True)
class RanksMissing(Reason):
    """Ranks ended before they returned."""

    missing: int
    expected: int
    causes: tuple[Reason, ...]


@dataclass(frozen=True)
class SchedulerLost(Reason):
    """The scheduler cannot be reached any more."""

    detail: str


class StopReason(str, enum.Enum):
    """Reason for which a job is stopped."""

    STOPPED = "stopped by its user"
    CANCELLED = "cancelled by its user"
    UNATTENDED = "ended without a kernel"


@dataclass(frozen=True)
class Stopping(Reason):
    """A job is stopped, now or at a commit; `seconds` is the lease of an unattended job."""

    reason: StopReason
    at_commit: bool = False
    seconds: float = 0.0


# -- warnings --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NeverMet(Reason):
    """No two ranks ever exchanged anything; the libraries for training that they imported."""

    ranks: int
    libraries: tuple[str, ...]


@dataclass(frozen=True)
class WeightsDiffer(Reason):
    """Ranks train different parameters; classes of optimizers that are not wrapped."""

    optimizers: tuple[str, ...]


# -- too few workers, and the status ---------------------------------------------------------------


class UnusedReason(str, enum.Enum):
    """Reason for which a job does not use a worker."""

    CLOSING = "closing"
    LEAVING = "asked to leave"
    PAUSED = "paused"
    NOT_IN_WORKERS = "not in workers"
    LACKS_RESOURCES = "lacks resources"
    TAKEN = "taken by another job"
    RESERVED = "reserved for another job"
    BEYOND_SHARE = "beyond the job's share"
    BUSY = "busy with other tasks"
    OTHER_VERSIONS = "other versions"
    BEING_PREPARED = "being prepared"
    REFUSED = "refused"
    HOST_FULL = "host full"
    TOO_LATE = "too late"

    @property
    def chosen(self) -> bool:
        """Whether the job's own options exclude such a worker."""
        return self in (UnusedReason.NOT_IN_WORKERS, UnusedReason.LACKS_RESOURCES)


@dataclass(frozen=True)
class UnusedGroup(Reason):
    """Workers that a job does not use, for one reason: their number, and some addresses."""

    reason: UnusedReason
    detail: str
    number: int
    workers: tuple[str, ...]


@dataclass(frozen=True)
class Presence(Reason):
    """Number of workers there, needed and excluded, and those not used otherwise."""

    there: int
    needed: int
    excluded: int = 0
    unused: tuple[UnusedGroup, ...] = ()


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


@dataclass(frozen=True)
class Waiting(Reason):
    """A job waits for more workers."""

    presence: Presence
    waited: float
    timeout: float


@dataclass(frozen=True)
class NotUsed(Reason):
    """A job trains with fewer ranks than it may have, and does not use these workers."""

    groups: tuple[UnusedGroup, ...]


@dataclass(frozen=True)
class Sharing(Reason):
    """A job shares its cluster.

    Attributes
    ----------
    share : int
        Most ranks that it may have now.
    slots : int
        Slots of the cluster that it could use.
    others : tuple of str
        Some of the jobs that it shares with, by name.
    number : int
        Number of all these jobs.
    suspended : bool
        Whether it waits with one rank, which keeps its state, for slots that others have.
    """

    share: int
    slots: int
    others: tuple[str, ...]
    number: int
    suspended: bool = False


@dataclass(frozen=True)
class ShareChanged(Reason):
    """Change of a job's share, from None or to None while it may have all slots."""

    before: int | None
    after: int | None
    others: tuple[str, ...] = ()
    number: int = 0


class NoticeSource(str, enum.Enum):
    """Who says that a machine, or a batch job on it, will end."""

    AWS = "aws"
    GOOGLE = "google"
    AZURE = "azure"
    SLURM = "slurm"
    PBS = "pbs"
    SIGNAL = "signal"
    CHAOS = "chaos"


@dataclass(frozen=True)
class NoticeGiven(Reason):
    """A worker's machine, or its batch job, ends in some seconds, or is at risk.

    Attributes
    ----------
    name : str
        The worker's name.
    source : NoticeSource
        Who says so.
    action : str
        What will happen, in the source's own word.
    seconds : float
        Seconds until then.
    soft : bool
        Whether it is at risk only, for a time that is not known: it is left once another rank can
        take its place.
    """

    name: str
    source: NoticeSource
    action: str
    seconds: float
    soft: bool = False


@dataclass(frozen=True)
class NoticeRevoked(Reason):
    """The machine of a worker with this name stays after all."""

    name: str
    source: NoticeSource


@dataclass(frozen=True)
class GoneBeforeCommit(Reason):
    """A worker has gone before its rank came to a commit, so many seconds after it was asked to."""

    name: str
    seconds: float


@dataclass(frozen=True)
class NoneStays(Reason):
    """All workers with the state will go, and the job has no checkpoint."""


@dataclass(frozen=True)
class Noticed(Reason):
    """Workers that will go: the notices of some, the first to go first, and the number of all."""

    notices: tuple[NoticeGiven, ...]
    number: int


@dataclass(frozen=True)
class StopPending(Reason):
    """A job stops at its next commit."""


@dataclass(frozen=True)
class WaitingForRanks(Reason):
    """A job waits for ranks to leave a generation, or to be ready for the first time (0).

    Workers may be what holds them up.
    """

    number: int
    generation: int
    unused: tuple[UnusedGroup, ...] = ()


@dataclass(frozen=True)
class KernelLost(Reason):
    """The kernel of a job is gone; seconds that the job goes on without one."""

    seconds: float


@dataclass(frozen=True)
class KernelAttached(Reason):
    """A kernel has attached to a job."""
