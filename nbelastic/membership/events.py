"""Events: messages to the machine. Each may come late, twice, or out of order."""

from __future__ import annotations

from dataclasses import dataclass, field

from .model import FRESH, Slot, UnusedWorker
from .reasons import LossReason, NoticeGiven, StopReason


@dataclass(frozen=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True)
class SlotsFound(Event):
    """Workers with free slots were found."""

    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class WorkersUnused(Event):
    """All workers that are not offered to the job, each with the reason."""

    workers: tuple[UnusedWorker, ...]


@dataclass(frozen=True)
class SlotGone(Event):
    """A worker's process is gone, or out of the scheduler's reach for good."""

    slot: str
    reason: LossReason = LossReason.WORKER_GONE
    detail: str = ""


@dataclass(frozen=True)
class SlotDied(Event):
    """The cause of death of a worker's process has become known."""

    slot: str
    detail: str


@dataclass(frozen=True)
class SlotLeaving(Event):
    """A worker was asked to leave: retired, scaled away, or terminated with notice.

    Attributes
    ----------
    slot : str
        Its slot.
    soon : bool
        The worker closes in a few seconds, too soon for another rank to receive the state.
    notice : NoticeGiven or None
        What its machine, or its batch job, has announced.
    """

    slot: str
    soon: bool = False
    notice: NoticeGiven | None = None


@dataclass(frozen=True)
class SlotAtRisk(Event):
    """A worker's machine may go at any time: it should be left once another rank has its place.

    Nothing happens while no newcomer can take it.
    """

    slot: str
    notice: NoticeGiven


@dataclass(frozen=True)
class SlotStays(Event):
    """A worker with a notice stays, or is at risk no more: the notice is revoked."""

    slot: str


@dataclass(frozen=True)
class SlotBusy(Event):
    """The slot was given to another job before this one could claim it."""

    slot: str


@dataclass(frozen=True)
class SlotSilent(Event):
    """A worker's process is stopped, or has sent no heartbeat for the heartbeat timeout."""

    slot: str
    reason: LossReason = LossReason.WORKER_SILENT
    seconds: float = 0.0


@dataclass(frozen=True)
class RankReady(Event):
    """A rank is set up and waits for a plan.

    Attributes
    ----------
    start : int
        Start of the function.
    left : int
        Newest generation that the rank knows. It is ready for later ones only.
    version : float
        Its last commit, or ``FRESH``; half a commit more if it holds the state at the end of a
        later step instead.
    loop : int
        Number of the elastic loop that it is about to enter; 0 outside one.
    store : tuple of (str, int)
        Address of the store that it keeps open.
    failed : bool
        It left its generation because an operation failed, not because members agreed to.
    detail : str
        The error of that operation.
    unreached : tuple of int
        Starts of the ranks that it could not reach, if plans in a row have not formed.
    gone : tuple of int
        Starts of members whose processes have ended. The system reports that to neighbours at
        once, and to the scheduler only when the memory of the process is free.
    own : bool
        The failure was its own, or that of all ranks together: its communicator works.
    """

    start: int
    left: int
    version: float
    loop: int
    store: tuple[str, int]
    failed: bool = False
    detail: str = ""
    unreached: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    own: bool = False


@dataclass(frozen=True)
class RankFormed(Event):
    """A rank has connected to the others of its generation.

    Attributes
    ----------
    start : int
        Start of the function.
    generation : int
        The generation.
    backend : str
        Kind of its communicator, such as ``gloo``, or ``solo`` for a rank that is alone. All
        members have the same.
    remark : str
        Reason for not having a faster kind, for people.
    """

    start: int
    generation: int
    backend: str = ""
    remark: str = ""


@dataclass(frozen=True)
class LoopDone(Event):
    """A rank's elastic loop has returned, and the rank waits for the others.

    Attributes
    ----------
    start : int
        Start of the function.
    generation : int
        The generation.
    version : int
        Its last commit.
    operations : int
        Number of operations between ranks that its loop has begun in that generation.
    """

    start: int
    generation: int
    version: int
    operations: int = 0


@dataclass(frozen=True)
class RankReturned(Event):
    """A rank's function has returned.

    Attributes
    ----------
    start : int
        Start of the function.
    isolated : tuple of str or None
        Libraries for training that its process has imported, for a rank that exchanged nothing
        with others and entered no elastic loop. None for any other rank.
    """

    start: int
    isolated: tuple[str, ...] | None = None


