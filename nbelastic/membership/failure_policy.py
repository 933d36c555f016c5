"""Limits on failures: exclusions, and the end of a job without progress.

A worker that fails is excluded for a while, and so is a host or a worker that fails again and
again. A job ends if failures repeat without progress, because a reset helps against what happens
to a job (a process dies, a connection breaks), not against what its function does.

`now` and `chance` are arguments, so the same events always lead to the same decisions. A decision
is an :class:`~nbelastic.messages.Exclusion`, or a
:class:`~nbelastic.messages.Tally`: how often something came, and the limit at which the
job ends.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from nbelastic.messages import Counted, Exclusion, Limits, Slot, Tally, Text

SAME_ERROR = 2  # times that ranks themselves end a generation with one error at one commit

SAME_KIND = 4  # times in a row, without progress, of one kind of setback: see :class:`Counted`
ANY_KIND = 20  # resets in a row after faults of any kind, without a commit

REPEATED_COMMITS = 1
"""Commits that a generation may make although it only repeats earlier work.

A function that repeats the step before its commit reaches one commit more in each generation.
"""

ERROR_WORKERS = 3  # workers on which the same error is raised before the job fails
NEAR_SECONDS = 60.0  # errors at most this far apart belong together, whatever the number of commits

FAILURE_THRESHOLD = 3
"""Failures in a row that exclude a host, or a worker that is restarted each time.

