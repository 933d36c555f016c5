"""The kernel's part of a job: ``fit``, the driver thread, and ``Job``.

``options`` checks what a job is asked to do, ``records`` keeps for people what it did.
"""

from nbelastic.cluster.scheduler.spot_notices import SpotNotices
from nbelastic.messages import JobInfo

from .display import set_display
from .fit import fit, run, wait_interruptibly
from .job import Job, driver_of
from .records import explain_journal
from .report import show_versions
from .status import (
    DataStatus,
    HistoryEvent,
    JobStatus,
    JobTable,
    Output,
    Progress,
    RankStatus,
)
from .takeover import ask_to_scale, ask_to_stop, attach, jobs, look

__all__ = [
    "DataStatus",
    "HistoryEvent",
    "Job",
    "JobInfo",
    "JobStatus",
    "JobTable",
    "Output",
    "Progress",
    "RankStatus",
    "SpotNotices",
    "ask_to_scale",
    "ask_to_stop",
    "attach",
    "driver_of",
    "explain_journal",
    "fit",
    "jobs",
    "look",
    "run",
    "set_display",
    "show_versions",
    "wait_interruptibly",
]
