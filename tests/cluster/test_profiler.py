"""Dask's profiler rests while a rank trains."""

import asyncio
from types import SimpleNamespace

import pytest
from distributed import LocalCluster, get_worker
from distributed.core import Status
from tornado.ioloop import PeriodicCallback

from nbelastic.cluster.profiler import Profiler
from nbelastic.driver.attachment import attach_client
from nbelastic.driver.options import Options
from nbelastic.errors import RankFailed
from tests.support.clusters import until


def all_go_on(crew):
    return set(crew.client.run(goes_on).values()) == {True}


def goes_on(dask_worker=None):
    return (dask_worker or get_worker()).periodic_callbacks["profile"].is_running()


def worker_with(interval_ms, status=Status.running):
    callback = PeriodicCallback(lambda: None, interval_ms)
    callback.start()
    return SimpleNamespace(periodic_callbacks={"profile": callback}, status=status), callback


def test_it_rests_in_a_rank_and_goes_on_afterwards(crew):
    until(lambda: all_go_on(crew), "profilers that look")
    assert crew.fit(goes_on, np=2).results() == [False, False]
    until(lambda: all_go_on(crew), "profilers that go on")


def test_it_goes_on_when_a_rank_has_raised(crew):
    with pytest.raises(RankFailed):
        crew.fit(lambda: 1 / 0, np=1)
    until(lambda: all_go_on(crew), "profilers that go on")


@pytest.mark.parametrize(("interval_ms", "rests"), [(10.0, True), (10.5, False)])
def test_an_interval_that_somebody_has_chosen_stays(interval_ms, rests):
    async def look():
        worker, callback = worker_with(interval_ms)
        profiler = Profiler(worker)
        profiler.rest()
        assert callback.is_running() is not rests
        profiler.rest()
        profiler.go_on()
        assert callback.is_running()
        callback.stop()

    asyncio.run(look())


def test_what_others_have_stopped_is_not_started():
    async def look():
        worker, callback = worker_with(10.0)
        callback.stop()
        profiler = Profiler(worker)
        profiler.rest()
        profiler.go_on()
        assert not callback.is_running()
        none = Profiler(SimpleNamespace(periodic_callbacks={}, status=Status.running))
        none.rest()
        none.go_on()

    asyncio.run(look())


def test_a_worker_that_closes_does_not_look_again():
    async def look():
        worker, callback = worker_with(10.0)
        profiler = Profiler(worker)
        profiler.rest()
        worker.status = Status.closing
        profiler.go_on()
        assert not callback.is_running()

    asyncio.run(look())


def test_the_workers_of_a_cluster_for_one_job_have_none():
    client, close = attach_client(None, Options(np=1))
    try:
        assert isinstance(client.cluster, LocalCluster)
        found = client.run(lambda dask_worker: "profile" in dask_worker.periodic_callbacks)
        assert set(found.values()) == {False}
    finally:
        close()
