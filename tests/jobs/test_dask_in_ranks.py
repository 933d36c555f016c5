"""Dask in ranks and beside them: a rank keeps no thread of its worker's pool from others."""

import threading

import dask
import torch
from dask import delayed
from distributed import get_client, rejoin, secede, worker_client

import nbelastic.torch as hvd
from tests.support.clusters import until


def in_every_way():
    """Use Dask as its documentation has tasks use it."""
    hvd.init()
    assert delayed(sum)([delayed(abs)(-number) for number in range(10)]).compute() == 45
    client = get_client()
    found = [client.submit(abs, -1, pure=False).result()]
    hvd.allreduce(torch.ones(1))
    futures = client.map(abs, range(-5, 0), pure=False)
    secede()
    found.append(sum(client.gather(futures)))
    rejoin()
    hvd.allreduce(torch.ones(1))
    with worker_client() as other:
        found.append(other.submit(abs, -2, pure=False).result())
    hvd.allreduce(torch.ones(1))
    return found


def pools(dask_worker):
    """Return how many threads a worker's pool has, and how many are named like one of its."""
    named = [t for t in threading.enumerate() if "Dask-Default" in t.name]
    return len(dask_worker.executors["default"]._threads), len(named)


def ask_for_a_client():
    """Leave a client in the worker, and it as the scheduler of Dask's configuration."""
    get_client()  # the first one in a process sets this, too
    dask.config.set(scheduler="dask.distributed")


def test_ranks_compute_submit_secede_and_rejoin_whatever_client_their_worker_has(crew):
    for address in crew.workers():
        crew.client.submit(ask_for_a_client, workers=[address], pure=False).result()
    assert crew.fit(in_every_way, np=4).results() == [[1, 15, 2]] * 4


def test_plain_tasks_run_beside_ranks_which_keep_their_workers_busy(crew, tmp_path):
    job = crew.fit(until, args=[(tmp_path / "go").exists, "go"], np=4, block=False)
    until(lambda: len(job.status.ranks) == 4 or job.done(), "all workers have ranks")
    futures = crew.client.map(abs, range(-8, 0), pure=False)
    assert sorted(crew.client.gather(futures)) == list(range(1, 9))
    crew.client.gather(crew.client.map(print, ["from a plain task"] * 8, pure=False))
    assert not job.done()

    def processing(dask_scheduler):
        return [len(worker.processing) for worker in dask_scheduler.workers.values()]

    assert crew.client.run_on_scheduler(processing) == [1] * 4
    (tmp_path / "go").touch()
    job.results(60)
    assert "plain" not in job.logs()
    until(lambda: set(crew.client.run(pools).values()) == {(1, 1)}, "one thread in each pool")
