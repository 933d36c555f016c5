"""Sources of rows, and loaders that deal them to the steps of a training.

This room knows torch the library, and nothing of :mod:`nbelastic.torch`. The deal
(:mod:`nbelastic.data.dealing`) is pure.
"""

from .batch import Batch
from .loader import Loader
from .parquet import Arrow, Parquet
from .partitions import Dask
from .sources import MapSource, RowSource, WorkItem
from .step import Step, StepParticipant
from .streams import Shards, Stateful, StreamSource
from .units import UnitSource

__all__ = [
    "Arrow",
    "Batch",
    "Dask",
    "Loader",
    "MapSource",
    "Parquet",
    "RowSource",
    "Shards",
    "Stateful",
    "Step",
    "StepParticipant",
    "StreamSource",
    "UnitSource",
    "WorkItem",
]
