"""Limits on failures: exclusions, and the end of a job without progress.

A worker that fails is excluded for a while, and so is a host or a worker that fails again and
again. A job ends if failures repeat without progress, because a reset helps against what happens
to a job (a process dies, a connection breaks), not against what its function does.

Nothing here reads a clock or draws a random number: `now` and `chance` are arguments, so the same
events always lead to the same decisions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .reasons import Exclusion

if TYPE_CHECKING:
    from .model import Limits, Slot

FAILURE_THRESHOLD = 3
"""Failures in a row after which a host, or a worker that is restarted each time, is excluded.

In a row: without a commit of a rank of it in between. For a host, failures of so many workers.
"""

FAILURE_WINDOW = 2.0
"""Seconds in which failures on a host count as one, because a machine takes all its workers."""

EXCLUSION_RANGE = (10.0, 600.0)
"""Shortest and longest exclusion of a host, in seconds, without a range from the job's owner."""

JITTER = 0.1
"""Largest random part of an exclusion, as a fraction of it."""

FORMING_FAILURES = 5
"""Plans in a row that could not form, after which the job fails."""

STALLS = 3
"""Stalls of all ranks in a row, without a commit in between, after which the job fails."""

RESETS_OF_MEMBERS = 10
"""Resets in a row with the same members, each after a fault and without a commit."""

RESETS_WITHOUT_COMMIT = 30
"""Resets in a row with any members, each after a fault and without a commit."""

OWN_FAILURES = 5
"""Generations in a row that ranks end by themselves, without progress, before the job fails."""

OWN_FAILURES_WITH_COMMITS = 20
"""The same, if each generation makes several commits, and as many as the one before."""

LOSSES = 4
"""Losses at the same place, of a worker or of the job's state, before the job fails."""

START_DEATHS = 2
"""Deaths of a worker before the first generation that count against the function.

If so many of :data:`ERROR_WORKERS` workers, or :data:`LOSSES` of one, the job fails.
"""

REPEATED_COMMITS = 1
"""Commits that a generation may make although it only repeats earlier work."""

ERROR_WORKERS = 3
"""Number of workers on which the same error is raised before the job fails."""

NEAR_COMMITS = 1
"""Errors with at most this many commits in between belong together, whatever the time."""

NEAR_SECONDS = 60.0
"""Errors at most this far apart belong together, whatever the number of commits."""

_NUMBER = re.compile(r"\b0x[0-9a-fA-F]+|[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?")
_CHANGING = re.compile(r"\b0x[0-9a-fA-F]+|\bgeneration \d+")


# -- exclusions ----------------------------------------------------------------------------------


@dataclass
class Exclusions:
    """Exclusions by key, a worker's or a host's.

    The first failure excludes for `lo` seconds, each further one for twice as long, up to `hi`.
    Horovod's ``--blacklist-cooldown-range`` is the same idea. Here an exclusion lasts
    ``min(lo * 2**n, hi)`` plus at most a tenth, and never longer than `hi`.

    Attributes
    ----------
    bounds : tuple of (float, float) or None
        Shortest and longest exclusion in seconds; None for exclusions without end.
    failures : dict of str to int
        Number of failures of each key.
    until : dict of str to float or None
        End of each exclusion; None for never.
    """

    bounds: tuple[float, float] | None = None
    failures: dict[str, int] = field(default_factory=dict)
    until: dict[str, float | None] = field(default_factory=dict)

    def exclude(self, key: str, now: float, chance: float) -> float | None:
        """Exclude `key` after a failure; return for how many seconds, None for good.

        Parameters
        ----------
        key : str
            The worker or host that failed.
        now : float
            The time, in seconds.
        chance : float
            A random number from 0 up to 1.
        """
        count = self.failures[key] = self.failures.get(key, 0) + 1
        if self.bounds is None:
            self.until[key] = None
            return None
        low, high = self.bounds
        doubled = low * 2.0 ** min(count - 1, 64)
        seconds = min(min(doubled, high) * (1 + JITTER * chance), high)
        self.until[key] = now + seconds
        return seconds

    def excludes(self, key: str, now: float) -> bool:
        """Return whether `key` is excluded now."""
        if key not in self.until:
            return False
        end = self.until[key]
        return end is None or now < end

    def next_end(self, now: float) -> float | None:
        """Return the end of the next exclusion to end, or None."""
        ends = [end for end in self.until.values() if end is not None and end > now]
        return min(ends, default=None)


