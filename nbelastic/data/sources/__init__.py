"""Sources of rows: datasets, files, tables, partitions, streams.

:class:`RowSource` is what a loader needs of a source. Sources whose rows come in units
(:class:`UnitSource`: Parquet, Arrow, Dask) share :class:`WindowedRows`; sources of unknown length
(:class:`StreamSource`), :class:`StreamRows`.
"""

from .map_source import MapSource
from .parquet import Arrow, Parquet
from .partitions import Dask
from .row_source import USUAL_CAUSES, DataSample, RowSource, difference, sample_of
from .seeding import seed_generators
from .streams import Shards, Stateful, StreamRows, StreamSource
from .units import UnitSource, WindowedRows

__all__ = [
    "USUAL_CAUSES",
    "Arrow",
    "Dask",
    "DataSample",
    "MapSource",
    "Parquet",
    "RowSource",
    "Shards",
    "Stateful",
    "StreamRows",
    "StreamSource",
    "UnitSource",
    "WindowedRows",
    "difference",
    "sample_of",
    "seed_generators",
]
