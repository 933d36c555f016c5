"""Data of membership: slots, limits, plans, outcomes. All of it is frozen."""

from __future__ import annotations

import dataclasses
import enum
import functools
from dataclasses import dataclass

from .reasons import Reason, UnusedReason

FRESH = -1
"""Version of a rank that has never synchronised with the job's state."""


@dataclass(frozen=True)
class Slot:
    """Capacity for one rank."""

    id: str  # of the worker *process*; a restarted worker has a new one
    worker: str  # address
    name: str  # of the worker; it outlives a restart by its nanny
    host: str  # identified by what its workers share

    @property
    def lasting(self) -> str:
        """Identity that outlives a restart of the process: the worker's name on its host."""
        return f"{self.host}/{self.name}"


@dataclass(frozen=True)
class UnusedWorker:
    """A worker of the cluster that is not offered to the job."""

    worker: str  # address
    reason: UnusedReason
    # The other job for TAKEN, what is lacking for LACKS_RESOURCES, the versions for OTHER_VERSIONS,
    # the error for REFUSED.
    detail: str = ""


@dataclass(frozen=True)
class Limits:
    """Limits set by a job's owner, with times in seconds."""

    np: int = 1  # slots to wait for before anything is started
    min_np: int = 1  # fewest ranks that may train
    max_np: int | None = None  # most ranks that may train; None: all that the cluster offers
    # Longest wait for enough slots, and for a started rank to be ready.
    elastic_timeout: float = 600.0
    stall_timeout: float = 60.0  # longest time that a rank may hold up others that wait for it
    forming_timeout: float = 10.0  # longest time for the ranks of a plan to connect
    exit_timeout: float = 60.0  # longest time for a process to end after its function
    ending_timeout: float = 10.0  # longest time for ranks to end; then their workers are restarted
    reset_limit: int | None = None  # most changes of membership; None: no limit
    check_every: int = 1  # fewest commits of a generation until newcomers join; ranks leave at any
    # Shortest and longest exclusion of a worker that failed; None excludes its process for good.
    # Hosts are never excluded for good: without a range, for 10 to 600 s.
    cooldown: tuple[float, float] | None = None
    slots_per_host: int | None = None  # most ranks on one host; None: no limit
    priority: int = 0  # among jobs of a cluster, higher ones are served first
    weight: float = 1.0  # part of what jobs of one priority share, relative to theirs
    preemptible: bool = False  # a job of a higher priority may take its floor, down to one rank
    checkpoint: bool = False  # ranks can write the state to files

    def __post_init__(self) -> None:
        if self.max_np is not None and self.min_np > self.max_np:
            raise ValueError(f"min_np={self.min_np} is above max_np={self.max_np}")
        if self.cooldown is not None and not 0 <= self.cooldown[0] <= self.cooldown[1]:
            raise ValueError(f"cooldown={self.cooldown}: must be (lo, hi) with 0 <= lo <= hi")

    def changed(
        self,
        min_np: int | None,
        max_np: int | None,
        priority: int | None = None,
        weight: float | None = None,
    ) -> Limits:
        """Return the limits after a change; None leaves a limit as it is.

        If the new limit contradicts the other one, it changes that, too.
        """
        low = self.min_np if min_np is None else min_np
        high = self.max_np if max_np is None else max_np
        if high is not None and low > high:
            low, high = (low, low) if max_np is None else (high, high)
        start = self.np if min_np is None else low
        return dataclasses.replace(
            self,
            np=start,
            min_np=low,
            max_np=high,
            priority=self.priority if priority is None else priority,
            weight=self.weight if weight is None else weight,
        )


@dataclass(frozen=True)
class Place:
    """Position of a rank in the job, on its host, and over the hosts."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


@dataclass(frozen=True)
class Member:
    """A rank of a plan."""

    start: int  # number of the start of the function, over the job; never reused
    slot: Slot
    store: tuple[str, int]  # address of the store that it keeps open
    version: float  # as in RankReady; FRESH if it has never synchronised


@dataclass(frozen=True)
class Plan:
    """One agreed membership, as the members of a generation receive it."""

    generation: int  # its number, which only grows
    members: tuple[Member, ...]  # by rank
    loop: int  # number of the members' elastic loop, from 1; 0 for a function without one

    @property
    def version(self) -> float:
        """Newest committed version among the members; ``FRESH`` if none has any."""
        return max(member.version for member in self.members)

    @property
    def source(self) -> int:
        """Source of the state: the lowest rank that holds the newest version."""
        newest = self.version
        return next(r for r, member in enumerate(self.members) if member.version == newest)

    @property
    def behind(self) -> tuple[int, ...]:
        """Ranks that have to receive the state."""
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


class FailureKind(str, enum.Enum):
    """Kind of a job's failure."""

    RANK_FAILED = "rank_failed"
    RANK_LOST = "rank_lost"
    RETURNED_EARLY = "returned_early"
    NOT_ENOUGH_WORKERS = "not_enough_workers"
    RESET_LIMIT = "reset_limit"
    NO_PROGRESS = "no_progress"
    CLUSTER_LOST = "cluster_lost"


@dataclass(frozen=True)
class Outcome:
    """The end of a job."""

    kind: str  # finished, failed or stopped
    error: FailureKind | None = None  # None: no failure
    reason: Reason | None = None  # for a failure or a stop
    starts: tuple[int, ...] = ()  # with the results, or the errors, that the job ends with; by rank
