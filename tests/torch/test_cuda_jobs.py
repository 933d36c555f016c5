"""States, collectives and jobs on a GPU, where there is one: all ranks share it."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.collectives import Op
from tests.support.clusters import sizes
from tests.torch.test_cuda import loss_of
from tests.torch.training import make_model, parameters_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def test_collectives_take_tensors_of_a_gpu(ranks, kind):
    def rank_main(context):
        communicator, rank = context.communicator(), context.rank
        mine = torch.full((5,), float(rank + 1), device="cuda")
        summed, root = mine.clone(), mine.clone()
        communicator.allreduce(summed, Op.SUM)
        communicator.broadcast(root, 1)
        gathered = [torch.empty(5, device="cuda") for _ in range(3)]
        communicator.allgather(gathered, mine)
        share = torch.empty(5, device="cuda")
        communicator.reduce_scatter(share, [mine * (n + 1) for n in range(3)], Op.SUM)
        return [each.mean().item() for each in (summed, root, *gathered, share)]

    for rank, result in enumerate(ranks.run(3, rank_main, kind)):
        assert result == [6.0, 2.0, 1.0, 2.0, 3.0, 6.0 * (rank + 1)]


def test_parameters_and_optimizers_are_broadcast(ranks):
    def rank_main(context):
        torch.manual_seed(context.rank)
        model = torch.nn.Linear(3, 2).cuda()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + context.rank))
        model(torch.rand(4, 3, device="cuda")).sum().backward()
        optimizer.step()
        hvd.broadcast_parameters(model.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        moments = [each["exp_avg"] for each in optimizer.state.values()]
        assert all(each.is_cuda for each in (*model.parameters(), *moments))
        return [each.detach().cpu() for each in (*model.parameters(), *moments)]

    first, second = ranks.run(2, rank_main)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_commits_and_restores_keep_to_the_gpu(ranks):
    def rank_main(context):
        model = make_model().cuda()
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()))
        state = hvd.elastic.TorchState(model, optimizer, step=0)
        state.always_copy = True  # or what is changed below would stand in for the commit
        for step in range(3):
            loss_of(model, step, context).backward()
            optimizer.step()
            optimizer.zero_grad()
            state.step += 1
            state.commit()
        committed = parameters_of(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        state.step = -1
        state.restore()
        assert state.step == 3
        return all(torch.equal(a, b) for a, b in zip(committed, model.parameters(), strict=True))

    assert ranks.run(2, rank_main) == [True, True]


def work(marks, steps, kill_at):
    hvd.init()
    device = hvd.device()
    assert device.type == "cuda"
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(64, 8).to(device)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    state = hvd.elastic.TorchState(model, optimizer, step=0)

    @hvd.elastic.run
    def loop(state):
        while state.step < steps:
            optimizer.zero_grad()
            model(torch.ones(3, 64, device=device) + state.step).square().sum().backward()
            optimizer.step()
            if state.step == kill_at and hvd.rank() == 1 and not (marks / "done").exists():
                (marks / "done").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            state.step += 1
            state.commit()

    loop(state)
    moments = [each["exp_avg"] for each in optimizer.state.values()]
    assert all(each.device == device for each in (*model.parameters(), *moments))
    return state.step, [each.detach().cpu().tolist() for each in model.parameters()]


@pytest.mark.parametrize(("backend", "kind"), [("auto", "shm"), ("cuda_ipc", "cuda_ipc")])
def test_a_job_on_a_gpu_outlives_its_workers(crew, tmp_path, backend, kind):
    job = crew.fit(work, np=3, min_np=2, max_np=3, args=[tmp_path, 40, 12], backend=backend)
    results = job.results()
    assert job.status.backend == kind
    assert sizes(job)[0] == 3
    assert len(sizes(job)) > 1
    assert all(result == results[0] for result in results)
    assert results[0][0] == 40
