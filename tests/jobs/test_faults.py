"""Real processes that freeze, or only look as if they had, start late, or have no Linux."""

import itertools
import re
import time

import dask
import distributed.batched
import distributed.metrics
import pytest
import tornado.ioloop

from tests.support.clusters import a_crew, kinds, sizes, until
from tests.support.training import Fault, Workload, check


def longest_gap(result):
    stamps = [stamp for stamp, _ in result["times"]]
    return max(after - before for before, after in itertools.pairwise(stamps))


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("stop", {}, "^its process is stopped$"),
        ("hang", {"stall_timeout": 2}, r"it was executing .*training\.py, line \d+, in _do_harm$"),
        ("hold", {"heartbeat_timeout": 2, "stall_timeout": 3}, r"3 s \(stall_timeout\)"),
    ],
)
def test_a_rank_that_freezes_is_lost_and_the_reason_is_said(crew, tmp_path, kind, options, words):
    fault = Fault(rank=1, epoch=1, batch=1, kind=kind, seconds=60.0)
    work = Workload(tmp_path, epochs=4, faults=(fault,))
    job = crew.fit(work, np=4, min_np=2, **options)
    check(job.results(), work)
    (lost,) = (event for event in job.history if event.kind == "lost")
    assert re.search(words, lost.detail)
    assert sizes(job)[:2] == [4, 3]
    if kind == "stop":  # seen by its nanny, not by heartbeat_timeout
        assert lost.time - (tmp_path / "stopped").stat().st_mtime < 8


def test_a_stopped_rank_is_ended_by_its_worker_which_starts_another(crew, tmp_path):
    before = crew.workers()
    fault = Fault(rank=1, epoch=1, batch=1, kind="stop_rank")
    work = Workload(tmp_path, epochs=1000, until_newcomers=1, faults=(fault,))
    job = crew.fit(work, np=4, min_np=2)
    check(job.results(), work)
    assert any("was stopped for" in event.detail for event in job.history)
    assert sizes(job)[:3] == [4, 3, 4]
    assert crew.workers() == before


def test_one_that_only_keeps_the_gil_busy_is_left_in_peace(crew, tmp_path):
    work = Workload(tmp_path, faults=(Fault(rank=1, epoch=1, batch=1, kind="hold", seconds=4.0),))
    job = crew.fit(work, np=4, min_np=2, heartbeat_timeout=2)
    check(job.results(), work)
    assert sizes(job) == [4]
    assert not {"lost", "left", "reset"} & set(kinds(job))
    assert longest_gap(job.results()[1]) >= 4.0


def test_N20_a_newcomer_warms_up_beside_the_others(crew, tmp_path):
    faults = (Fault(rank=3, epoch=1, batch=2),)
    work = Workload(tmp_path, epochs=1000, until_newcomers=1, slow_start=3.0, faults=faults)
    job = crew.fit(work, np=4, min_np=2)
    results = job.results()
    check(results, work)
    assert sizes(job) == [4, 3, 4]
    old = next(result for result in results if not result["newcomer"])
    assert longest_gap(old) < work.slow_start / 2, "the others waited for a newcomer"


@pytest.mark.nightly  # its cheap parts: test_backends, and ranks that import torch (tests/cluster)
def test_a_job_survives_a_killed_worker_without_what_only_linux_has(tmp_path, monkeypatch):
    monkeypatch.setenv("NBELASTIC_PORTABLE", "1")  # before the workers are started anew

    def native():
        from nbelastic.native import core

        return core

    spawned = dask.config.set({"distributed.worker.multiprocessing-method": "spawn"})
    with spawned, a_crew(n_workers=3) as crew:
        work = Workload(tmp_path, epochs=1000, until_newcomers=1)
        job = crew.fit(lambda: (native(), work()), np=3, min_np=2, block=False)
        until(lambda: job.status.commits > 5, "three ranks train")
        assert job.status.backend == "gloo"
        assert crew.kill(next(rank.worker for rank in job.status.ranks if rank.rank == 1))
        check([trained for _, trained in job.results()], work)
        assert [core for core, _ in job.results()] == [None] * 3
        assert sizes(job)[:3] == [3, 2, 3] and job.status.backend == "gloo"


CLOCKS = (distributed.batched, distributed.metrics, tornado.ioloop.IOLoop)


def set_back(seconds, set_clock=setattr):
    """Let a process, in which Dask runs, see the wall clock go back once; as NTP may do it."""
    for place in CLOCKS:
        set_clock(place, "time", lambda *_: time.time() - seconds)


def test_a_clock_that_is_set_back_costs_no_rank(tmp_path, monkeypatch):
    work = Workload(tmp_path, epochs=500, seconds=0.05, until_told=True)
    with a_crew(n_workers=2) as crew:
        job = crew.fit(work, np=2, block=False, heartbeat_timeout=2)

        def trains_on():
            seen = job.status.commits
            until(lambda: job.status.commits > seen + 60 or job.done(), "it trains on", 60)

        until(lambda: job.status.commits or job.done(), "it trains")
        crew.client.run(set_back, 60, workers=[next(iter(crew.workers()))])
        trains_on()
        set_back(60, monkeypatch.setattr)  # in this process: the kernel, and the scheduler with it
        trains_on()
        (tmp_path / "enough").touch()
        job.results(30)
        monkeypatch.undo()
        assert not {"lost", "reset"} & set(kinds(job))
