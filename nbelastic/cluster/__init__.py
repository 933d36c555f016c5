"""All that knows Dask: the scheduler plugin, the agents, the rank's task, and the kernel's link."""

from .environment import versions as own_versions
from .harm import InjectedFault
from .link import Link, open_jobs
from .preflight import check_versions, pack_function
from .protocol import Message
from .reachability import check_scheduler
from .remote import Failure, unpack_error

__all__ = [
    "Failure",
    "InjectedFault",
    "Link",
    "Message",
    "check_scheduler",
    "check_versions",
    "open_jobs",
    "own_versions",
    "pack_function",
    "unpack_error",
]