# -- the same error on several workers -----------------------------------------------------------


@dataclass(frozen=True)
class ErrorReport:
    """An error that a member raised.

    Attributes
    ----------
    start : int
        Start of the function that raised it.
    worker, host : str
        The worker's name on its host, which outlives a restart, and the host.
    generation, version : int
        The generation, and the job's newest commit.
    time : float
        The time, in seconds.
    error : str
        The exception in one line.
    """

    start: int
    worker: str
    host: str
    generation: int
    version: int
    time: float
    error: str

    def near(self, version: int, time: float) -> bool:
        """Return whether there has been hardly any progress since."""
        return version - self.version <= NEAR_COMMITS or time - self.time <= NEAR_SECONDS


@dataclass
class RepeatedErrors:
    """Recent errors of members, equal ones together.

    Errors are equal if their texts differ in numbers only, such as a rank, a row or an address. The
    same error on several workers is the fault of the function or the data: each rank that gets a
    certain sample raises. Such an error returns soon, on another worker, with hardly a commit in
    between, because the rest of the epoch is dealt anew and the sample comes first. A failing
    device or a full disk gives equal errors too, but hours apart.

    Attributes
    ----------
    chains : dict of str to list of ErrorReport
        By error, without its numbers, in the order in which they were raised.
    last : str
        The newest error.
    """

    chains: dict[str, list[ErrorReport]] = field(default_factory=dict)
    last: str = ""

    def note(self, report: ErrorReport) -> list[ErrorReport]:
        """Note an error and return the chain of equal errors, itself included."""
        self.chains = {
            error: chain
            for error, chain in self.chains.items()
            if chain[-1].near(report.version, report.time)
        }
        chain = self.chains.setdefault(_NUMBER.sub("…", report.error), [])
        chain.append(report)
        self.last = report.error
        return chain


# -- generations that end without progress ---------------------------------------------------------


@dataclass(frozen=True)
class OwnFailure:
    """The end of a generation by its own ranks: no process was lost, no connection broke.

    Attributes
    ----------
    cause : str
        The first report of a rank.
    version : int
        The commit from which the next generation starts.
    gained : int
        Commits that the generation has made.
    """

    cause: str
    version: int
    gained: int

    def repeats(self, earlier: OwnFailure) -> bool:
        """Return whether it is the same cause at the same place."""
        return _equal(self.cause, earlier.cause) and (
            self.version <= earlier.version + REPEATED_COMMITS
        )

    def is_like(self, earlier: OwnFailure) -> bool:
        """Return whether the generation made no more progress than the one before it."""
        if self.gained <= REPEATED_COMMITS:
            return earlier.gained <= REPEATED_COMMITS
        return _equal(self.cause, earlier.cause) and self.gained == earlier.gained


@dataclass(frozen=True)
class MemberLoss:
    """The end of a generation by the loss of members.

    Attributes
    ----------
    workers : tuple of str
        Their workers' names on their hosts, which outlive a restart.
    version : int
        The newest known commit.
    state_lost : bool
        Whether no rank was left that held the job's state.
    """

    workers: tuple[str, ...]
    version: int
    state_lost: bool


@dataclass
class ProgressCheck:
    """Causes that ended the latest generations, as far as these made no progress.

    A place in training is known by its commit. A function that repeats the step before its commit
    reaches one commit more in each generation, so one commit is no progress. A function that
    repeats more than that makes as many commits in each generation as in the one before. That may
    be progress, and counts only after many times.

    Attributes
    ----------
    own : list of OwnFailure
        Generations in a row that ranks ended themselves.
    losses : list of MemberLoss
        Generations in a row that the loss of members ended.
    resumed : int
        Generation of the newest commit on disk that the job has resumed from.
    """

    own: list[OwnFailure] = field(default_factory=list)
    losses: list[MemberLoss] = field(default_factory=list)
    resumed: int = 0

    def note(self, failure: OwnFailure) -> int:
        """Note the end of a generation by its own ranks.

        Returns
        -------
        int
            Number of generations in a row that have ended so, if the job has to fail; else 0.
        """
        self.losses.clear()
        last = self.own[-1] if self.own else None
        repeats = last is not None and failure.repeats(last)
        if last is not None and not repeats and not failure.is_like(last):
            self.own.clear()
        self.own.append(failure)
        few = failure.gained <= REPEATED_COMMITS
        enough = len(self.own) >= (OWN_FAILURES if few else OWN_FAILURES_WITH_COMMITS)
        return len(self.own) if repeats or enough else 0

    def note_loss(self, loss: MemberLoss) -> int:
        """Note the end of a generation by the loss of members.

        Returns
        -------
        int
            Number of losses in a row of one of the workers, or of the state, at this place, if the
            job has to fail; else 0.
        """
        self.own.clear()
        furthest = max((each.version for each in self.losses), default=loss.version)
        if loss.version > furthest + REPEATED_COMMITS:
            self.losses.clear()
        self.losses.append(loss)
        times = [sum(worker in each.workers for each in self.losses) for worker in loss.workers]
        times.append(sum(each.state_lost for each in self.losses) if loss.state_lost else 0)
        return max(times) if max(times) >= LOSSES else 0

    def note_resumed(self, generation: int, version: int) -> None:
        """Note that the job resumes from a commit on disk, made in `generation`.

        Another commit than the last time is progress, because after a loss of the state commits
        are counted anew.
        """
        if generation != self.resumed and version > REPEATED_COMMITS:
            self.losses.clear()
        self.resumed = generation

    def clear(self) -> None:
        """Forget all causes, because the generation has ended for another one."""
        self.own.clear()
        self.losses.clear()