@dataclass(frozen=True)
class RankRaised(Event):
    """A rank has ended with an error: its function has raised, or could not be run.

    Attributes
    ----------
    start : int
        Start of the function.
    error : str
        The exception in one line.
    collective : bool
        It was a failed operation between ranks, which is a consequence and not a cause.
    version : int
        Its last commit, or ``FRESH``.
    on_all_ranks : bool
        All ranks raise it at the same point, and would do so again.
    state_mismatch : bool
        The rank has built another state than the others have.
    """

    start: int
    error: str
    collective: bool = False
    version: int = FRESH
    on_all_ranks: bool = False
    state_mismatch: bool = False


@dataclass(frozen=True)
class RankDied(Event):
    """The process of a rank has ended without an event of its own; its worker lives.

    Attributes
    ----------
    start : int
        Start of the function.
    detail : str
        What it has died of, in words.
    version : int
        Its last known commit, or ``FRESH``.
    """

    start: int
    detail: str
    version: int = FRESH


@dataclass(frozen=True)
class RankLeft(Event):
    """A rank has ended as ordered."""

    start: int


@dataclass(frozen=True)
class WeightsSampled(Event):
    """A rank has sampled the parameters that it trains.

    Attributes
    ----------
    start : int
        Start of the function.
    generation : int
        Its generation.
    moment : int
        Number of its commits in this generation before the sample; 0 at the end of the elastic
        loop. Without a loop: minus the number of operations, and 0 at the end.
    values : tuple of float
        The sample, of values at the same places on all ranks.
    plain : tuple of str
        Classes of its optimizers that do not average gradients.
    besides : bool
        Whether these parameters are neither in the state nor in the broadcast.
    """

    start: int
    generation: int
    moment: int
    values: tuple[float, ...]
    plain: tuple[str, ...] = ()
    besides: bool = False


@dataclass(frozen=True)
class RankNote(Event):
    """Entry for the job's history, from a rank.

    Attributes
    ----------
    start : int
        Start of the function.
    about : str
        The history's ``kind``: ``checkpoint``, ``warning``, ``phases``, ``straggler``.
    detail : str
        A text for people.
    figures : dict of str to float
        Numbers that belong to it.
    resumed : tuple of int, optional
        Generation and version of the commit on disk that the rank resumes from.
    """

    start: int
    about: str
    detail: str
    figures: dict[str, float] = field(default_factory=dict, hash=False)
    resumed: tuple[int, int] | None = None


@dataclass(frozen=True)
class Beat:
    """Part of a heartbeat that concerns one rank.

    Attributes
    ----------
    start : int
        Start of the function.
    generation : int
        Its generation, to which `operations` belongs.
    progress : int
        A number that changes when the rank makes progress.
    waiting : bool
        Whether it waits for other ranks.
    version : int
        Its last commit.
    operations : int
        Number of operations between ranks that its loop has begun in that generation.
    operation : str
        Name of the operation in which it waits; empty if that is not known.
    """

    start: int
    generation: int
    progress: int
    waiting: bool
    version: int
    operations: int = 0
    operation: str = ""


@dataclass(frozen=True)
class Beats(Event):
    """Heartbeats of several ranks."""

    beats: tuple[Beat, ...]


@dataclass(frozen=True)
class StopRequested(Event):
    """Request to end the job at the next commit, or now.

    Attributes
    ----------
    now : bool
        Whether to end it now.
    reason : StopReason
        The reason.
    seconds : float
        The lease of an unattended job.
    """

    now: bool = False
    reason: StopReason = StopReason.STOPPED
    seconds: float = 0.0


@dataclass(frozen=True)
class LimitsChanged(Event):
    """Change of what a job may have, and of its place among others; None leaves it as it is."""

    min_np: int | None = None
    max_np: int | None = None
    priority: int | None = None
    weight: float | None = None


@dataclass(frozen=True)
class ShareSet(Event):
    """The cluster's arbiter has set the share of the job. Free slots of it are announced after.

    Attributes
    ----------
    share : int or None
        Most ranks that it may have besides ``max_np``; None for no bound.
    slots : int
        Slots of the cluster that it could use.
    others : tuple of str
        Some of the jobs that it shares with, by name.
    number : int
        Number of all these jobs.
    reclaimed : tuple of str
        Slots that it has to leave, because another job can use no other.
    """

    share: int | None
    slots: int = 0
    others: tuple[str, ...] = ()
    number: int = 0
    reclaimed: tuple[str, ...] = ()


@dataclass(frozen=True)
class ClusterGone(Event):
    """The scheduler cannot be reached any more."""

    detail: str = ""


@dataclass(frozen=True)
class Tick(Event):
    """Time has passed."""
