"""What the machine is told. Every event may come late, twice, or out of order."""

from __future__ import annotations

from dataclasses import dataclass

from .model import FRESH, Slot

__all__ = [
    "Beat",
    "Beats",
    "ClusterGone",
    "Event",
    "LimitsChanged",
    "LoopDone",
    "RankFailed",
    "RankFormed",
    "RankLeft",
    "RankNote",
    "RankReady",
    "RankReturned",
    "SlotBusy",
    "SlotGone",
    "SlotLeaving",
    "SlotSilent",
    "SlotsFound",
    "StopRequested",
    "Tick",
]


@dataclass(frozen=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True)
class SlotsFound(Event):
    """Workers are there and free."""

    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class SlotGone(Event):
    """A worker's process is gone, or out of the scheduler's reach for good."""

    slot: str
    detail: str = ""


@dataclass(frozen=True)
class SlotLeaving(Event):
    """A worker was asked to leave: retired, scaled away, or terminated with notice."""

    slot: str


@dataclass(frozen=True)
class SlotBusy(Event):
    """The slot was given to another job before this one could claim it."""

    slot: str


@dataclass(frozen=True)
class SlotSilent(Event):
    """A worker has sent no heartbeat for longer than the heartbeat timeout."""

    slot: str
    detail: str = ""


@dataclass(frozen=True)
class RankReady(Event):
    """A rank is set up and waits for a plan.

    Attributes
    ----------
    start : int
        Which start of the function.
    left : int
        Newest generation the rank has heard of: it is ready for any later one, for no earlier.
    version : float
        Its last commit, or ``FRESH``; half a commit more where it holds the state at the end of a
        later step instead.
    loop : int
        Which elastic loop it is about to enter; 0 outside one.
    store : tuple of (str, int)
        Address of the store that it keeps open.
    failed : bool
        It left its generation because an operation failed, not because that was agreed.
    detail : str
        What failed.
    unreached : tuple of int
        Starts of those that it could not reach, where plans in a row have not formed.
    gone : tuple of int
        Starts of members of the generation that it has left whose processes have ended: it has
        that from the system, which tells the scheduler later, when their memory is given back.
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


@dataclass(frozen=True)
class RankFormed(Event):
    """A rank has connected to the others of its generation.

    Attributes
    ----------
    start : int
        Which start of the function.
    generation : int
        The generation.
    backend : str
        Which kind of communicator it has: ``gloo``, ``shm``, ``hierarchical``, ``pygloo`` or
        ``solo``. All members have the same.
    remark : str
        Why none of a faster kind, for people.
    """

    start: int
    generation: int
    backend: str = ""
    remark: str = ""


@dataclass(frozen=True)
class LoopDone(Event):
    """A rank's elastic loop has returned; it waits for the others."""

    start: int
    generation: int
    version: int


@dataclass(frozen=True)
class RankReturned(Event):
    """A rank's function has returned."""

    start: int


@dataclass(frozen=True)
class RankFailed(Event):
    """A rank's function has raised.

    Attributes
    ----------
    start : int
        Which start of the function.
    error : str
        The exception in one line.
    collective : bool
        It was a failed operation between ranks: a consequence, not a cause.
    version : int
        Its last commit, or ``FRESH``.
    """

    start: int
    error: str
    collective: bool = False
    version: int = FRESH


@dataclass(frozen=True)
class RankLeft(Event):
    """A rank has ended because it was told to."""

    start: int


@dataclass(frozen=True)
class RankNote(Event):
    """Something for the job's history that decides nothing.

    Attributes
    ----------
    start : int
        Which start of the function tells it.
    about : str
        What it is about, as the history's ``kind`` has it: ``checkpoint``.
    detail : str
        For people.
    """

    start: int
    about: str
    detail: str


@dataclass(frozen=True)
class Beat:
    """What a heartbeat says of one rank.

    Attributes
    ----------
    start : int
        Which start of the function.
    progress : int
        A number that changes when the rank gets on.
    waiting : bool
        Whether it waits for other ranks.
    version : int
        Its last commit.
    """

    start: int
    progress: int
    waiting: bool
    version: int


@dataclass(frozen=True)
class Beats(Event):
    """Heartbeats of several ranks."""

    beats: tuple[Beat, ...]


@dataclass(frozen=True)
class StopRequested(Event):
    """The job's owner wants it to end: at the next commit, or now."""

    now: bool = False
    reason: str = "stopped by its user"


@dataclass(frozen=True)
class LimitsChanged(Event):
    """The job's owner has changed how many ranks it may have; None leaves a limit as it is."""

    min_np: int | None = None
    max_np: int | None = None


@dataclass(frozen=True)
class ClusterGone(Event):
    """The scheduler cannot be reached any more."""

    detail: str = ""


@dataclass(frozen=True)
class Tick(Event):
    """Time has passed."""
