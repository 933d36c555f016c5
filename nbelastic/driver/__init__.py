"""The kernel's side of a job: ``fit``, the driver thread, and the ``Job`` that its owner holds."""

from .display import set_display
from .fit import fit
from .job import Job
from .status import HistoryEvent, JobStatus, Output, Progress, RankStatus

__all__ = [
    "HistoryEvent",
    "Job",
    "JobStatus",
    "Output",
    "Progress",
    "RankStatus",
    "fit",
    "set_display",
]
