"""Real workers in real processes, really killed, stopped and retired, while they train."""

from __future__ import annotations

import itertools
import os
import re
import signal

import dask
import pytest

from tests.support.clusters import a_crew, kinds, sizes, until
from tests.support.training import Fault, Workload, check


def dies_between_step_and_commit(marks, between):
    import time

    import torch

    import nbelastic.torch as hvd

    hvd.init()
    model = torch.nn.Linear(4, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    state = hvd.elastic.TorchState(model, optimizer, step=0)

    @hvd.elastic.run
    def loop(state):
        while state.step < 20:
            optimizer.zero_grad()
            model(torch.ones(3, 4) + state.step).square().sum().backward()
            optimizer.step()
            if state.step == 12 and not (marks / "done").exists():
                if hvd.rank() == 1:
                    time.sleep(0.5)  # the others are done with their steps
                    (marks / "done").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                if between:  # breaks the rhythm: the commit of that step is to be a copy
                    hvd.allreduce(torch.ones(1))
            state.step += 1
            state.commit()

    loop(state)
    steps = {int(each["step"]) for each in optimizer.state.values()}
    return *steps, [value for p in model.parameters() for value in p.flatten().tolist()]


@pytest.mark.parametrize("between", [False, True])
def test_who_dies_between_step_and_commit_leaves_the_others_with_one_state(crew, tmp_path, between):
    job = crew.fit(dies_between_step_and_commit, np=3, min_np=2, max_np=3, args=[tmp_path, between])
    results = job.results()
    assert kinds(job).count("lost") == 1
    # Where an operation fails first, the state is that of after the step: its batch is done again.
    assert results == [(20 + between, results[0][1])] * len(results)


def test_N15_the_state_lives_while_any_rank_has_it(crew, tmp_path):
    work = Workload(
        tmp_path, epochs=1000, samples=120, seconds=0.01, replace_all=True, until_newcomers=4
    )
    job = crew.fit(work, np=4, min_np=1)
    results = job.results()
    check(results, work)
    assert all(result["newcomer"] for result in results)
    assert "restarted" not in kinds(job)
    assert kinds(job).count("lost") == 4


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
