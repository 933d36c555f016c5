"""Dask collections as sources: without a job in this process, in a job through a hook."""

from __future__ import annotations

import json
import pickle
from typing import Any

import dask
import dask.array as da
import dask.bag
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch

from nbelastic.cluster.kernel.partitions import with_sources
from nbelastic.collectives import SoloCommunicator
from nbelastic.data import Batch, Dask, Loader
from nbelastic.elastic.ranks.context import activate
from nbelastic.errors import DataError, OptionError
from tests.support.world import StaticContext

ROWS = 120


@pytest.fixture(autouse=True)
def in_this_thread() -> Any:
    with dask.config.set(scheduler="synchronous"):
        yield


def frame(**more: Any) -> pd.DataFrame:
    numbers = np.arange(ROWS)
    return pd.DataFrame({"id": numbers, "x0": numbers * 0.5, "x1": numbers * 2.0, **more})


def rows_of(source: Dask, size: int = 1) -> dict[tuple[int, int], Any]:
    found = {}
    for rank in range(size):
        context = StaticContext(SoloCommunicator(generation=1))
        context.rank, context.size = rank, size
        with activate(context):
            loader = Loader(source, Batch(12, micro=3), seed=2)
            for step in loader:
                for number, (ids, x) in zip(step.numbers, step, strict=True):
                    assert ids.tolist() == loader.rows(step.number, number)
                    assert torch.equal(x, torch.stack([ids * 0.5, ids * 2.0], dim=1))
                    found[step.number, number] = ids.tolist()
    return found


def test_a_dataframe_has_each_row_once_without_a_job() -> None:
    source = Dask(dd.from_pandas(frame(), npartitions=7), ["id", "x*"])
    alone = rows_of(source)
    assert sorted(row for rows in alone.values() for row in rows) == list(range(ROWS))
    assert rows_of(source, 3) == alone


def held(source: Dask, parts: dict[str, Any]) -> Dask:
    """Return a source as a rank has it, and fill the partitions that its hook returns."""
    (collection,) = source.collections or ()
    values = [collection.partitions[number].compute() for number in range(collection.npartitions)]
    keys = [(json.dumps(["part", number]),) for number in range(len(values))]
    parts.update({key: value for (key,), value in zip(keys, values, strict=True)})
    source.hold(keys, [(len(value),) for value in values], 24 * ROWS)
    received: Dask = pickle.loads(pickle.dumps(source))
    assert received.collections is None
    return received


def test_a_rank_fetches_partitions_by_their_keys() -> None:
    parts: dict[str, Any] = {}
    received = held(Dask(dd.from_pandas(frame(), npartitions=5), ["id", "x*"]), parts)
    context = StaticContext(SoloCommunicator(generation=1))
    context.fetch_partition = parts.__getitem__
    with activate(context):
        loader = Loader(received, Batch(12, micro=3))
        rows = [int(row) for step in loader for ids, _ in step for row in ids]
    assert sorted(rows) == list(range(ROWS))
    with pytest.raises(DataError, match=r"partition \d cannot be read outside of its job"):
        next(iter(next(iter(Loader(received, Batch(12, micro=3))))))


def test_a_partition_that_was_computed_to_other_rows_is_refused() -> None:
    parts: dict[str, Any] = {}
    received = held(Dask(dd.from_pandas(frame(), npartitions=5)), parts)
    parts[json.dumps(["part", 3])] = frame()[:2]
    context = StaticContext(SoloCommunicator(generation=1))
    context.fetch_partition = parts.__getitem__
    with activate(context):
        loader = Loader(received, Batch(12, micro=3))
        with pytest.raises(DataError, match="unit 3 has 2 rows, and had 24 when the job began"):
            sum(len(list(step)) for step in loader)


def test_a_partition_that_is_forgotten_is_named() -> None:
    received = held(Dask(dd.from_pandas(frame(), npartitions=5)), {})

    def fetch(key: str) -> Any:
        raise LookupError("the scheduler has forgotten its key")

    context = StaticContext(SoloCommunicator(generation=1))
    context.fetch_partition = fetch
    with activate(context):
        loader = Loader(received, Batch(12, micro=3))
        with pytest.raises(DataError, match=r"partition \d cannot be read: .* forgotten its key"):
            next(iter(next(iter(loader))))