def _equal(cause: str, other: str) -> bool:
    """Return whether two causes are equal but for what differs from generation to generation."""
    return _CHANGING.sub("…", cause) == _CHANGING.sub("…", other)


# -- all together --------------------------------------------------------------------------------


@dataclass
class FailurePolicy:
    """All limits on the failures of one job, and what is counted for them.

    Attributes
    ----------
    workers : Exclusions
        Workers that failed and live, by :meth:`worker_key`.
    repeated : Exclusions
        Hosts, and workers by their lasting names, that failed `FAILURE_THRESHOLD` times in a row.
    worker_failures : dict of str to int
        Failures in a row of each worker, by its lasting name.
    host_failures : dict of str to list of str
        Workers of each host that failed, without a commit by a rank of the host since.
    host_failed_at : dict of str to float
        Time of the newest of these failures.
    start_deaths : dict of str to int
        Deaths of each worker, by its lasting name, before the first generation.
    errors : RepeatedErrors
        Recent errors of members.
    progress : ProgressCheck
        Generations that ended without progress.
    resets, resets_by_share : int
        Changes of membership so far, and those of them that only sharing has caused.
    forming_failures : int
        Plans in a row that did not form.
    stalls, stalled_at : int
        Stalls of all ranks in a row, and the version at the last of them.
    resets_of_members, resets_without_commit : int
        Resets in a row after a fault, without a commit: with the same members, and with any.
    """

    workers: Exclusions = field(default_factory=Exclusions)
    repeated: Exclusions = field(default_factory=Exclusions)
    worker_failures: dict[str, int] = field(default_factory=dict)
    host_failures: dict[str, list[str]] = field(default_factory=dict)
    host_failed_at: dict[str, float] = field(default_factory=dict)
    start_deaths: dict[str, int] = field(default_factory=dict)
    errors: RepeatedErrors = field(default_factory=RepeatedErrors)
    progress: ProgressCheck = field(default_factory=ProgressCheck)
    resets: int = 0
    resets_by_share: int = 0
    forming_failures: int = 0
    stalls: int = 0
    stalled_at: int = 0
    resets_of_members: int = 0
    resets_without_commit: int = 0

    @classmethod
    def of(cls, limits: Limits) -> FailurePolicy:
        """Return the policy of a new job."""
        return cls(Exclusions(limits.cooldown), Exclusions(limits.cooldown or EXCLUSION_RANGE))

    # -- workers and hosts

    def worker_key(self, slot: Slot) -> str:
        """Return the key under which a worker is excluded: with a range, its lasting name."""
        return slot.id if self.workers.bounds is None else slot.lasting

    def excludes(self, slot: Slot, now: float) -> bool:
        """Return whether a slot's worker or host is excluded."""
        return (
            self.workers.excludes(self.worker_key(slot), now)
            or self.repeated.excludes(slot.lasting, now)
            or self.repeated.excludes(slot.host, now)
        )

    @property
    def excludes_any(self) -> bool:
        """Whether anything was ever excluded."""
        return bool(self.workers.until or self.repeated.until)

    def next_end(self, now: float) -> list[float]:
        """Return when exclusions end next."""
        ends = [each.next_end(now) for each in (self.workers, self.repeated) if each.until]
        return [end for end in ends if end is not None]

    def exclude_worker(
        self, slot: Slot, now: float, chance: float, *, process_gone: bool
    ) -> Exclusion | None:
        """Exclude a worker that failed; None for a process that is gone, without a range."""
        if process_gone and self.workers.bounds is None:
            return None
        seconds = self.workers.exclude(self.worker_key(slot), now, chance)
        return Exclusion("worker", slot.worker, seconds)

    def exclude_name(self, slot: Slot, now: float, chance: float) -> Exclusion:
        """Exclude a worker by its lasting name."""
        return Exclusion("worker", slot.lasting, self.repeated.exclude(slot.lasting, now, chance))

    def count_failure(self, slot: Slot, now: float, chance: float) -> list[Exclusion]:
        """Count a failure of a worker and its host; return what is excluded for it.

        A worker that fails after each restart is one of its host's many, so it is excluded alone.
        Failures on a host within :data:`FAILURE_WINDOW` count as one.
        """
        host, name, found = slot.host, slot.lasting, []
        self.worker_failures[name] = self.worker_failures.get(name, 0) + 1
        if self.worker_failures[name] >= FAILURE_THRESHOLD and self.workers.bounds is None:
            found.append(self.exclude_name(slot, now, chance))
        names = self.host_failures.setdefault(host, [])
        if name in names or now - self.host_failed_at.get(host, -FAILURE_WINDOW) < FAILURE_WINDOW:
            return found
        names.append(name)
        self.host_failed_at[host] = now
        if len(names) >= FAILURE_THRESHOLD:
            self.host_failures.pop(host)
            found.append(Exclusion("host", host, self.repeated.exclude(host, now, chance)))
        return found

    def note_start_death(self, slot: Slot) -> int:
        """Note that a process has died before the first generation.

        Returns
        -------
        int
            Number of such deaths, if the job has to fail; else 0.
        """
        deaths = self.start_deaths
        deaths[slot.lasting] = deaths.get(slot.lasting, 0) + 1
        repeated = sum(count >= START_DEATHS for count in deaths.values())
        if deaths[slot.lasting] >= LOSSES or repeated >= ERROR_WORKERS:
            return sum(deaths.values())
        return 0

    def forgive(self, slot: Slot) -> None:
        """Forget the failures of a worker and its host, because its rank has made progress."""
        if not (self.worker_failures or self.host_failures or self.repeated.failures):
            return
        self.host_failures.pop(slot.host, None)
        self.worker_failures.pop(slot.lasting, None)
        for key in (slot.host, slot.lasting):
            self.repeated.failures.pop(key, None)

    # -- the job

    def reset_limit_reached(self, limits: Limits) -> bool:
        """Return whether the job may not change its members once more."""
        counted = self.resets - self.resets_by_share
        return limits.reset_limit is not None and counted >= limits.reset_limit

    def count_reset(self, *, same_members: bool, failed: bool) -> int:
        """Count a reset; return how many there were without a commit if that is too many."""
        self.resets_of_members = self.resets_of_members + 1 if same_members and failed else 0
        self.resets_without_commit += failed
        if self.resets_of_members >= RESETS_OF_MEMBERS:
            return RESETS_OF_MEMBERS
        return RESETS_WITHOUT_COMMIT if self.resets_without_commit >= RESETS_WITHOUT_COMMIT else 0

    def note_commit(self, version: int) -> None:
        """Note that all members hold a newer commit."""
        self.resets_of_members = self.resets_without_commit = 0
        if version > self.stalled_at + REPEATED_COMMITS:
            self.stalls = 0

    def note_stall(self, version: int) -> bool:
        """Note a stall of all ranks; return whether the job has to fail."""
        self.stalls += 1
        self.stalled_at = version
        return self.stalls >= STALLS

    def cannot_form(self) -> bool:
        """Return whether too many plans in a row did not form."""
        return self.forming_failures >= FORMING_FAILURES

    def error_repeats(self, chain: list[ErrorReport], hosts: set[str], *, short: bool) -> bool:
        """Return whether the error of a chain is the function's fault, not a worker's.

        With several hosts, workers of one are not enough, because the host may be at fault. If too
        few workers are left to go on (`short`), two workers on any host are enough.
        """
        own_hosts = {each.host for each in chain}
        one_host = len(own_hosts) == 1 and bool(hosts - own_hosts)
        enough = len({each.worker for each in chain}) >= ERROR_WORKERS - short
        return enough and (short or not one_host)
