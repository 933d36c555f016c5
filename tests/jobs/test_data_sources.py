"""Sources of data in real jobs: rows of Dask collections under kills."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nbelastic.data import Batch, Dask, Loader
from nbelastic.errors import OptionError
from tests.support.clusters import until

pytestmark = pytest.mark.timeout(100)
ROWS = 960


def train(source: Any, marks: Path, kills: int) -> dict[str, Any]:
    """Train two epochs; write down each micro-batch; kill a rank now and then."""
    import signal

    import torch

    import nbelastic.torch as hvd

    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(
                torch.linspace(-1, 1, parameter.numel()).view_as(parameter) / (2 + number)
            )
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    loader = hvd.elastic.Loader(source, hvd.elastic.Batch(48, micro=8), seed=4)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader, epoch=0, seen=0)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        for state.epoch in range(state.epoch, 2):
            for step in loader:
                optimizer.zero_grad()
                for number, (ids, x) in zip(step.numbers, step, strict=True):
                    model(x / 1000).square().mean().backward()
                    with open(marks / f"{step.epoch}-{step.number}-{number}", "a") as file:
                        print(ids.tolist(), file=file)
                optimizer.step()
                state.seen += step.rows
                place = step.epoch * 20 + step.number
                if hvd.rank() == hvd.size() - 1 and place % 12 == 7 and place // 12 < kills:
                    with contextlib.suppress(FileExistsError):
                        (marks / f"killed {place // 12}").touch(exist_ok=False)
                        os.kill(os.getpid(), signal.SIGKILL)
                state.commit()

    loop(state)
    digest = [parameter.detach().numpy().tobytes().hex() for parameter in model.parameters()]
    return {"seen": state.seen, "digest": digest}


def ledger(marks: Path) -> dict[tuple[int, ...], set[str]]:
    """Return what each micro-batch (epoch, step, number) has consisted of, whenever it was read."""
    return {
        tuple(map(int, path.name.split("-"))): set(path.read_text().split("\n")) - {""}
        for path in marks.iterdir()
        if path.name[0].isdigit()
    }


def expected(source: Any) -> dict[tuple[int, ...], set[str]]:
    """Return what an undisturbed run of one rank has."""
    loader = Loader(source, Batch(48, micro=8), seed=4)
    found = {}
    for epoch in range(2):
        loader.set_epoch(epoch)
        for step in range(len(loader)):
            for number in range(6):
                found[epoch, step, number] = {str(loader.rows(step, number))}
    return found


def table() -> Any:
    import pandas as pd

    numbers = np.arange(ROWS)
    columns = {f"x{i}": (numbers * 10 + i).astype(np.float32) for i in range(3)}
    return pd.DataFrame({"id": numbers, **columns})


def keys_of_jobs(dask_scheduler: Any) -> dict[str, int]:
    """Return how many keys the scheduler holds for jobs, by holder."""
    found = dask_scheduler.clients.items()
    return {name: len(c.wants_what) for name, c in found if name.startswith("nbelastic-")}


def test_rows_are_seen_once_in_a_storm(crew, tmp_path):
    import dask.dataframe as dd

    source = Dask(dd.from_pandas(table(), npartitions=24), ["id", "x*"], shuffle_rows=300)
    marks, alone = tmp_path / "marks", tmp_path / "alone"
    marks.mkdir(), alone.mkdir()
    job = crew.fit(train, args=(source, marks, 2), np=3, min_np=2, max_np=3, block=False)
    until(lambda: job.done() or crew.client.run_on_scheduler(keys_of_jobs), "it holds them")
    assert {result["seen"] for result in job.results()} == {2 * ROWS}
    assert len({str(result["digest"]) for result in job.results()}) == 1
    seen = ledger(marks)
    assert seen == expected(source)
    for epoch in range(2):
        rows = [row for key, texts in seen.items() if key[0] == epoch for row in eval(min(texts))]
        assert sorted(rows) == list(range(ROWS))
    assert (marks / "killed 1").exists()
    (data,) = job.status.data
    assert (data.source, data.epoch, data.done, data.left) == ("Dask", 1, ROWS, 0)
    assert (data.seen, data.lost) == (2 * ROWS, 0)
    assert data.redone in (0, 48, 96)  # a step for each kill, unless it came between two steps
    crew.wait_until_whole(4)
    assert crew.client.run_on_scheduler(keys_of_jobs) == {}
    until(lambda: "memory" not in crew.client.run_on_scheduler(tasks).values(), "none is left")
    undisturbed = crew.fit(train, args=(source, alone, 0), np=1)
    assert undisturbed.results()[0] == job.results()[0]


def sum_up(data: Any, scale: float) -> list[Any]:
    import torch

    import nbelastic.torch as hvd

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
    import dask.array as da
    import dask.dataframe as dd

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


def fetch(key: str) -> Any:
    from nbelastic.elastic.ranks.context import current

    return current().fetch_partition(key)


def test_a_partition_that_the_scheduler_has_forgotten_is_an_error(crew):
    with pytest.raises(LookupError, match=r"forgotten its key, as after client\.restart"):
        crew.fit(fetch, args=('["gone", 0]',), np=1)


def test_an_error_in_a_partition_comes_before_the_job(crew):
    import dask.dataframe as dd

    def fail(part: Any) -> Any:
        raise ZeroDivisionError("in a partition")

    frame = dd.from_pandas(table(), npartitions=3).map_partitions(fail, meta=table().iloc[:0])
    with pytest.raises(ZeroDivisionError, match="in a partition") as kept:
        crew.fit(sum_up, args=((dd.from_pandas(table(), npartitions=3), frame), 1.0), np=2)
    until(lambda: not crew.client.run_on_scheduler(tasks), f"no task is left after {kept.value}")


def tasks(dask_scheduler: Any) -> dict[str, str]:
    return {str(key): task.state for key, task in dask_scheduler.tasks.items()}
