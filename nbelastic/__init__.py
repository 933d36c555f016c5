"""Elastic data-parallel training that belongs in a notebook.

``nbelastic.fit(fn, cluster=client)`` runs a training function on a Dask cluster whose workers may
die, leave and join while it trains. Inside the function, ``import nbelastic.torch as hvd``.

Importing this package loads neither torch nor IPython.
"""

__version__ = "0.1.0"

from nbelastic import elastic, errors
from nbelastic.driver import HistoryEvent, Job, JobStatus, Progress, RankStatus, fit
from nbelastic.elastic import (
    cross_rank,
    cross_size,
    init,
    local_rank,
    local_size,
    rank,
    report,
    shutdown,
    size,
)

__all__ = [
    "HistoryEvent",
    "Job",
    "JobStatus",
    "Progress",
    "RankStatus",
    "cross_rank",
    "cross_size",
    "elastic",
    "errors",
    "fit",
    "init",
    "local_rank",
    "local_size",
    "rank",
    "report",
    "shutdown",
    "size",
]
