"""Records of jobs, as the scheduler keeps them."""

from __future__ import annotations

from typing import Any

from nbelastic.cluster.scheduler.job import ScheduledJob
from nbelastic.membership import Machine
from nbelastic.messages import JobPayload, JobTerms, Limits


def some_terms(**changes: Any) -> JobTerms:
    """Return the terms of a job, with changes."""
    found: dict[str, Any] = {
        "payload": JobPayload(b"", b"", b""),
        "workers": None,
        "resources": {},
        "versions": {},
        "heartbeat_timeout": 10.0,
        "lease": 3600.0,
        "options": b"",
        "machine": b"",
    }
    return JobTerms(**found | changes)


def a_record(
    machine: Machine | None = None,
    scheduler: Any = None,
    carry_out: Any = None,
    **changes: Any,
) -> ScheduledJob:
    """Return the record of a job, with changes of its terms."""
    terms = some_terms(**changes)
    return ScheduledJob(
        "job",
        scheduler,
        carry_out,
        uid="uid",
        terms=terms,
        workers=None if terms.workers is None else frozenset(terms.workers),
        machine=machine or Machine(Limits()),
        client="kernel",
        topic="topic",
        started=0.0,
    )
