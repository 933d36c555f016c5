"""What a user sees of a job: frozen snapshots and the history of what happened."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HistoryEvent", "JobStatus", "RankStatus"]


@dataclass(frozen=True)
class RankStatus:
    """One rank of a job.

    Attributes
    ----------
    rank : int or None
        Its rank; None while it belongs to no generation.
    worker : str
        Address of its worker.
    host : str
        Its host, as workers prove it to each other.
    state : str
        ``starting``, ``ready``, ``forming``, ``running``, ``leaving``, ``done``, ``returned`` or
        ``ending``.
    commits : int
        Its last commit.
    """

    rank: int | None
    worker: str
    host: str
    state: str
    commits: int


@dataclass(frozen=True)
class JobStatus:
    """A job at one moment.

    Attributes
    ----------
    name : str
        The job's name.
    state : str
        ``waiting``, ``forming``, ``running``, ``finished``, ``failed`` or ``stopped``.
    generation : int
        Number of the newest generation.
    size : int
        Number of its members; 0 while none has been agreed.
    min_np, max_np : int, int or None
        The limits; None for as many as the cluster offers.
    resets : int
        Changes of membership so far.
    commits : int
        Newest commit that every member holds.
    elapsed : float
        Seconds since the job was started, to its end if it has ended.
    reason : str
        What the job waits for, or why it ended.
    ranks : tuple of RankStatus
        Members by rank, then those that start.
    """

    name: str
    state: str
    generation: int
    size: int
    min_np: int
    max_np: int | None
    resets: int
    commits: int
    elapsed: float
    reason: str
    ranks: tuple[RankStatus, ...]


@dataclass(frozen=True)
class HistoryEvent:
    """Something that happened to a job.

    Attributes
    ----------
    time : float
        Seconds since the epoch.
    kind : str
        ``joined``, ``lost``, ``left``, ``formed``, ``reset``, ``cooldown``, ``restarted``,
        ``refused``, ``waiting``, ``finished``, ``failed`` or ``stopped``.
    worker : str or None
        Address of the worker that it happened to.
    rank : int or None
        The rank that it happened to, in the generation of that time.
    generation : int
        The generation of that time.
    detail : str
        More, for people.
    """

    time: float
    kind: str
    worker: str | None
    rank: int | None
    generation: int
    detail: str
