"""Commits that copy nothing, in jobs whose workers are really killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.support.clusters import sizes

STEPS = 20


def work(marks: Path, kill_at: int, between: bool) -> tuple[int, int, list[float], bool]:
    import torch

    import nbelastic.torch as hvd

    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(4, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    uncopied = []

    @hvd.elastic.run
    def loop(state):
        while state.step < STEPS:
            optimizer.zero_grad()
            model(torch.ones(3, 4) + state.step).square().sum().backward()
            optimizer.step()
            if state.step == kill_at and not (marks / "done").exists():
                uncopied.append(state._lazy.uncopied)
                if hvd.rank() == 1:
                    time.sleep(0.5)  # the others are done with their steps
                    (marks / "done").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                if between:
                    hvd.allreduce(torch.ones(1))
            state.step += 1
            state.commit()

    loop(state)
    steps = {int(each["step"]) for each in optimizer.state.values()}
    values = [value for p in model.parameters() for value in p.flatten().tolist()]
    return *steps, state.step, values, all(uncopied)


def test_who_dies_between_step_and_commit_costs_nobody_a_step(crew, tmp_path):
    job = crew.fit(work, np=3, min_np=2, max_np=3, args=[tmp_path, 12, False])
    results = job.results()
    assert sizes(job)[0] == 3
    assert [result[:2] for result in results] == [(STEPS, STEPS)] * len(results)
    assert all(result[2:] == (results[0][2], True) for result in results)


def test_where_an_operation_breaks_the_rhythm_the_step_before_it_stands_in(crew, tmp_path):
    """The state at the end of that step: its batch is done again, since its commit never came."""
    job = crew.fit(work, np=3, min_np=2, max_np=3, args=[tmp_path, 12, True])
    results = job.results()
    assert sizes(job)[0] == 3
    assert [result[:2] for result in results] == [(STEPS + 1, STEPS)] * len(results)
    assert all(result[2:] == (results[0][2], True) for result in results)
