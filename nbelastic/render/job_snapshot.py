"""Snapshot: all that is shown of a job, at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbelastic.driver import driver_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbelastic.driver.status import HistoryEvent, JobStatus

MOST_POINTS = 500
"""Points of a curve, evenly chosen, the newest among them."""

ENDED = frozenset({"finished", "failed", "stopped", "detached"})
"""Final states of a job, and the kinds of event that announce them."""


@dataclass(frozen=True)
class JobSnapshot:
    """A job at one moment, with its past."""

    status: JobStatus
    history: Sequence[HistoryEvent] = ()  # oldest first
    started: float = 0.0  # seconds since the epoch, like the times of the history
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    pace: Sequence[tuple[float, float]] = ()  # seconds since the start, and samples/s

    @classmethod
    def of(cls, job: Any, status: JobStatus | None = None) -> JobSnapshot:
        """Return a snapshot of a job, with `status` if it has been read just now."""
        metrics = driver_of(job).log.metrics
        curves = metrics.curves(MOST_POINTS)
        return cls(status or job.status, job.history, job.started, curves, metrics.pace())

    @property
    def ended(self) -> bool:
        """Whether the job has ended."""
        return self.status.state in ENDED

    def offset(self, event: HistoryEvent) -> float:
        """Return the seconds from the start to an event."""
        return max(event.time - self.started, 0.0)

    def count(self, kind: str) -> int:
        """Return the number of events of a kind."""
        return sum(event.kind == kind for event in self.history)
