"""Which workers a job uses, and how it gets on with the rest of Dask."""

import os
import threading

import pytest
import torch
from distributed import get_client
from distributed.security import Security

import nbelastic
from nbelastic.cluster.scheduler import job_service
from nbelastic.errors import NotEnoughWorkers
from tests.support.clusters import a_crew, sizes, until, workers_of
from tests.support.training import step_by_step


def nothing():
    pass


def test_workers_restricts_by_address_or_name(crew):
    addresses = list(crew.workers())
    job = crew.fit(nothing, workers=addresses[:2])
    assert set(workers_of(job).values()) == set(addresses[:2])
    name = crew.client.scheduler_info()["workers"][addresses[3]]["name"]
    assert workers_of(crew.fit(nothing, workers=str(name))) == {0: addresses[3]}


def test_resources_restrict_and_a_worker_that_comes_late_is_taken_in():
    with a_crew(n_workers=1, threads_per_worker=2, resources={"GPU": 1}) as crew:
        with pytest.raises(NotEnoughWorkers, match="0 of at least 1"):
            crew.fit(nothing, resources={"TPU": 1}, np=1, elastic_timeout=0.5)
        job = crew.fit(torch.get_num_threads, resources={"GPU": 1}, np=2, block=False)
        until(lambda: job.status.state == "waiting" and job.status.reason, "it waits", 10)
        crew.cluster.scale(2)
        assert job.results(60) == [2, 2]  # Dask says OMP_NUM_THREADS=1
        assert sizes(job) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tls_clusters_work():
    with a_crew(security=Security.temporary(), protocol="tls") as crew:
        job = crew.fit(lambda: get_client().submit(abs, -1, pure=False).result(), np=2)
        assert job.results() == [1, 1]
        assert all(address.startswith("tls://") for address in workers_of(job).values())


def test_workers_that_are_threads_of_the_kernel_work():
    with a_crew(processes=False) as crew:
        processes = crew.fit(os.getpid, np=2).results()
        assert len({*processes, os.getpid()}) == 3


def wait_for(path):
    until(path.exists, "to go on")
    return os.getpid()


def test_a_rank_that_waits_for_other_tasks_says_so(crew, tmp_path):
    go = tmp_path / "go"
    tasks = crew.client.map(wait_for, [go] * 8, pure=False)  # two for each worker
    job = crew.fit(nothing, np=2, block=False)
    until(lambda: "not used: 2 busy with other tasks" in job.status.reason, "the reason")
    go.touch()
    job.results(60)
    crew.client.gather(tasks)


def train():
    sizes = []
    step_by_step(lambda state: sizes.append(nbelastic.size()) or state.step == 3)
    return sizes[1:]


def test_a_job_starts_and_ends_without_a_worker_that_is_busy_and_leaves_it_alone(
    crew, monkeypatch, tmp_path
):
    monkeypatch.setattr(job_service, "CLOSE_GRACE", 1e9)  # its end waits for nothing there
    first, second = sorted(crew.workers())[:2]
    before = crew.workers()[second]
    go = tmp_path / "go"
    task = crew.client.submit(wait_for, go, workers=[second], pure=False)
    try:
        options = {"min_np": 1, "max_np": 2, "np": 2, "elastic_timeout": 2}
        sizes = crew.fit(train, workers=[first, second], **options).results()
    finally:
        go.touch()
    assert sizes == [[1, 1, 1]]
    assert task.result() == before


def calls_fit():
    with get_client() as client:
        job = nbelastic.fit(train, cluster=client, min_np=1, max_np=4, np=4, elastic_timeout=3)
        return os.getpid(), threading.get_ident() and job.results()


def test_a_task_that_calls_fit_on_its_own_cluster_is_not_restarted(crew):
    pid, sizes = crew.client.submit(calls_fit, pure=False).result(60)
    assert pid in crew.workers().values()
    assert len(sizes) == 3
