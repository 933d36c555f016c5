"""Dask collections as sources of rows.

This module does not import Dask. It uses methods of collections that it is given, and the hook by
which a context fetches a partition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nbelastic.data.sources.columns import Block, ColumnChoice, arrays_in, arrow_array, block_of
from nbelastic.data.sources.row_source import digest_of, named
from nbelastic.data.sources.units import UnitSource
from nbelastic.elastic.ranks.context import current_or_none
from nbelastic.errors import DataError, OptionError

if TYPE_CHECKING:
    from nbelastic.data.plan.dealing import Rows


def is_rows(value: Any) -> bool:
    """Return whether a value is a Dask dataframe, series or array."""
    if not hasattr(type(value), "__dask_keys__"):
        return False
    if not isinstance(getattr(value, "npartitions", None), int):
        return False  # a Delayed has any attribute, of its own type
    return hasattr(value, "_meta") or hasattr(value, "chunks")


class Dask(UnitSource):
    """A Dask collection as the data of a :class:`~nbelastic.data.Loader`.

    Pass it to the training function in ``args``. A dataframe or an array there is made one of these
    by itself. ``fit`` has the cluster compute the partitions, before the job starts, and the job
    holds them until its end. Ranks read partitions from the workers that hold them, over Dask's
    connections. If a worker fails, Dask computes its partitions again. They must have the same
    rows then.

    Partitions are units, as row groups of :class:`Parquet` are. They are read in the job alone.

    Parameters
    ----------
    collection : dask.dataframe, dask.array, or tuple of them
        The rows; of arrays the first dimension. Collections of a tuple have partitions of the same
        sizes, and the parts of a batch are in their order.
    columns, shuffle_rows, memory, fill
        As for :class:`Parquet`. Batches of a dataframe are tuples or dicts, those of a single array
        or series are tensors.
    transform : callable, optional
        As for :class:`Parquet`; gets a partition, or a tuple of partitions.

    Raises
    ------
    OptionError
        It is another collection, a column is missing, or a value cannot be used.

    Examples
    --------
    >>> nbelastic.fit(train, cluster=client, args=(ddf,))  # doctest: +SKIP
    """

    name = "Dask"

    def __init__(
        self,
        collection: Any,
        columns: Sequence[str] | Mapping[Any, str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(columns, **options)
        collections = collection if isinstance(collection, (tuple, list)) else (collection,)
        for each in collections or (collection,):
            if not is_rows(each):
                raise OptionError(
                    f"Dask({type(each).__name__}): must be a dask.dataframe, a dask.array, or a "
                    "tuple of them"
                )
        self._single = not isinstance(collection, (tuple, list))
        self._choices = [self._choice_in(each) for each in collections]
        if columns is not None and not any(self._choices):
            raise OptionError(f"Dask(columns={columns!r}): the collection has no columns")
        self.collections: tuple[Any, ...] | None = _aligned(tuple(collections))
        self._keys: list[tuple[str, ...]] = []

    def _choice_in(self, collection: Any) -> ColumnChoice | None:
        if not hasattr(collection, "columns") or getattr(collection, "ndim", 2) != 2:
            return None
        names = list(collection.columns)
        if not all(isinstance(name, str) for name in names):
            raise OptionError(
                f"Dask: the dataframe has columns that are no text ({names[0]!r}); rename them, as "
                "by ddf.rename(columns=str)"
            )
        return self.choose(
            names, [*collection.dtypes], lambda kind: kind.kind in "biuf", "the dataframe"
        )

    def hold(self, keys: Sequence[Sequence[str]], rows: Sequence[Sequence[int]], size: int) -> None:
        """Take each partition's key and rows by collection, and the bytes of all; from ``fit``."""
        for unit, counts in enumerate(rows):
            if len(set(counts)) > 1:
                raise OptionError(
                    f"Dask: partition {unit} has {' and '.join(map(str, counts))} rows in the "
                    "collections of the tuple; repartition them alike"
                )
        self.sizes: Rows = np.array([counts[0] for counts in rows], dtype=np.int64)
        if not self.sizes.sum():
            raise OptionError("Dask: the collection has no rows")
        self.row_bytes = size / int(self.sizes.sum())
        self._keys = [tuple(each) for each in keys]

    def __len__(self) -> int:
        if not self._keys:
            raise OptionError(
                "a Dask source is not held by the cluster yet: pass it to the job in args=, or as "
                "a variable of the training function"
            )
        return super().__len__()

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the collections, which ranks read by their keys."""
        len(self)  # refuses what is not held
        return {**self.__dict__, "collections": None}

    def read(self, unit: int) -> Block:
        where, context = f"partition {unit}", current_or_none()
        with named(f"{where} cannot be read:"):
            if context is None or context.fetch_partition is None:
                raise DataError(f"{where} cannot be read outside of its job")
            parts = tuple(map(context.fetch_partition, self._keys[unit]))
        if self.transform is not None:
            return self.transformed(parts[0] if self._single else parts, len(parts[0]), where)
        blocks = [self._block_of(*each, where) for each in zip(parts, self._choices, strict=True)]
        if self._single:
            return blocks[0]
        return tuple(array for block in blocks for array in arrays_in(block))

    def _block_of(self, part: Any, choice: ColumnChoice | None, where: str) -> Block:
        if isinstance(part, np.ndarray):
            return block_of(part, len(part), where)
        import pyarrow as pa  # noqa: PLC0415 - Dask's dataframes need it, too

        frame = part.to_frame("values") if choice is None else part[choice.names]
        table = pa.Table.from_pandas(frame, preserve_index=False)
        if choice is not None:
            return self.block(choice, table, where)
        return arrow_array(table.column("values"), "values", self.fill, where)

    def describe(self) -> dict[str, str]:
        digest = digest_of(f"{self._keys} {self.sizes.tolist()}")
        return {"partitions": f"{len(self.sizes)}, their keys and rows {digest}"}


def _aligned(collections: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return collections of which each partition has whole rows, in as many partitions."""
    whole = []
    for each in collections:
        if hasattr(each, "chunks"):
            each = each.rechunk({axis: -1 for axis in range(1, each.ndim)})  # noqa: PLW2901
        whole.append(each)
    counts = {each.npartitions for each in whole}
    if len(counts) > 1:
        raise OptionError(
            f"Dask: the collections of the tuple have {' and '.join(map(str, sorted(counts)))} "
            "partitions; repartition them alike"
        )
    return tuple(whole)