In a row: without a commit of a rank of it in between. For a host, failures of so many workers.
"""

FAILURE_WINDOW = 2.0
"""Seconds in which failures on a host count as one: all its workers end with it."""

EXCLUSION_RANGE = (10.0, 600.0)
"""Shortest and longest exclusion of a host, in seconds, if the owner sets none."""

JITTER = 0.1  # largest random part of an exclusion, as a fraction of it

_NUMBER = re.compile(r"\b0x[0-9a-fA-F]+|[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?")
_CHANGING = re.compile(r"\b0x[0-9a-fA-F]+|\bgeneration \d+")


# -- exclusions ----------------------------------------------------------------------------------


@dataclass
class Exclusions:
    """Exclusions by worker or host, each twice as long as the one before, as with Horovod."""

    bounds: tuple[float, float] | None = None  # shortest and longest, in seconds; None: for good
    times: dict[str, int] = field(default_factory=dict)
    until: dict[str, float | None] = field(default_factory=dict)  # None: for good

    def exclude(self, key: str, now: float, chance: float) -> float | None:
        """Exclude `key` after a failure; return for how many seconds, None for good."""
        count = self.times[key] = self.times.get(key, 0) + 1
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


@dataclass(frozen=True)
class ErrorReport:
    """An error that a member raised."""

    start: int
    slot: Slot
    generation: int
    version: int  # the job's newest commit
    time: float
    error: str  # the exception in one line


@dataclass(frozen=True)
class Setback:
    """The end of a generation by a fault, or of a rank before the first generation."""

    commit: int  # from which the next generation starts; the newest known one if it is lost
    error: str = ""  # of the function, where its ranks ended the generation themselves
    # Its kinds; for lost members with the names of their workers, which outlive a restart.
    kinds: tuple[tuple[Counted, str], ...] = ()
    gained: int = 0  # commits since the setback before
    vain: bool = False  # no commit since, or as many as before, up to the same error


@dataclass
class FailurePolicy:
    """Limits on the failures of a job, and their counts.

    =========================  ====================  =============================================
    excluded                   by                    after
    =========================  ====================  =============================================
    a worker, for good         ``workers``           an error of its rank, unless others raise it
    a worker, with a cooldown  ``workers``           any failure of its rank
    a worker's lasting name    ``repeated``          FAILURE_THRESHOLD in a row, without a cooldown
    a host                     ``repeated``          the failures of so many of its workers
    =========================  ====================  =============================================

    A commit of its rank begins the row of ``repeated`` anew. The times of ``workers`` only grow, as
    with Horovod.
    """

    workers: Exclusions = field(default_factory=Exclusions)  # alive, by :meth:`worker_key`
    # Hosts, and workers by lasting names, that failed FAILURE_THRESHOLD times in a row.
    repeated: Exclusions = field(default_factory=Exclusions)
    worker_failures: dict[str, int] = field(default_factory=dict)  # in a row, by lasting name
    # Workers of each host that failed, without a commit by a rank of the host since.
    host_failures: dict[str, list[str]] = field(default_factory=dict)
    host_failed_at: dict[str, float] = field(default_factory=dict)  # the newest of them
    # Recent errors of members, by their texts without numbers.
    errors: dict[str, list[ErrorReport]] = field(default_factory=dict)
    last_error: str = ""
    setbacks: list[Setback] = field(default_factory=list)  # in a row without progress
    resets: int = 0
    forming_failures: int = 0  # plans in a row that did not form

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

    def exclude_worker(
        self, slot: Slot, now: float, chance: float, *, process_gone: bool
    ) -> Exclusion | None:
        """Exclude a failed worker; None for an ended process without a cooldown range."""
        if process_gone and self.workers.bounds is None:
            return None
        key = self.worker_key(slot)
        seconds = self.workers.exclude(key, now, chance)
        return Exclusion("worker", slot.worker, seconds, self.workers.times[key])

    def exclude_name(self, slot: Slot, now: float, chance: float) -> Exclusion:
        """Exclude a worker by its lasting name."""
        return self._exclude("worker", slot.lasting, now, chance)

    def _exclude(self, kind: str, name: str, now: float, chance: float) -> Exclusion:
        seconds = self.repeated.exclude(name, now, chance)
        return Exclusion(kind, name, seconds, self.repeated.times[name])

    def count_failure(self, slot: Slot, now: float, chance: float) -> list[Exclusion]:
        """Count a failure of a worker and its host; return the exclusions."""
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
            found.append(self._exclude("host", host, now, chance))
        return found

    def forgive(self, slot: Slot) -> None:
        """Forget failures of a worker and its host, because its rank made progress."""
        if not (self.worker_failures or self.host_failures or self.repeated.times):
            return
        self.host_failures.pop(slot.host, None)
        self.worker_failures.pop(slot.lasting, None)
        for key in (slot.host, slot.lasting):
            self.repeated.times.pop(key, None)

    # -- the job

    def count(self, setback: Setback) -> Tally:
        """Count a setback; return the tally closest to its limit."""
        # Progress is more than one commit that no rank had reached before: it begins a new row.
        # But as many commits as before, up to the same error, may be the same work done again.
        row = self.setbacks
        gained = setback.commit - max([each.commit for each in row], default=0)
        last = row[-1] if row else None
        again = last is not None and setback.error != "" and gained == last.gained
        again = again and last is not None and _equal(setback.error, last.error)
        if gained > REPEATED_COMMITS and not again:
            row.clear()
        row.append(replace(setback, gained=gained, vain=gained <= 0 or again))
        del row[:-ANY_KIND]
        return max(self._counts(), key=lambda count: count.times / count.limit)

    def _counts(self) -> list[Tally]:
        row, last = self.setbacks, self.setbacks[-1]
        begun = max((n for n, each in enumerate(row) if each.gained > REPEATED_COMMITS), default=0)
        here = row[begun:]
        in_vain = next((n for n, each in enumerate(reversed(row)) if not each.vain), len(row) - 1)
        found = [(Counted.ANY, in_vain + 1 if last.commit >= 0 else 0, ANY_KIND)]
        if last.error:
            same = sum(_equal(last.error, each.error) for each in here)
            found.append((Counted.SAME_ERROR, same, SAME_ERROR))
        for kind in last.kinds:
            found.append((kind[0], sum(kind in each.kinds for each in here), SAME_KIND))
        return [Tally(kind, times, limit, last.commit) for kind, times, limit in found]

    def note_error(self, report: ErrorReport) -> list[ErrorReport]:
        """Note an error and return the chain of errors that are equal but for numbers."""
        # The fault of the function or its data returns soon, on another worker, with hardly a
        # commit in between: the rest of the epoch is dealt anew, and the bad sample comes first. A
        # failing device or a full disk gives equal errors too, but hours apart.
        for error, (*_, last) in list(self.errors.items()):
            commits, seconds = report.version - last.version, report.time - last.time
            if commits > REPEATED_COMMITS and seconds > NEAR_SECONDS:
                del self.errors[error]
        chain = self.errors.setdefault(_NUMBER.sub("…", report.error), [])
        chain.append(report)
        self.last_error = report.error
        return chain

    def repeated_error(
        self, chain: list[ErrorReport], hosts: set[str], *, short: bool
    ) -> Text | None:
        """Return the error of a chain if it is the function's fault, not a worker's."""
        # Errors on one of several hosts may be the fault of that host. If too few workers are left
        # to go on (`short`), two of them on any host are enough.
        own_hosts = {each.slot.host for each in chain}
        workers = len({each.slot.lasting for each in chain})
        one_host = len(own_hosts) == 1 and bool(hosts - own_hosts)
        often = workers > 1 and len(chain) >= ERROR_WORKERS
        if one_host and not short:
            return None
        if workers < ERROR_WORKERS - short and not often:
            for each in chain if workers > 1 and self.workers.bounds is None else ():
                self.workers.until.pop(self.worker_key(each.slot), None)
            return None
        at_once = len({each.generation for each in chain}) == 1
        how = "in one generation" if at_once else "one after another"
        return Text(f"{chain[-1].error} (raised on {workers} workers, {how})")


def _equal(cause: str, other: str) -> bool:
    """Return whether two causes are equal, but for addresses and generations."""
    return _CHANGING.sub("…", cause) == _CHANGING.sub("…", other)
