"""Surroundings of the user's function in a rank: its place, state, and the loop.

``run``, ``State`` and ``ObjectState`` are Horovod's ``hvd.elastic``. Those for PyTorch are in
:mod:`nbelastic.torch.elastic`. Nothing here imports torch before a rank needs it.
"""

from .checkpoint.files import load_checkpoint
from .loop import run
from .ranks.context import (
    cross_rank,
    cross_size,
    current,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from .ranks.context import initialize as init
from .ranks.runtime import RankSpec
from .ranks.session import Session
from .state import ObjectState, State

__all__ = [
    "ObjectState",
    "RankSpec",
    "Session",
    "State",
    "cross_rank",
    "cross_size",
    "init",
    "load_checkpoint",
    "local_rank",
    "local_size",
    "rank",
    "report",
    "run",
    "shutdown",
    "size",
    "sync_root",
]


def sync_root() -> int:
    """Return the rank with the newest state, the root of a ``sync``."""
    return current().source


def report(*, step: float | None = None, **values: object) -> None:
    """Report metrics of this rank, for ``job.metrics`` and the notebook's panel.

    Parameters
    ----------
    step : float, optional
        Position on the horizontal axis; by default the number of the report.
    **values : number, or tensor or array of one element
        The metrics. ``job.metrics`` has the mean over the ranks that reported one.

    Raises
    ------
    TypeError
        A value is not a number.
    NotInitialized
        Before ``init()``.

    Notes
    -----
    Every rank that has a value reports it, at the same place in the training loop. Reports of steps
    that are rolled back are replaced when the steps are repeated. Reports travel with the
    heartbeats; a call takes microseconds.

    Examples
    --------
    >>> nbelastic.report(loss=loss.item(), accuracy=0.9)  # doctest: +SKIP
    """
    context = current()
    context.telemetry.report(context.version, context.generation, values, step)
