"""Run jobs on Dask: scheduler plugin, agents, rank tasks, and the kernel's client.

The sub-packages name the process: ``kernel``, ``scheduler`` and ``worker``. The modules next to
them run in several processes; each names them.
"""

from .job_log import JobLog
from .journal import replay
from .kernel.client import JobClient, look_at_job, lost_while, open_jobs, send_wish
from .kernel.gitignore import GitIgnore
from .kernel.partitions import HeldPartitions, hold_partitions, with_sources
from .kernel.preflight import check_versions, pack_function
from .kernel.reachability import check_answers, check_scheduler
from .kernel.sources import why_missing
from .payload import Modules
from .rank_error import Failure, summary_of, unpack_error
from .scheduler.plugin import ElasticPlugin
from .worker.environment import versions as own_versions
from .worker.rank.fault_injector import InjectedFault

__all__ = [
    "ElasticPlugin",
    "Failure",
    "GitIgnore",
    "HeldPartitions",
    "InjectedFault",
    "JobClient",
    "JobLog",
    "Modules",
    "check_answers",
    "check_scheduler",
    "check_versions",
    "hold_partitions",
    "look_at_job",
    "lost_while",
    "open_jobs",
    "own_versions",
    "pack_function",
    "replay",
    "send_wish",
    "summary_of",
    "unpack_error",
    "why_missing",
    "with_sources",
]
