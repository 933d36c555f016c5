"""Faults on their way: what a storm keeps of each, and which comes next at random."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .report import Injection

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .faults import Fault
    from .weather import Draw, Weather

__all__ = ["LASTING", "MUTE", "Case", "Gusts", "Tally"]

MUTE = frozenset({"kill", "close", "leave", "restart"})
"""Kinds after which there may be nobody left to say that it was done."""

LASTING = MUTE | {"stop", "fail", "memory", "hang"}
"""Kinds after which a rank is not well any more; unless ``stop`` is for a while only."""

LATE = 2.0
"""Seconds that word of a commit may take."""

LEAST_SPAN = 2.0
"""Seconds below which a pace says nothing."""


@dataclass
class Case:
    """A fault on its way: to whom it was sent, and what became of it."""

    fault: Fault
    rank: int | None = None
    worker: str = ""
    start: int | None = None
    sent: float | None = None
    done: float | None = None
    problem: str = ""
    told: set[int] = field(default_factory=set)

    @property
    def open(self) -> bool:
        """Whether it has still to be done."""
        return self.done is None and not self.problem

    def wire(self, number: int) -> dict[str, Any]:
        """Return what a rank is told of it."""
        fault = self.fault
        return {
            "number": number,
            "kind": fault.kind,
            "when": fault.when(),
            "seconds": fault.seconds,
            "steps": fault.steps,
        }

    def injection(self) -> Injection | None:
        """Return what is to be reported of it; None while it is open."""
        kind, problem, when = self.fault.kind, self.problem, self.done
        if when is None and kind in MUTE and self.sent is not None:
            when, problem = self.sent, ""
        if when is None and not problem:
            return None
        rank = self.fault.rank if self.rank is None else self.rank
        return Injection(kind, rank, self.worker, when or self.sent or 0.0, problem)


@dataclass
class Gusts:
    """The faults of a random plan: the next, and when it is due."""

    draws: Iterator[Draw]
    due: float
    next: Draw

    @classmethod
    def of(cls, weather: Weather, now: float) -> Gusts:
        """Return the faults of a plan that begins now."""
        draws = weather.draws()
        first = next(draws)
        return cls(draws, now + first.wait, first)

    def advance(self, now: float) -> None:
        """Go on to the next."""
        self.next = next(self.draws)
        self.due = now + self.next.wait


class Tally:
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
