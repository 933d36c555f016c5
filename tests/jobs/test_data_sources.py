"""Dask collections in real jobs: rows under kills, and what may be wrong with a partition."""

from __future__ import annotations

from typing import Any

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch

import nbelastic.torch as hvd
from nbelastic import chaos
from nbelastic.data import Dask
from nbelastic.elastic.ranks.context import current
from nbelastic.errors import OptionError
from tests.support.clusters import until
from tests.support.exact_training import LONG, SIZES, SameResult

pytestmark = pytest.mark.timeout(100)
ROWS = SIZES["rows"]


def table() -> Any:
    numbers = np.arange(ROWS)
    columns = {f"x{i}": np.sin(numbers * 7 + i).astype(np.float32) for i in range(6)}
    return pd.DataFrame({"id": numbers, **columns, "label": numbers % 3})


def keys_of_jobs(dask_scheduler: Any) -> dict[str, int]:
    """Return how many keys the scheduler holds for jobs, by holder."""
    found = dask_scheduler.clients.items()
    return {name: len(c.wants_what) for name, c in found if name.startswith("nbelastic-")}


def tasks(dask_scheduler: Any) -> dict[str, str]:
    return {str(key): task.state for key, task in dask_scheduler.tasks.items()}


def test_rows_are_seen_once_in_a_storm(crew, tmp_path):
    frame = dd.from_pandas(table(), npartitions=24)
    source = Dask(frame, ["id", "x*", "label"], shuffle_rows=40)
    alone = SameResult(tmp_path / "alone")
    work = SameResult(tmp_path / "marks", seconds=0.03, hold=2)
    for each in (alone, work):
        each.marks.mkdir()
    digest, *_ = crew.fit(alone, args=(source,), np=1).result()
    job = crew.fit(work, args=(source,), np=3, min_np=2, max_np=3, block=False)
    until(lambda: job.status.commits or job.done(), "a commit")
    assert crew.client.run_on_scheduler(keys_of_jobs)
    plan = chaos.inject(job, chaos.kill(rank=2, step=4), chaos.kill(rank=1, step=14))
    (work.marks / "go").touch()
    work.check(job.results(), (digest, alone.ledger()))
    assert len(plan.report().injections) == 2
    (data,) = job.status.data
    assert (data.source, data.epoch, data.done, data.left) == ("Dask", LONG - 1, ROWS, 0)
    assert (data.seen, data.lost) == (LONG * ROWS, 0)
    assert data.redone in (0, 16, 32)  # a step for each kill, unless it came between two steps
    crew.wait_until_whole(4)
    assert crew.client.run_on_scheduler(keys_of_jobs) == {}
    until(lambda: "memory" not in crew.client.run_on_scheduler(tasks).values(), "none is left")


def sum_up(data: Any, scale: float) -> list[Any]:
    hvd.init()
    loader = hvd.elastic.Loader(data, hvd.elastic.Batch(60, micro=10), shuffle=False)
    rows, kinds = 0, set()
    for step in loader:
        for batch in step:
            kinds.add(type(batch).__name__)
            parts = tuple(batch.values()) if isinstance(batch, dict) else batch
            first = parts[0] if isinstance(parts, tuple) else parts
            rows += float(first.sum()) * scale
    return [hvd.allreduce(torch.tensor(rows), average=False).item(), *kinds]


def test_collections_among_the_arguments_just_work(crew):
    frame = dd.from_pandas(table(), npartitions=7)
    total = float(np.arange(ROWS).sum())
    assert crew.fit(sum_up, args=(frame, 1.0), np=2).results() == [[total, "dict"]] * 2
    array = da.arange(ROWS, chunks=100)
    matrix = da.ones((ROWS, 5), chunks=(100, 2))
    both = crew.fit(sum_up, args=((array, matrix), 1.0), np=2)
    assert both.results() == [[total, "tuple"]] * 2
    with pytest.raises(OptionError, match="repartition them alike"):
        crew.fit(sum_up, args=((array, matrix.rechunk((50, 5))), 1.0), np=2)
    assert crew.client.run_on_scheduler(keys_of_jobs) == {}


def test_a_partition_that_the_scheduler_has_forgotten_is_an_error(crew):
    with pytest.raises(LookupError, match=r"forgotten its key, as after client\.restart"):
        crew.fit(lambda: current().fetch_partition('["gone", 0]'), np=1)


def test_an_error_in_a_partition_comes_before_the_job(crew):
    def fail(part: Any) -> Any:
        raise ZeroDivisionError("in a partition")

    frame = dd.from_pandas(table(), npartitions=3).map_partitions(fail, meta=table().iloc[:0])
    with pytest.raises(ZeroDivisionError, match="in a partition") as kept:
        crew.fit(sum_up, args=((dd.from_pandas(table(), npartitions=3), frame), 1.0), np=2)
    until(lambda: not crew.client.run_on_scheduler(tasks), f"no task is left after {kept.value}")
