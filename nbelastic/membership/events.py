"""Events: messages to the machine. Each may arrive late, twice, or out of order.

`start` is the number of a start of the function, counted over the job and never reused.
"""

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

    slot: Slot
    start: int  # of the rank that it had
    detail: str


@dataclass(frozen=True)
class SlotLeaving(Event):
    """A worker was asked to leave: retired, scaled away, or terminated with notice."""

    slot: str
    soon: bool = False  # it closes in seconds, too soon for another rank to receive the state
    notice: NoticeGiven | None = None  # what its host or its batch job has announced


@dataclass(frozen=True)
class SlotAtRisk(Event):
    """A worker's host may end at any time: its rank stays until a newcomer is ready."""

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
    """A worker's process is stopped, or has missed the heartbeat timeout."""

    slot: str
    reason: LossReason = LossReason.WORKER_SILENT
    seconds: float = 0.0  # without a heartbeat


@dataclass(frozen=True)
class RankReady(Event):
    """A rank is set up and waits for a plan."""

    start: int
    left: int  # newest generation that it knows; it is ready for later ones only
    # Last commit, or FRESH; half a commit more for the state at the end of a later step.
    version: float
    loop: int  # number of the elastic loop that it is about to enter; 0 outside one
    store: tuple[str, int]  # address of the store that it keeps open
    failed: bool = False  # it left its generation because an operation failed, not as agreed
    detail: str = ""  # error of that operation
    # Starts that it could not reach, if plans in a row did not form.
    unreached: tuple[int, ...] = ()
    # Starts of members whose processes have ended. The operating system reports that to neighbours
    # at once, and to the scheduler only when the memory of the process is free.
    gone: tuple[int, ...] = ()
    own: bool = False  # the failure was its own, or that of all ranks: its communicator works


@dataclass(frozen=True)
class RankFormed(Event):
    """A rank has connected to the other members of its generation."""

    start: int
    generation: int
    backend: str = ""  # kind of communicator, the same on all members: gloo, …; solo for one rank
    remark: str = ""  # why it is not a faster kind, for people


@dataclass(frozen=True)
class LoopDone(Event):
    """A rank's elastic loop has returned, and the rank waits for the other members."""

    start: int
    generation: int
    version: int  # last commit
    operations: int = 0  # between ranks, begun by its loop in this generation


@dataclass(frozen=True)
class RankReturned(Event):
    """A rank's function has returned."""

    start: int
    # Libraries for training that its process has imported, for a rank that exchanged nothing with
    # others and entered no elastic loop; None for any other rank.
    isolated: tuple[str, ...] | None = None
    exits: bool = False  # its process still runs, and a RankExited follows


@dataclass(frozen=True)
class RankExited(Event):
    """The process of a rank that has returned has ended."""

    start: int
    cut: str = ""  # how it ended, unless by itself


@dataclass(frozen=True)
class RankRaised(Event):
    """A rank has ended with an error: its function raised, or could not be run."""

    start: int
    error: str  # the exception in one line
    collective: bool = False  # a failed operation between ranks: a consequence, not a cause
    version: int = FRESH  # last commit
    on_all_ranks: bool = False  # all ranks raise it at the same point, and would do so again
    state_mismatch: bool = False  # the rank has built another state than the others


@dataclass(frozen=True)
class RankDied(Event):
    """The process of a rank has ended without an event of its own; its worker lives."""

    start: int
    detail: str  # cause of death, in words
    version: int = FRESH  # last known commit


@dataclass(frozen=True)
class RankLeft(Event):
    """A rank has ended as ordered."""

    start: int


@dataclass(frozen=True)
class WeightsSampled(Event):
    """A rank has sampled the parameters that it trains."""

    start: int
    generation: int
    # Number of its commits in this generation before the sample; 0 at the end of the elastic loop.
    # Without a loop: minus the number of operations, and 0 at the end.
    moment: int
    values: tuple[float, ...]  # of parameters at the same places on all ranks
    plain: tuple[str, ...] = ()  # classes of its optimizers that do not average gradients
    besides: bool = False  # these parameters are neither in the state nor in the broadcast


KERNEL = -1
"""Stands for a start in a note of the kernel's."""


@dataclass(frozen=True)
class RankNote(Event):
    """Entry for the job's history, from a rank or the kernel."""

    start: int
    about: str  # kind in the history: checkpoint, warning, phases, straggler, logged
    detail: str  # for people
    figures: dict[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Beat:
    """Part of a heartbeat that concerns one rank."""

    start: int
    generation: int  # to which `operations` belongs
    progress: int  # a number that changes when the rank makes progress
    waiting: bool  # for other ranks
    version: int  # last commit
    operations: int = 0  # between ranks, begun by its loop in this generation
    operation: str = ""  # in which it waits, or for which its start does; empty if not known


@dataclass(frozen=True)
class Beats(Event):
    """Heartbeats of several ranks."""

    beats: tuple[Beat, ...]


@dataclass(frozen=True)
class StopRequested(Event):
    """Request to end the job at the next commit, or now."""

    now: bool = False
    reason: StopReason = StopReason.STOPPED
    seconds: float = 0.0  # lease of an unattended job


@dataclass(frozen=True)
class LimitsChanged(Event):
    """Change of a job's limits, priority or weight; None leaves a value as it is."""

    min_np: int | None = None
    max_np: int | None = None
    priority: int | None = None
    weight: float | None = None


@dataclass(frozen=True)
class ShareSet(Event):
    """The scheduler has set the job's share; it announces the free slots after this."""

    share: int | None  # most ranks that it may have besides max_np; None: no bound
    slots: int = 0  # of the cluster that it could use
    others: tuple[str, ...] = ()  # some of the jobs that it shares with, by name
    number: int = 0  # of all these jobs
    reclaimed: tuple[str, ...] = ()  # slots to leave, because another job can use no other


@dataclass(frozen=True)
class ClusterGone(Event):
    """The scheduler cannot be reached any more."""

    detail: str = ""


@dataclass(frozen=True)
class Tick(Event):
    """Time has passed."""
