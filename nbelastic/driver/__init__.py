"""The kernel's side of a job: ``fit``, the driver thread, and the ``Job`` that its owner holds."""

from .display import set_display
from .fit import fit
from .job import Job
from .status import HistoryEvent, JobInfo, JobStatus, Output, Progress, RankStatus
from .takeover import attach, jobs

__all__ = [
    "HistoryEvent",
    "Job",
    "JobInfo",
    "JobStatus",
    "Output",
    "Progress",
    "RankStatus",
    "attach",
    "fit",
    "jobs",
    "set_display",
]
