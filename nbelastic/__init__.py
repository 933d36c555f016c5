"""Elastic data-parallel training that belongs in a notebook.

``nbelastic.fit(fn, cluster=client)`` runs a training function on a Dask cluster whose workers may
die, leave and join while it trains. Inside the function, ``import nbelastic.torch as hvd``.

Importing this package loads nothing else, neither Dask nor torch nor IPython: each name is
imported at its first use. The ``dask`` command imports ``nbelastic.cli`` on every call.
"""

from __future__ import annotations

__version__ = "0.1.0"

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbelastic import elastic, errors
    from nbelastic.driver import (
        DataStatus,
        HistoryEvent,
        Job,
        JobInfo,
        JobStatus,
        Progress,
        RankStatus,
        SpotNotices,
        attach,
        jobs,
        show_versions,
    )
    from nbelastic.driver.fit import fit, run
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
    from nbelastic.notebook.magics import load_ipython_extension, unload_ipython_extension

__all__ = [
    "DataStatus",
    "HistoryEvent",
    "Job",
    "JobInfo",
    "JobStatus",
    "Progress",
    "RankStatus",
    "SpotNotices",
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
    "run",
    "show_versions",
    "shutdown",
    "size",
    "unload_ipython_extension",
]

_ROOMS = ("driver", "elastic", "notebook.magics")
"""Modules with the public names, in the order in which they are searched."""

_FACES = ("accelerate", "chaos", "keras", "lightning", "tensorflow", "torch", "transformers")
"""Sub-packages for a library each, and faults."""


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name in ("elastic", "errors", *_FACES):
        return importlib.import_module(f"nbelastic.{name}")
    if name in __all__:
        for room in _ROOMS:
            found = importlib.import_module(f"nbelastic.{room}")
            if name in found.__all__:  # else it may be one of the room's modules
                value = globals()[name] = getattr(found, name)
                return value
    raise AttributeError(f"module 'nbelastic' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, imported or not."""
    return sorted({*globals(), *__all__})
