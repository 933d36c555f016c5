"""The kernel's part of a job: ``fit``, the driver thread, and ``Job``."""

from .display import set_display
from .fit import fit
from .job import Job
from .status import HistoryEvent, JobInfo, JobStatus, JobTable, Output, Progress, RankStatus
from .takeover import attach, jobs
from .versions import show_versions

__all__ = [
    "HistoryEvent",
    "Job",
    "JobInfo",
    "JobStatus",
    "JobTable",
    "Output",
    "Progress",
    "RankStatus",
    "attach",
    "fit",
    "jobs",
    "set_display",
    "show_versions",
]
