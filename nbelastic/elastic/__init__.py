"""What surrounds the user's function inside a rank: its place in the job, state, and the loop.

``run``, ``State`` and ``ObjectState`` are Horovod's ``hvd.elastic``; those for PyTorch's objects
are in :mod:`nbelastic.torch.elastic`. Nothing here imports torch before a rank needs it.
"""

from .context import current, initialize, shutdown
from .loop import run
from .port import Port, RankSpec
from .session import Session
from .state import ObjectState, State

__all__ = [
    "ObjectState",
    "Port",
    "RankSpec",
    "Session",
    "State",
    "cross_rank",
    "cross_size",
    "init",
    "local_rank",
    "local_size",
    "rank",
    "run",
    "shutdown",
    "size",
    "sync_root",
]


def init() -> None:
    """Make ranks and sizes known. In a job they are the job's; else this is a world of one."""
    initialize()


def rank() -> int:
    """Return this rank's position in the job, from 0."""
    return current().rank


def size() -> int:
    """Return the number of ranks in the job."""
    return current().size


def local_rank() -> int:
    """Return this rank's position on its host, from 0."""
    return current().local_rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return current().local_size


def cross_rank() -> int:
    """Return this host's position among those that have a rank of this local rank."""
    return current().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a rank of this local rank."""
    return current().cross_size


def sync_root() -> int:
    """Return the rank that holds the newest state: where a ``sync`` must broadcast from."""
    return current().source
