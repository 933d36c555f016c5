"""All that knows Dask: the scheduler plugin, the agents, the rank's task, and the kernel's link."""

from .environment import versions as own_versions
from .link import Link
from .preflight import check_versions, pack_function
from .protocol import Message
from .remote import Failure, unpack_error

__all__ = [
    "Failure",
    "Link",
    "Message",
    "check_versions",
    "own_versions",
    "pack_function",
    "unpack_error",
]
