"""Second threads of ranks, and groups whose operations others do not begin."""

from __future__ import annotations

import pytest

from tests.support.clusters import sizes


@pytest.mark.parametrize("own_group", [False, True])
def test_async_save_writes_while_ranks_train(crew, tmp_path, own_group):
    def train(path, own_group):
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo")
        torch.manual_seed(0)
        ddp = DistributedDataParallel(torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        group = dist.new_group() if own_group else None
        saved, future = [], None
        for step in range(60):
            optimizer.zero_grad()
            ddp(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            if step % 20 == 19:
                if future is not None:
                    future.result()
                weight = {"weight": ddp.module.weight}
                saved.append(ddp.module.weight.detach().clone())
                future = dcp.async_save(weight, checkpoint_id=f"{path}/{step}", process_group=group)
        future.result()
        read = {"weight": torch.zeros(1, 3)}
        equal = []
        for step, expected in zip((19, 39, 59), saved, strict=True):
            dcp.load(read, checkpoint_id=f"{path}/{step}", process_group=group)
            equal.append(torch.equal(read["weight"], expected))
        return equal

    job = crew.fit(train, args=(str(tmp_path), own_group), np=2)
    assert job.results() == [[True] * 3] * 2


def test_async_save_in_a_loop_goes_on_after_a_kill(crew, tmp_path):
    def train(path):
        import os
        import signal
        import time
        from pathlib import Path

        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        import nbelastic.torch as hvd
        from nbelastic.errors import CollectiveError

        dist.init_process_group("gloo")
        model = torch.nn.Linear(3, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
        group = dist.new_group()
        state = hvd.elastic.TorchState(model, optimizer, step=0, written=[])
        killed = Path(path, "killed")

        @hvd.elastic.run
        def loop(state):
            future, of = None, 0
            while state.step < 40 or dist.get_world_size() < 2:
                optimizer.zero_grad()
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                state.step += 1
                time.sleep(0.01)
                if future is None or future.done():
                    if future is not None:
                        try:
                            future.result()
                            state.written = [*state.written, of]
                        except CollectiveError:
                            pass
                    future, of = None, state.step
                    ready = torch.ones(1)
                else:
                    ready = torch.zeros(1)
                dist.all_reduce(ready)
                if ready.item() == dist.get_world_size():
                    place = f"{path}/{state.step}-{dist.get_world_size()}"
                    values = {"weight": model.weight.detach().clone()}
                    future = dcp.async_save(values, checkpoint_id=place, process_group=group)
                    if state.step > 20 and dist.get_rank() == 1 and not killed.exists():
                        killed.touch()
                        os.kill(os.getpid(), signal.SIGKILL)
                state.commit()
            return state.step, len(state.written)

        return loop(state)

    job = crew.fit(train, args=(str(tmp_path),), np=2, min_np=1, max_np=2)
    outcomes = job.results()
    assert all(step >= 40 and written >= 3 for step, written in outcomes)
    assert sizes(job) == [2, 1, 2]


@pytest.mark.parametrize("waits", [False, True])
def test_a_group_does_not_wait_for_ranks_outside_of_it(crew, tmp_path, waits):
    def train(path, waits):
        import time
        from pathlib import Path

        import torch
        import torch.distributed as dist

        import nbelastic.torch as hvd

        hvd.init()
        dist.init_process_group()
        group, summed = dist.new_group([0, 1]), Path(path, "summed")
        if dist.get_rank() == 2:
            deadline = time.monotonic() + 30
            while waits and not summed.exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            return 0.0
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        summed.touch()
        return total.item()

    job = crew.fit(train, args=(str(tmp_path), waits), np=3)
    assert job.results() == [2.0, 2.0, 0.0]


def test_a_rank_that_formed_for_others_enters_its_loop(crew):
    def train():
        import time

        import torch

        import nbelastic.torch as hvd

        hvd.init()
        pair = hvd.add_process_set([0, 1])
        total = torch.ones(1)
        if hvd.rank() == 2:
            time.sleep(0.5)
        else:
            total = hvd.allreduce(total, op=hvd.Sum, process_set=pair)
        state = hvd.elastic.ObjectState(step=0)

        @hvd.elastic.run
        def loop(state):
            while state.step < 5:
                state.step += int(hvd.allreduce(torch.ones(1)).item())
                state.commit()
            return state.step

        return total.item(), loop(state)

    assert crew.fit(train, np=3).results() == [(2.0, 5), (2.0, 5), (1.0, 5)]
