"""The nouns of membership: slots, limits, plans, outcomes. Plain frozen data."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

__all__ = ["FRESH", "Limits", "Member", "Outcome", "Place", "Plan", "Slot", "over"]

FRESH = -1
"""Version of a rank that has never synchronised with the job's state."""


@dataclass(frozen=True)
class Slot:
    """Room for one rank.

    Attributes
    ----------
    id : str
        Identity of the worker *process*; a restarted worker has a new one.
    worker : str
        The worker's address.
    name : str
        The worker's name, which outlives a restart by its nanny.
    host : str
        The machine, as workers on it prove it to each other.
    """

    id: str
    worker: str
    name: str
    host: str

    @property
    def lasting(self) -> str:
        """What stays when the worker's process is restarted: its name on its host."""
        return f"{self.host}/{self.name}"


@dataclass(frozen=True)
class Limits:
    """What a job's owner allows. All times in seconds.

    Attributes
    ----------
    np : int
        Slots to wait for before anything is started.
    min_np : int
        Fewest ranks that may train.
    max_np : int or None
        Most ranks that may train; None for all that the cluster offers.
    elastic_timeout : float
        How long to wait for enough slots, and for a started rank to be ready.
    stall_timeout : float
        How long a rank may hold up others that wait for it.
    forming_timeout : float
        How long the ranks of a plan may take to connect.
    ending_timeout : float
        How long ranks may take to end when told to; then their workers are restarted.
    reset_limit : int or None
        Most changes of membership.
    cooldown : tuple of (float, float) or None
        Shortest and longest exclusion of a worker that failed; None excludes its process for
        good. Hosts are never left out for good: without a range, for 10 to 600 s.
    slots_per_host : int or None
        Most ranks on one host.
    """

    np: int = 1
    min_np: int = 1
    max_np: int | None = None
    elastic_timeout: float = 600.0
    stall_timeout: float = 60.0
    forming_timeout: float = 10.0
    ending_timeout: float = 10.0
    reset_limit: int | None = None
    cooldown: tuple[float, float] | None = None
    slots_per_host: int | None = None

    def __post_init__(self) -> None:
        if self.max_np is not None and self.min_np > self.max_np:
            raise ValueError(f"min_np={self.min_np} is above max_np={self.max_np}")
        if self.cooldown is not None and not 0 <= self.cooldown[0] <= self.cooldown[1]:
            raise ValueError(f"cooldown={self.cooldown}: must be (lo, hi) with 0 <= lo <= hi")


@dataclass(frozen=True)
class Place:
    """Where a rank stands: in the job, on its host, and over the hosts."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


@dataclass(frozen=True)
class Member:
    """A rank of a plan.

    Attributes
    ----------
    start : int
        Which start of the function this is, counted over the job; never reused.
    slot : Slot
        Where it runs.
    store : tuple of (str, int)
        Address of the store that it keeps open.
    version : float
        What it holds, as in :class:`~nbelastic.membership.RankReady`; ``FRESH`` if it has never
        synchronised.
    """

    start: int
    slot: Slot
    store: tuple[str, int]
    version: float


@dataclass(frozen=True)
class Plan:
    """One agreed membership: what the driver tells the members of a generation.

    Attributes
    ----------
    generation : int
        Its number, which only grows.
    members : tuple of Member
        In the order of their ranks.
    loop : int
        Which elastic loop of the function they are in, from 1; 0 for a function without one.
    """

    generation: int
    members: tuple[Member, ...]
    loop: int

    @property
    def version(self) -> float:
        """Newest committed version among the members; ``FRESH`` when nobody has any."""
        return max(member.version for member in self.members)

    @property
    def source(self) -> int:
        """Lowest rank that holds the newest version: where the state comes from."""
        newest = self.version
        return next(r for r, member in enumerate(self.members) if member.version == newest)

    @property
    def behind(self) -> tuple[int, ...]:
        """Ranks that must receive the state."""
        newest, source = self.version, self.source
        return tuple(
            rank
            for rank, member in enumerate(self.members)
            if member.version != newest or (newest == FRESH and rank != source)
        )

    def rank_of(self, start: int) -> int | None:
        """Return the rank of a start of the function, or None if it is no member."""
        return self._ranks.get(start)

    @functools.cached_property
    def _ranks(self) -> dict[int, int]:
        return {member.start: rank for rank, member in enumerate(self.members)}


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes
    ----------
    kind : str
        ``finished``, ``failed`` or ``stopped``.
    error : str
        For a failure, which: ``rank_failed``, ``rank_lost``, ``not_enough_workers``,
        ``reset_limit``, ``no_progress``, ``cluster_lost``, ``returned_early``.
    reason : str
        For people.
    starts : tuple of int
        Whose results, or whose errors, the job ends with, by rank.
    """

    kind: str
    error: str = ""
    reason: str = ""
    starts: tuple[int, ...] = field(default=())


_MEDIA = {"gloo": "Gloo", "shm": "shared memory", "hierarchical": "shared memory and Gloo"}


def over(backend: str) -> str:
    """Return what tensors travel over, in words; empty where that is not known, or they do not.

    Parameters
    ----------
    backend : str
        Which kind of communicator the members have, by its name.
    """
    return "" if backend in ("", "solo") else f"over {_MEDIA.get(backend, backend)}"
