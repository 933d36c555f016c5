"""Dask collections as sources: what a job holds, and a rank fetches by its key."""

from __future__ import annotations

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

from nbelastic.cluster import with_sources
from nbelastic.data import Batch, Dask, Loader
from nbelastic.elastic.ranks.context import activate
from nbelastic.errors import DataError, OptionError
from tests.data.worlds import PARTITIONS, fetching, held
from tests.support.world import world_of

ROWS = 120


@pytest.fixture(autouse=True)
def in_this_thread() -> Any:
    with dask.config.set(scheduler="synchronous"):
        yield


def frame(**more: Any) -> pd.DataFrame:
    numbers = np.arange(ROWS)
    return pd.DataFrame({"id": numbers, "x0": numbers * 0.5, "x1": numbers * 2.0, **more})


def loader_of(source: Any) -> Loader:
    return Loader(source, Batch(12, micro=3))


def first_of(source: Any) -> Any:
    with fetching():
        return next(iter(next(iter(loader_of(held(source))))))


def test_a_rank_fetches_partitions_by_their_keys_and_names_those_that_are_not_there() -> None:
    source = pickle.loads(pickle.dumps(held(Dask(dd.from_pandas(frame(), 5), ["id", "x*"]))))
    assert source.collections is None
    parts = {key: PARTITIONS[key] for (key,) in source._keys}

    def rows() -> list[int]:
        return [int(row) for step in loader_of(source) for ids, _ in step for row in ids]

    with activate(context := world_of(0, 1)):
        with pytest.raises(DataError, match=r"partition \d cannot be read outside of its job"):
            rows()
        context.fetch_partition = parts.__getitem__
        assert sorted(rows()) == list(range(ROWS))
        parts[[*parts][3]] = frame()[:2]
        with pytest.raises(DataError, match="unit 3 has 2 rows, and had 24"):
            rows()
        parts.clear()  # as if Dask had forgotten it
        with pytest.raises(DataError, match=r"partition \d cannot be read: KeyError"):
            rows()


def test_arrays_and_series_make_tensors_and_tuples() -> None:
    matrix = da.arange(ROWS * 4, chunks=32).reshape(ROWS, 4)
    assert tuple(first_of(Dask(matrix)).shape) == (3, 4)
    matrix = da.arange(ROWS * 4, chunks=ROWS * 2).reshape(ROWS, 4)
    numbers = dd.from_pandas(frame(), npartitions=2)["id"]
    x, ids = first_of(Dask((matrix, numbers)))
    assert torch.equal(x[:, 0], ids * 4)
    encoded = Dask(WORDS, transform=lambda part: part["id"].to_numpy())
    assert first_of(encoded).dtype == torch.int64
    with fetching():
        assert held(Dask(HOLES, ["y"], fill=5.0)).read(0)[0].tolist() == [1.0, 5.0] * 20


WORDS = dd.from_pandas(frame(word=[f"w{i}" for i in range(ROWS)]), npartitions=3)
UNEVEN = da.ones(6, chunks=(2, 4))
HOLES = dd.from_pandas(frame(y=[1.0, np.nan] * (ROWS // 2)), npartitions=3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dask(WORDS), r"column 'word' has type .*transform="),
        (lambda: Dask(WORDS, ["idd"]), r"no column 'idd'; did you mean 'id'\?"),
        (lambda: Dask(frame()), r"Dask\(DataFrame\): must be a dask.dataframe"),
        (lambda: Dask(dask.delayed(abs)(1)), "must be a dask"),
        (lambda: Dask(dask.bag.from_sequence([1])), "must be a dask"),
        (lambda: Dask((da.ones(12, chunks=4), da.ones(12, chunks=6))), "have 2 and 3 partitions"),
        (lambda: held(Dask((UNEVEN, da.ones(6, chunks=3)))), "has 2 and 3 rows"),
        (lambda: loader_of(Dask(da.ones(12, chunks=4))), "not held by the cluster yet"),
        (lambda: Dask(da.ones(12, chunks=4), ["x"]), "the collection has no columns"),
        (lambda: pickle.dumps(Dask(da.ones(12, chunks=4))), "not held by the cluster yet"),
        (
            lambda: Dask(dd.from_pandas(pd.DataFrame(np.zeros((4, 2))), npartitions=1)),
            r"columns that are no text \(0\); rename them",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_before_the_start(make: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


def test_values_without_tensors_are_named() -> None:
    times = Dask(dd.from_pandas(pd.Series(pd.to_datetime([0] * 4)), npartitions=1))
    for source, message in (
        (Dask(HOLES, ["y"]), "partition 0: column 'y' has 20 nulls"),
        (times, "partition 0: column 'values' has type timestamp"),
    ):
        with fetching(), pytest.raises(DataError, match=message):
            held(source).read(0)


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
