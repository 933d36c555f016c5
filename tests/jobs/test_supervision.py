"""Wrong trainings that no operation fails of are warned of while they run."""

from __future__ import annotations

import pytest

from nbelastic.render import JobSnapshot, text
from tests.support.clusters import until


def train(marks, commits, wrapped):
    import time

    import torch

    import nbelastic.torch as hvd

    hvd.init()
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer)
    state = hvd.elastic.TorchState(model, optimizer, steps=0)

    @hvd.elastic.run
    def loop(state):
        while True:
            optimizer.zero_grad()
            model(torch.randn(8, 4) + hvd.rank()).pow(2).sum().backward()
            optimizer.step()
            state.steps += 1
            done = torch.tensor(state.steps >= 15 and (marks / "enough").exists())
            if commits:
                state.commit()
            if hvd.allreduce(done.int(), op=hvd.Min):
                return
            time.sleep(0.001)

    loop(state)
    return model.weight.detach()


def test_an_optimizer_that_is_not_wrapped_is_warned_of_while_it_trains(crew, tmp_path):
    job = crew.fit(train, args=[tmp_path, True, False], np=2, block=False)
    until(lambda: job.status.warnings, "the warning")
    assert not job.done()
    (tmp_path / "enough").touch()
    first, second = job.results(60)
    assert not first.equal(second)
    (warning,) = job.status.warnings
    assert warning.startswith("ranks train different parameters\nAdam is not wrapped")
    assert "warning: ranks train different parameters" in text(JobSnapshot.of(job))


def test_a_loop_that_does_not_commit_is_warned_of_while_it_trains(crew, tmp_path):
    job = crew.fit(train, args=[tmp_path, False, True], np=2, block=False)
    until(lambda: job.status.warnings, "the warning")
    assert not job.done()
    (tmp_path / "enough").touch()
    first, second = job.results(60)
    assert first.equal(second)
    assert job.status.headlines == ("no commit yet",)


def test_a_right_training_is_not_warned_of(crew, tmp_path):
    (tmp_path / "enough").touch()
    assert crew.fit(train, args=[tmp_path, True, True], np=2).status.warnings == ()


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("wrapped", [True, False])
def test_it_is_warned_of_without_an_elastic_loop_too(crew, measured, wrapped):
    def work():
        import torch

        import nbelastic.torch as hvd

        hvd.init()
        model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if wrapped:
            optimizer = hvd.DistributedOptimizer(optimizer)
        hvd.broadcast_parameters(model.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        for _ in range(12):
            optimizer.zero_grad()
            loss = (model(torch.randn(8, 4)) - hvd.rank()).pow(2).mean()
            loss.backward()
            optimizer.step()
            if measured:
                hvd.allreduce(loss.detach())

    job = crew.fit(work, np=2)
    assert job.status.headlines == (() if wrapped else ("ranks train different parameters",))


def test_a_sharded_optimizer_is_not_warned_of(crew):
    def work():
        import torch
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from torch.nn.parallel import DistributedDataParallel

        torch.distributed.init_process_group("nbelastic")
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
        for _ in range(12):
            optimizer.zero_grad()
            (model(torch.randn(8, 4)) - torch.distributed.get_rank()).pow(2).mean().backward()
            optimizer.step()
        torch.distributed.destroy_process_group()

    assert crew.fit(work, np=2).status.warnings == ()