def test_arrays_and_series_make_tensors_and_tuples() -> None:
    matrix = da.arange(ROWS * 4, chunks=32).reshape(ROWS, 4)
    numbers = dd.from_pandas(frame(), npartitions=matrix.npartitions)["id"]
    batch = next(iter(next(iter(Loader(Dask(matrix), Batch(12, micro=3))))))
    assert tuple(batch.shape) == (3, 4)
    if numbers.npartitions == matrix.rechunk({1: -1}).npartitions:
        both = Dask((matrix, numbers))
        x, ids = next(iter(next(iter(Loader(both, Batch(12, micro=3))))))
        assert torch.equal(x[:, 0], ids * 4)


def test_what_cannot_be_used_is_refused_before_the_start() -> None:
    words = dd.from_pandas(frame(word=[f"w{i}" for i in range(ROWS)]), npartitions=3)
    with pytest.raises(OptionError, match=r"column 'word' has type .*transform="):
        Dask(words)
    with pytest.raises(OptionError, match=r"no column 'idd'; did you mean 'id'\?"):
        Dask(words, ["idd"])
    with pytest.raises(OptionError, match=r"Dask\(DataFrame\): must be a dask.dataframe"):
        Dask(frame())
    for other in (dask.delayed(abs)(1), dask.bag.from_sequence([1])):
        with pytest.raises(OptionError, match="must be a dask"):
            Dask(other)
    with pytest.raises(OptionError, match="have 2 and 3 partitions"):
        Dask((da.ones(12, chunks=4), da.ones(12, chunks=6)))
    with pytest.raises(OptionError, match="the collection has no columns"):
        Dask(da.ones(12, chunks=4), ["x"])
    with pytest.raises(OptionError, match="not held by the cluster yet"):
        pickle.dumps(Dask(da.ones(12, chunks=4)))
    encoded = Dask(words, transform=lambda part: part["id"].to_numpy())
    batch = next(iter(next(iter(Loader(encoded, Batch(12, micro=3))))))
    assert batch.dtype == torch.int64


def test_nulls_are_refused_or_filled() -> None:
    holes = dd.from_pandas(frame(y=[1.0, np.nan] * (ROWS // 2)), npartitions=3)
    with pytest.raises(DataError, match=r"partition \d: column 'y' has 20 nulls"):
        next(iter(next(iter(Loader(Dask(holes, ["y"]), Batch(12, micro=3))))))
    filled = Loader(Dask(holes, ["y"], fill=5.0), Batch(12, micro=3))
    assert sum(float(y.sum()) for step in filled for (y,) in step) == 6.0 * ROWS / 2


def test_collections_among_arguments_become_sources() -> None:
    array, table = da.ones(12, chunks=4), dd.from_pandas(frame(), npartitions=3)
    delayed = dask.delayed(abs)(1)
    given = (array, 1, [array, array], [array, 2], delayed)
    args, kwargs, sources = with_sources(print, given, {"data": table})
    kinds = [type(value) for value in (*args, *kwargs.values())]
    assert kinds == [Dask, int, Dask, list, type(delayed), Dask]
    assert sources == [args[0], args[2], kwargs["data"]]
    own = Dask(array)
    assert with_sources(lambda: own, (), {})[2] == [own]


def test_columns_and_values_without_tensors_are_named() -> None:
    numbered = dd.from_pandas(pd.DataFrame(np.zeros((4, 2))), npartitions=1)
    with pytest.raises(OptionError, match=r"columns that are no text \(0\); rename them"):
        Dask(numbered)
    times = dd.from_pandas(pd.Series(pd.to_datetime([0] * 4)), npartitions=1)
    with pytest.raises(DataError, match="partition 0: column 'values' has type datetime64"):
        Dask(times).read(0)
    holes = pd.DataFrame({"a": pd.array([1, None], dtype="Int64")})
    with pytest.raises(DataError, match=r"column 'a': fill=0.5: Invalid value"):
        Dask(dd.from_pandas(holes, npartitions=1), fill=0.5).read(0)
