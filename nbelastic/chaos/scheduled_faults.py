"""Track the faults of a plan, the next random one, and the job's pace of commits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .report import FaultOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .faults import Fault
    from .random_plan import RandomFault, RandomPlan

MUTE = frozenset({"kill", "close", "leave", "restart"})
"""Kinds after which no process may be left to report that it was done."""

LASTING = MUTE | {"crash", "crash_server", "stop", "fail", "memory", "hang"}
"""Kinds after which a rank is not well any more; unless ``stop`` is for a while only."""

LATE = 2.0
"""Seconds that word of a commit may take."""

LEAST_SPAN = 2.0
"""Shortest span in seconds over which a pace is measured."""


@dataclass
class ScheduledFault:
    """A fault of a plan: the rank that it was sent to, and its outcome."""

    fault: Fault
    rank: int | None = None
    worker: str = ""
    start: int | None = None
    sent: float | None = None
    done: float | None = None
    problem: str = ""
    sent_to: set[int] = field(default_factory=set)

    @property
    def open(self) -> bool:
        """Whether it has still to be done."""
        return self.done is None and not self.problem

    def outcome(self) -> FaultOutcome | None:
        """Return what is to be reported of it; None while it is open."""
        kind, problem, when = self.fault.kind, self.problem, self.done
        if when is None and kind in MUTE and self.sent is not None:
            when, problem = self.sent, ""
        if when is None and not problem:
            return None
        rank = self.fault.rank if self.rank is None else self.rank
        return FaultOutcome(kind, rank, self.worker, when or self.sent or 0.0, problem)


@dataclass
class RandomSchedule:
    """The faults of a random plan: the next, and when it is due."""

    draws: Iterator[RandomFault]
    due: float
    next: RandomFault

    @classmethod
    def of(cls, plan: RandomPlan, now: float) -> RandomSchedule:
        """Return the faults of a plan that begins now."""
        draws = plan.draws()
        first = next(draws)
        return cls(draws, now + first.wait, first)

    def advance(self, now: float) -> None:
        """Go on to the next."""
        self.next = next(self.draws)
        self.due = now + self.next.wait


class CommitRate:
    """Counts commits before the first fault, and since.

    Word of commits comes late, and in steps. So time is measured from one change to another.
    """

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._fault: tuple[float, int] | None = None
        self._last: tuple[float, int] | None = None

    def note(self, now: float, commits: int) -> None:
        """Take note of how many commits there are."""
        if commits > 0 and (self._last is None or commits != self._last[1]):
            self._last = now, commits
            self._first = self._first or self._last

    def mark(self) -> None:
        """Take note of a fault."""
        self._fault = self._fault or self._last

    def before(self) -> float | None:
        """Return commits per second before the first fault; None if that was too soon."""
        return _rate(self._first, self._fault)

    def since(self, now: float | None) -> float | None:
        """Return commits per second since then; `now` is None after the end."""
        last = self._last
        if last is not None and now is not None and now > last[0] + LATE:
            last = now, last[1]  # there have been none since
        return _rate(self._fault, last)

    def seconds(self, now: float | None) -> float:
        """Return seconds since the first fault."""
        if self._fault is None or self._last is None:
            return 0.0
        return (self._last[0] if now is None else now) - self._fault[0]


def _rate(since: tuple[float, int] | None, to: tuple[float, int] | None) -> float | None:
    if since is None or to is None or to[0] < since[0] + LEAST_SPAN:
        return None
    return max(to[1] - since[1], 0) / (to[0] - since[0])
