"""Run jobs on Dask: scheduler plugin, agents, rank tasks, and the kernel's client.

The sub-packages name the process: ``kernel``, ``scheduler`` and ``worker``. The modules next to
them run in several processes; each names them.
"""

from .job_log import JobLog, OutputLog
from .kernel.client import JobClient, look_at_job, lost_while, open_jobs, send_wish
from .kernel.preflight import HeldPartitions, check_versions, pack_function, with_sources
from .kernel.reachability import (
    NO_PAGES,
    check_answers,
    check_scheduler,
    configuration,
    publish,
    security_of,
)
from .kernel.sources import GitIgnore, walk
from .payload import Modules
from .pulled import LARGE, Returned, check_pulled, put, variables_of
from .rank_error import Failure, unpack_error
from .scheduler.plugin import ElasticPlugin
from .wire import versions as own_versions
from .worker.rank.fault_injector import InjectedFault

__all__ = [
    "LARGE",
    "NO_PAGES",
    "ElasticPlugin",
    "Failure",
    "GitIgnore",
    "HeldPartitions",
    "InjectedFault",
    "JobClient",
    "JobLog",
    "Modules",
    "OutputLog",
    "Returned",
    "check_answers",
    "check_pulled",
    "check_scheduler",
    "check_versions",
    "configuration",
    "look_at_job",
    "lost_while",
    "open_jobs",
    "own_versions",
    "pack_function",
    "publish",
    "put",
    "security_of",
    "send_wish",
    "unpack_error",
    "variables_of",
    "walk",
    "with_sources",
]
