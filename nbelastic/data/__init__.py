"""Sources of rows, and loaders that deal rows to the steps of a training.

``plan`` decides, and is pure. ``sources`` reads. The modules of this folder are the loader's own:
:class:`Loader` yields a :class:`Step` at a time.

This room knows torch the library, and nothing of :mod:`nbelastic.torch`.
"""

from .batch import Batch
from .loader import Loader
from .sources.parquet import Parquet
from .sources.partitions import Dask
from .sources.streams import Shards, Stateful
from .step import Step

__all__ = ["Batch", "Dask", "Loader", "Parquet", "Shards", "Stateful", "Step"]
