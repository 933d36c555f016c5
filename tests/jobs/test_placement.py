"""Which workers a job uses, and how it gets on with the rest of Dask."""

from __future__ import annotations

import os

import dask
import pytest
from distributed import SchedulerPlugin, WorkerPlugin
from distributed.security import Security

import nbelastic
from nbelastic.errors import NotEnoughWorkers
from tests.support.clusters import a_crew, kinds, sizes, until, workers_of


def nothing():
    pass


def names(dask_scheduler):
    return {address: str(worker.name) for address, worker in dask_scheduler.workers.items()}


def test_workers_restricts_by_address_or_name(crew):
    addresses = list(crew.workers())
    job = crew.fit(nothing, workers=addresses[:2])
    assert set(workers_of(job).values()) == set(addresses[:2])
    name = crew.client.run_on_scheduler(names)[addresses[3]]
    assert workers_of(crew.fit(nothing, workers=name)) == {0: addresses[3]}


def test_resources_restrict_and_a_worker_that_comes_late_is_taken_in():
    def threads():
        import torch

        return torch.get_num_threads()

    with a_crew(n_workers=1, threads_per_worker=2, resources={"GPU": 1}) as crew:
        with pytest.raises(NotEnoughWorkers, match="0 of at least 1"):
            crew.fit(nothing, resources={"TPU": 1}, np=1, elastic_timeout=0.5)
        job = crew.fit(threads, resources={"GPU": 1}, np=2, block=False)
        until(lambda: job.status.state == "waiting" and job.status.reason, "it waits", 10)
        crew.cluster.scale(2)
        assert job.results(60) == [2, 2]  # Dask says OMP_NUM_THREADS=1
        assert sizes(job) == []


def test_slots_per_host_caps_the_ranks_on_a_machine(crew):
    assert len(crew.fit(nothing, slots_per_host=3).results()) == 3


def test_C3_ranks_of_a_host_are_contiguous_and_local_and_cross_sizes_are_right():
    def place():
        return (
            nbelastic.local_rank(),
            nbelastic.local_size(),
            nbelastic.cross_rank(),
            nbelastic.cross_size(),
            os.environ["NBELASTIC_HOST"],
        )

    with a_crew(n_workers=0) as crew:
        for host, count in (("one", 1), ("two", 2)):
            with dask.config.set({"distributed.nanny.environ": {"NBELASTIC_HOST": host}}):
                crew.cluster.scale(len(crew.workers()) + count)
                crew.client.wait_for_workers(len(crew.cluster.worker_spec))
        places = crew.fit(place, np=3).results()
        first, second = ("one", "two") if places[0][-1] == "one" else ("two", "one")
        crews = {"one": 1, "two": 2}
        expected = [
            (local, crews[host], number if local == 0 else 0, 2 if local == 0 else 1, host)
            for number, host in enumerate((first, second))
            for local in range(crews[host])
        ]
        assert places == expected


def test_plugins_that_are_there_already_go_on(crew):
    class Watch(SchedulerPlugin):
        name = "someone-elses"

    class Look(WorkerPlugin):
        name = "someone-elses"

    crew.client.register_plugin(Watch())
    crew.client.register_plugin(Look())
    crew.fit(nothing, np=2)

    def plugins(dask_scheduler):
        return list(dask_scheduler.plugins)

    assert {"someone-elses", "nbelastic"} <= set(crew.client.run_on_scheduler(plugins))
    assert all(
        {"someone-elses", "nbelastic"} <= plugins
        for plugins in crew.client.run(lambda dask_worker: set(dask_worker.plugins)).values()
    )
    crew.client.unregister_worker_plugin("someone-elses")


def wait_for(mark):
    import time

    while not mark.exists():
        time.sleep(0.01)


def test_a_job_makes_an_adaptive_cluster_grow_up_to_max_np(tmp_path):
    with a_crew(n_workers=0) as crew:
        crew.cluster.adapt(minimum=0, maximum=6, interval="100ms", wait_count=2)
        job = crew.fit(wait_for, args=[tmp_path / "enough"], np=1, max_np=3, block=False)
        until(lambda: len(job.status.ranks) == 3, "three ranks", 60)
        (tmp_path / "enough").touch()
        assert len(job.results(60)) == 3


def test_an_adaptive_cluster_gives_up_workers_without_ranks_first(tmp_path):
    with a_crew(n_workers=4) as crew:
        job = crew.fit(wait_for, args=[tmp_path / "enough"], np=2, block=False)
        until(lambda: len(job.status.ranks) == 2, "two ranks", 30)
        used = {rank.worker for rank in job.status.ranks}
        crew.cluster.adapt(minimum=2, maximum=2, interval="100ms", wait_count=2)
        until(lambda: len(crew.cluster.scheduler.workers) == 2, "two workers are gone", 30)
        assert set(crew.cluster.scheduler.workers) == used
        (tmp_path / "enough").touch()
        assert job.results(30) == [None, None]
        assert "lost" not in kinds(job)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tls_clusters_work():
    with a_crew(security=Security.temporary(), protocol="tls") as crew:

        def submit():
            from distributed import get_client

            return get_client().submit(abs, -1, pure=False).result()

        job = crew.fit(submit, np=2)
        assert job.results() == [1, 1]
        assert all(address.startswith("tls://") for address in workers_of(job).values())


def test_workers_that_are_threads_of_the_kernel_work():
    with a_crew(processes=False) as crew:
        processes = crew.fit(os.getpid, np=2).results()
        assert len({*processes, os.getpid()}) == 3
