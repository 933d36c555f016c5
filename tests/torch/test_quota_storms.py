"""Storms over files and partitions while quotas change: the bits are those of one rank."""

from __future__ import annotations

import itertools
import json
import pickle
import random
from typing import TYPE_CHECKING, Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest

from nbelastic.data import Batch, Dask, Loader, Parquet
from nbelastic.data.plan.quotas import Pace
from nbelastic.elastic.ranks.context import current
from tests.collectives.worlds import MAKERS, needs_core
from tests.support.exact_training import EPOCHS, ExactTraining, one_thread, train_alone

from .storms import Storm, blows_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.exact_training import Ledger

ROWS, MICRO, MICRO_BATCHES = 100, 2, 6
STEPS = EPOCHS * -(-ROWS // (MICRO * MICRO_BATCHES))
COLUMNS = {"columns": ["id", "x*", "y"], "shuffle_rows": 60}
FIRST, STORMS = 0, 5
"""Seeds of the storms of each source."""


def table() -> pd.DataFrame:
    numbers = np.arange(ROWS)
    values = np.random.default_rng(2).normal(size=(6, ROWS)).astype(np.float32)
    columns = {f"x{number}": each for number, each in enumerate(values)}
    return pd.DataFrame({"id": numbers, **columns, "y": numbers % 3})


def of_files(where: Path) -> Callable[[], Any]:
    cuts = (0, 7, 40, 41, ROWS)
    for start, stop in itertools.pairwise(cuts):
        table()[start:stop].to_parquet(where / f"{start:02}.parquet", row_group_size=9)
    source = Parquet(str(where), **COLUMNS)
    return lambda: pickle.loads(pickle.dumps(source))


def of_partitions(_: Path) -> Callable[[], Any]:
    """Return a function that makes a source as ranks have it, with partitions in this process."""
    with dask.config.set(scheduler="synchronous"):
        frame = dd.from_pandas(table(), npartitions=9)
        values = [each.compute() for each in frame.partitions]
    source = Dask(frame, **COLUMNS)
    keys = [json.dumps(["part", number]) for number in range(len(values))]
    source.hold([(key,) for key in keys], [(len(value),) for value in values], 40 * ROWS)
    parts = dict(zip(keys, values, strict=True))

    def make() -> Any:
        current().fetch_partition = parts.__getitem__
        return pickle.loads(pickle.dumps(source))

    return make


class Uneven(Pace):
    """Pace of ranks of differing speeds, which change at times."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self._dice, self._steps_left = random.Random(start), 0

    @property
    def seconds(self) -> float:
        if not self._steps_left:
            self._steps_left = self._dice.randint(3, 9)
            self._speed = self._dice.choice((1.0, 1.0, 2.5, 7.0))
        self._steps_left -= 1
        return self._speed


class UnevenTraining(ExactTraining):
    """Training that counts the rows of its ledger, and how often quotas have changed."""

    changes = 0

    def __init__(self, make_source: Callable[[], Any], start: int, ledger: Ledger) -> None:
        super().__init__(ledger, random=False, make_loader=lambda: loader_of(make_source()))
        self.loader.balancer._pace = Uneven(start)

    def update(self) -> None:
        super().update()
        balance = self.loader.balancer._balance
        UnevenTraining.changes += balance is not None and bool(balance.coming)

    def digest(self) -> str:
        assert self.loader._ledger.totals == (EPOCHS * ROWS, 0)
        return super().digest()


def loader_of(source: Any) -> Loader:
    batch = Batch(MICRO * MICRO_BATCHES, micro=MICRO, exact=True)
    return Loader(source, batch, seed=3, balance="speed")


@pytest.mark.parametrize(
    ("of", "kind"),
    [(of_files, "gloo"), pytest.param(of_partitions, "shm", marks=needs_core)],
)
def test_a_storm_while_quotas_change_changes_no_bit(
    tmp_path: Path, of: Callable[[Path], Callable[[], Any]], kind: str
) -> None:
    make_source = of(tmp_path)
    digest, ledger = train_alone(random=False, make_loader=lambda: loader_of(make_source()))
    for epoch in range(EPOCHS):
        rows = [row for place, each in ledger.items() if place[0] == epoch for row in each]
        assert sorted(rows) == [*range(ROWS)]
    UnevenTraining.changes = 0
    for seed in range(FIRST, FIRST + STORMS):
        blows = blows_of(seed, STEPS)
        print(f"{kind}, seed {seed}: {blows}")
        storm = Storm(
            blows,
            2 + seed % 3,
            MAKERS[kind],
            lambda start, found: UnevenTraining(make_source, start, found),
        )
        with one_thread():
            results = storm.run()
        assert set(results) == {(STEPS, digest)}
        assert storm.ledger == ledger
        assert storm.generations > 1
    assert UnevenTraining.changes
