"""What is drawn: all that is known of a job at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbelastic.driver.status import HistoryEvent, JobStatus

__all__ = ["ENDED", "Picture"]

ENDED = frozenset({"finished", "failed", "stopped", "detached"})
"""The states that a job does not leave, and the kinds of event that say so."""


@dataclass(frozen=True)
class Picture:
    """A job at one moment, with its past.

    Attributes
    ----------
    status : JobStatus
        How it stands.
    history : sequence of HistoryEvent
        What has happened to it, oldest first.
    started : float
        When it was started, in seconds since the epoch, as the times of the history are.
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
    def of(cls, job: Any) -> Picture:
        """Return the picture of a job now."""
        return cls(job.status, job.history, job.started, job.curves(), job.pace())

    @property
    def ended(self) -> bool:
        """Whether the job is over."""
        return self.status.state in ENDED

    def offset(self, event: HistoryEvent) -> float:
        """Return how many seconds after the start something happened."""
        return max(event.time - self.started, 0.0)

    def count(self, kind: str) -> int:
        """Return how many events of a kind there were."""
        return sum(event.kind == kind for event in self.history)
