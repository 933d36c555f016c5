"""Real workers in real processes, really killed, stopped and retired, while they train."""

from __future__ import annotations

import itertools
import re

import dask
import pytest

from tests.support.clusters import a_crew, sizes, until
from tests.support.training import Fault, Workload, check


def test_N20_a_newcomer_warms_up_beside_the_others(crew, tmp_path):
    work = Workload(
        tmp_path,
        epochs=1000,
        until_newcomers=1,
        slow_start=3.0,
        faults=(Fault(rank=3, epoch=1, batch=2),),
    )
    job = crew.fit(work, np=4, min_np=2)
    results = job.results()
    check(results, work)
    assert sizes(job) == [4, 3, 4]
    old = next(result for result in results if not result["newcomer"])
    stamps = [stamp for stamp, _ in old["times"]]
    gap = max(after - before for before, after in itertools.pairwise(stamps))
    assert gap < work.slow_start / 2, f"the others waited {gap:.2f} s for a newcomer"


def test_a_rank_that_hangs_in_user_code_is_evicted(crew, tmp_path):
    work = Workload(tmp_path, epochs=4, faults=(Fault(rank=2, epoch=1, batch=1, kind="hang"),))
    job = crew.fit(work, np=4, min_np=2, stall_timeout=2.0)
    check(job.results(), work)
    assert sizes(job)[:2] == [4, 3]
    lost = next(event for event in job.history if event.kind == "lost")
    assert re.search(r"it was executing .*training\.py, line \d+, in _do_harm$", lost.detail)


def how_it_began():
    import psutil

    from nbelastic.native import core

    return core, [word for word in psutil.Process().cmdline() if "rank.main import" in word] != []


@pytest.mark.nightly  # its cheap parts: test_backends, and a rank that is spawned (tests/cluster)
def test_a_job_survives_a_killed_worker_without_what_only_linux_has(tmp_path, monkeypatch):
    monkeypatch.setenv("NBELASTIC_PORTABLE", "1")  # before the workers are started anew
    with (
        dask.config.set({"distributed.worker.multiprocessing-method": "spawn"}),
        a_crew(n_workers=3) as crew,
    ):
        work = Workload(tmp_path, epochs=1000, until_newcomers=1)
        job = crew.fit(lambda: (how_it_began(), work()), np=3, min_np=2, block=False)
        until(lambda: job.status.commits > 5, "three ranks train")
        assert job.status.backend == "gloo"
        assert crew.kill(next(rank.worker for rank in job.status.ranks if rank.rank == 1))
        check([trained for _, trained in job.results()], work)
        assert [began for began, _ in job.results()] == [(None, True)] * 3
        assert sizes(job)[:3] == [3, 2, 3] and job.status.backend == "gloo"
