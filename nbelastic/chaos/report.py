"""Compute the cost of injected faults from their outcomes and the job's history."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nbelastic.driver import HistoryEvent

HARMLESS = frozenset({"slow", "disk", "pause"})  # kinds that need no recovery
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


@dataclass(frozen=True)
class Row:
    """Faults of a kind: their number, the number with a reset, and the duration of resets."""

    kind: str
    injected: int
    resets: int
    p50: float | None
    p99: float | None


@dataclass(frozen=True, repr=False)
class Report:
    """Cost of the faults that were injected into a job.

    Attributes
    ----------
    injections : tuple of FaultOutcome
        One for each fault.
    steps_redone : int
        Batches of the job that were processed and then rolled back.
    samples_redone : int
        The samples in them, as far as the ranks that processed them are still there.
    restarts : int
        How often the job had to start over, because no rank was left that held its state.
    """

    injections: tuple[FaultOutcome, ...]
    steps_redone: int
    samples_redone: int
    restarts: int

    @property
    def rows(self) -> tuple[Row, ...]:
        """A row for each kind, then a row for all faults."""
        done = [outcome for outcome in self.injections if not outcome.problem]
        found = []
        for kind in (*sorted({outcome.kind for outcome in done}), "all"):
            these = [each for each in done if kind in (each.kind, "all")]
            spans = sorted(each.recovery for each in these if each.recovery is not None)
            # The smallest value that is not below such a share of all.
            p50, p99 = (
                spans[math.ceil(share * len(spans)) - 1] if spans else None for share in (0.5, 0.99)
            )
            found.append(Row(kind, len(these), len(spans), p50, p99))
        return tuple(found)

    @property
    def skipped(self) -> tuple[FaultOutcome, ...]:
        """Faults that could not be injected."""
        return tuple(outcome for outcome in self.injections if outcome.problem)

    def __str__(self) -> str:
        rows = [
            (row.kind, row.injected, row.resets, _span(row.p50), _span(row.p99))
            for row in self.rows
        ]
        lines = [
            "{:<10}{:>10}{:>10}{:>10}{:>10}".format(*cells)
            for cells in (("fault", "injected", "resets", "p50", "p99"), *rows)
        ]
        lines += [
            f"redone: {self.steps_redone} steps, {self.samples_redone} samples",
            f"started over: {self.restarts} times",
            *(
                f"not done: {each.kind} of rank {each.rank}: {each.problem}"
                for each in self.skipped
            ),
        ]
        return "\n".join(lines)

    __repr__ = __str__


def _span(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


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
