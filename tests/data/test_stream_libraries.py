"""Data of torchdata, WebDataset and Hugging Face's datasets, where these are installed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from nbelastic.data import Batch, Loader, Shards, Stateful
from nbelastic.errors import DataError
from tests.data.worlds import World

STREAMS, ROWS, MICRO = 4, 900, 8

Make = Callable[[int, int], Any]

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def of_nodes(_: Path) -> Make:
    nodes = pytest.importorskip("torchdata.nodes")
    return lambda stream, streams: nodes.Loader(
        nodes.Mapper(nodes.IterableWrapper(range(stream, ROWS, streams)), lambda row: {"id": row})
    )


def of_loaders(_: Path) -> Make:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    return lambda stream, streams: loaders.StatefulDataLoader(
        [{"id": row} for row in range(stream, ROWS, streams)], batch_size=None, shuffle=True
    )


def of_datasets(where: Path, buffer: int = 0) -> Make:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0  # for each iterator that is given up
    parts = np.array_split(np.arange(ROWS), 2 * STREAMS)
    files = [str(where / f"{number}.parquet") for number in range(len(parts))]
    for file, part in zip(files, parts, strict=True):
        pd.DataFrame({"id": part}).to_parquet(file, row_group_size=20)

    def make(stream: int, streams: int) -> Any:
        data = datasets.load_dataset(
            "parquet", data_files=files, split="train", streaming=True, cache_dir=str(where)
        ).shard(streams, stream)
        return data.shuffle(seed=2, buffer_size=buffer) if buffer else data

    return make


def check(source: Callable[[], Any]) -> None:
    """Check that two epochs are the same on changing ranks as on one, which has each row once."""

    def make(seed: int) -> Loader:
        return Loader(source(), Batch(MICRO * STREAMS, micro=MICRO), seed=seed)

    alone, other = World.of(make), World.of(make)
    assert alone.train(1)
    for size in (2, 3, 1, 4, 2, 3):
        other.train(size, steps=7, commit_every=3)
        other.loaders = []  # all are new
    assert other.train(2)
    assert other.seen == alone.seen
    first = [found[0] for key, found in alone.seen.items() if key[0] == 0 and key[2] >= 0]
    assert sorted(row for rows in first for row in rows) == [*range(ROWS)]


@pytest.mark.parametrize("of", [of_nodes, of_loaders, of_datasets])
def test_streams_go_on_from_the_states_of_libraries(
    tmp_path: Path, of: Callable[[Path], Make]
) -> None:
    make = of(tmp_path)
    for every in (5, None):
        check(lambda every=every: Stateful(make, states_every=every))


def test_a_shuffle_buffer_of_datasets_is_read_again_or_refused(tmp_path: Path) -> None:
    make = of_datasets(tmp_path, buffer=50)
    check(lambda: Stateful(make, states_every=None))
    with pytest.raises(DataError, match="a shuffle buffer, for one, is not in the states"):
        check(lambda: Stateful(make, states_every=5))


def test_a_dataset_of_hugging_face_is_dealt_like_any_other() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"id": range(ROWS)})
    check(lambda: data)


# WebDataset leaves the file of a shard to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_shards_of_webdataset_are_units_of_rows(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    paths = [str(tmp_path / f"{number}.tar") for number in range(2 * STREAMS)]
    for path, part in zip(paths, np.array_split(np.arange(ROWS), len(paths)), strict=True):
        with webdataset.TarWriter(path) as tar:
            for row in part.tolist():
                tar.write({"__key__": f"{row:04}", "id.json": row})

    def read(path: str) -> Any:
        return webdataset.WebDataset(path, shardshuffle=False).decode().rename(id="id.json")

    check(lambda: Shards(paths, read))
    gc.collect()
