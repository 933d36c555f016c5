"""Records of jobs, as the scheduler keeps them."""

from __future__ import annotations

from typing import Any

from nbelastic.cluster.scheduler.records import JobRecord
from nbelastic.membership import Machine
from nbelastic.messages import JobPayload, JobTerms, Limits


def a_record(machine: Machine | None = None, **changes: Any) -> JobRecord:
    """Return the record of a job, with changes of its terms."""
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
    known = {name: each for name, each in changes.items() if name in JobTerms.__struct_fields__}
    terms = JobTerms(**found | known)
    return JobRecord(
        uid="uid",
        terms=terms,
        workers=None if terms.workers is None else frozenset(terms.workers),
        machine=machine or Machine(Limits()),
        client="kernel",
        topic="topic",
        started=0.0,
    )
