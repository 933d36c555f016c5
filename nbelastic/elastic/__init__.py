"""What surrounds the user's function inside a rank: its place in the job, state, and the loop.

``run``, ``State`` and ``ObjectState`` are Horovod's ``hvd.elastic``; those for PyTorch's objects
are in :mod:`nbelastic.torch.elastic`. Nothing here imports torch before a rank needs it.
"""

from .context import current, initialize, shutdown
from .loop import run
from .port import Port, RankSpec
from .session import Session
from .state import ObjectState, State
from .vitals import as_numbers

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
    "report",
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


def report(*, step: float | None = None, **values: object) -> None:
    """Report metrics of this rank, for ``job.metrics`` and the notebook's panel.

    Parameters
    ----------
    step : float, optional
        Where on the horizontal axis; without it, reports are counted.
    **values : number, or tensor or array of one element
        What to report. ``job.metrics`` has the mean over the ranks that reported it.

    Raises
    ------
    TypeError
        A value is not a number.
    NotInitialized
        Before ``init()``.

    Notes
    -----
    Every rank that has a value reports it, all at the same place in the training loop. What is
    reported after the last commit and then rolled back is replaced when it is done again. Reports
    travel with the heartbeats; a call takes microseconds.

    Examples
    --------
    >>> nbelastic.report(loss=loss.item(), accuracy=0.9)  # doctest: +SKIP
    """
    context = current()
    context.vitals.report(context.version, context.generation, as_numbers(values), step)
