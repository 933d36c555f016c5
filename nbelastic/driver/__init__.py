"""The kernel's part of a job: ``fit``, the driver thread, and ``Job``."""

from nbelastic.cluster.scheduler.plugin import SpotNotices
from nbelastic.status import (
    DataStatus,
    HistoryEvent,
    JobInfo,
    JobStatus,
    Output,
    Progress,
    RankStatus,
)

from .display import set_display
from .fit import ask, attach, connected, fit, jobs, look, run, wait_interruptibly
from .job import Job, driver_of
from .why import show_versions

__all__ = [
    "DataStatus",
    "HistoryEvent",
    "Job",
    "JobInfo",
    "JobStatus",
    "Output",
    "Progress",
    "RankStatus",
    "SpotNotices",
    "ask",
    "attach",
    "connected",
    "driver_of",
    "fit",
    "jobs",
    "look",
    "run",
    "set_display",
    "show_versions",
    "wait_interruptibly",
]
