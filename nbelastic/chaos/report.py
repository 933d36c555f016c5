"""Compute the cost of injected faults from their outcomes and the job's history."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nbelastic.driver import HistoryEvent

HARMLESS = frozenset({"slow", "pause"})  # kinds that need no recovery
SLACK = 0.05  # seconds by which the loss of a rank may be known before the word that it was hit


@dataclass(frozen=True)
class FaultOutcome:
    """A fault that was injected, or could not be.

    Attributes
    ----------
    kind : str
        What was done.
    rank : int or None
        The rank that was hit.
    worker : str
        On which worker; empty for the kernel.
    time : float
        When, in seconds since the epoch.
    problem : str
        Why it could not be done; empty if it was.
    recovery : float or None
        Seconds until the next generation had formed without the one hit (after ``partition``:
        anew); None if there was no need: it went on as if nothing had happened.
    """

    kind: str
    rank: int | None
    worker: str
    time: float
    problem: str = ""
    recovery: float | None = None


@dataclass(frozen=True, repr=False)
class Report:
    """Cost of the faults that were injected into a job.

    Attributes
    ----------
    injections : tuple of FaultOutcome
        One for each fault.
    steps_redone : int
        Batches that rank 0 has processed again after resets.
    restarts : int
        How often the job had to start over, because no rank was left that held its state.
    """

    injections: tuple[FaultOutcome, ...]
    steps_redone: int
    restarts: int

    @property
    def skipped(self) -> tuple[FaultOutcome, ...]:
        """Faults that could not be injected."""
        return tuple(outcome for outcome in self.injections if outcome.problem)

    def __str__(self) -> str:
        spans: dict[str, list[float | None]] = {}
        for each in self.injections:
            if not each.problem:
                spans.setdefault(each.kind, []).append(each.recovery)
        lines = []
        for kind, found in sorted(spans.items()):
            resets = [span for span in found if span is not None]
            longest = f", the longest took {max(resets):.2f} s" if resets else ""
            lines.append(f"{kind}: {len(found)} injected, {len(resets)} resets{longest}")
        lines.append(f"redone: {self.steps_redone} steps; started over: {self.restarts} times")
        for each in self.skipped:
            lines.append(f"not done: {each.kind} of rank {each.rank}: {each.problem}")
        return "\n".join(lines)

    __repr__ = __str__


def with_recovery(
    injections: Sequence[FaultOutcome], history: Sequence[HistoryEvent]
) -> tuple[FaultOutcome, ...]:
    """Return injections with the time that the job took to recover from each."""
    formed = [event.time for event in history if event.kind == "formed"]
    done = [outcome for outcome in injections if not outcome.problem]
    found = []
    for outcome in injections:
        since, worker = outcome.time, outcome.worker
        if outcome.problem or outcome.kind in HARMLESS:
            since = math.inf
        elif outcome.kind != "partition":  # a loss belongs to the newest fault on that worker
            later = (each.time for each in done if each.worker == worker and each.time > since)
            end = min(later, default=math.inf)
            lost = (
                event.time
                for event in history
                if event.kind in ("lost", "left") and event.worker == worker
                if outcome.time - SLACK <= event.time < end
            )
            since = next(lost, math.inf)
        recovered = next((time for time in formed if time >= since), None)
        span = None if recovered is None else max(recovered - outcome.time, 0.0)
        found.append(replace(outcome, recovery=span))
    return tuple(found)
