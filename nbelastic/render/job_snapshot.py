"""Snapshot: all shown facts of a job, at a moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbelastic.driver import driver_of
from nbelastic.driver.status import HistoryEvent, JobStatus

MOST_POINTS = 500
"""Points of a curve, evenly chosen, the newest among them."""

MOST_OUTPUT = 8_000
"""Characters at the end of rank 0's output that are looked at."""

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
    output: str = ""  # the last that rank 0 has printed
    error: str = ""  # what the job's result raises

    @classmethod
    def of(cls, job: Any) -> JobSnapshot:
        """Return a snapshot of a job."""
        log, status = driver_of(job).log, job.status
        curves = log.metrics.curves(MOST_POINTS)
        error = str(job.exception()) if status.state == "failed" else ""
        pace, output = log.metrics.pace(), log.last_output(MOST_OUTPUT)
        return cls(status, job.history, job.started, curves, pace, output, error)

    @property
    def ended(self) -> bool:
        """Whether the job has ended."""
        return self.status.state in ENDED

    def offset(self, event: HistoryEvent) -> float:
        """Return the seconds from the start to an event."""
        return max(event.time - self.started, 0.0)
