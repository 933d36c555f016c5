"""Snapshot: all that is shown of a job, at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbelastic.driver.status import HistoryEvent, JobStatus

ENDED = frozenset({"finished", "failed", "stopped", "detached"})
"""Final states of a job, and the kinds of event that announce them."""


@dataclass(frozen=True)
class JobSnapshot:
    """A job at one moment, with its past.

    Attributes
    ----------
    status : JobStatus
        Its status.
    history : sequence of HistoryEvent
        Its events, oldest first.
    started : float
        Time of its start, in seconds since the epoch, like the times of the history.
    curves : mapping of str to sequence of (float, float)
        Reported metrics by name: step and value.
    pace : sequence of (float, float)
        Seconds since the start, and samples per second of all ranks together.
    """

    status: JobStatus
    history: Sequence[HistoryEvent] = ()
    started: float = 0.0
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    pace: Sequence[tuple[float, float]] = ()

    @classmethod
    def of(cls, job: Any) -> JobSnapshot:
        """Return a snapshot of a job."""
        return cls(job.status, job.history, job.started, job._curves(), job._pace())

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
