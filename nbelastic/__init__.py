"""Elastic data-parallel training that belongs in a notebook.

``nbelastic.fit(fn, cluster=client)`` runs a training function on a Dask cluster whose workers may
die, leave and join while it trains. Inside the function, ``import nbelastic.torch as hvd``.

Importing this package loads neither torch nor IPython.
"""

from __future__ import annotations

__version__ = "0.1.0"

from typing import TYPE_CHECKING

from nbelastic import elastic, errors
from nbelastic.driver import (
    HistoryEvent,
    Job,
    JobInfo,
    JobStatus,
    Progress,
    RankStatus,
    attach,
    fit,
    jobs,
    set_display,
    show_versions,
)
from nbelastic.elastic import (
    cross_rank,
    cross_size,
    init,
    load_checkpoint,
    local_rank,
    local_size,
    rank,
    report,
    shutdown,
    size,
)

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = [
    "HistoryEvent",
    "Job",
    "JobInfo",
    "JobStatus",
    "Progress",
    "RankStatus",
    "attach",
    "cross_rank",
    "cross_size",
    "elastic",
    "errors",
    "fit",
    "init",
    "jobs",
    "load_checkpoint",
    "load_ipython_extension",
    "local_rank",
    "local_size",
    "rank",
    "report",
    "show_versions",
    "shutdown",
    "size",
    "unload_ipython_extension",
]

set_display("nbelastic.notebook.display_service")  # imported with the first job


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics: ``%load_ext nbelastic``."""
    from nbelastic.notebook import load_ipython_extension as load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Take the magics away: ``%unload_ext nbelastic``."""
    from nbelastic.notebook import unload_ipython_extension as unload

    unload(shell)
