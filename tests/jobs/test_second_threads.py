"""Second threads and forks of ranks, and groups whose operations others do not begin."""

import pytest

from tests.support.clusters import sizes


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


def forks_and_goes_on(how):
    import os
    import warnings

    import torch

    import nbelastic.torch as hvd

    torch.set_num_threads(1)
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(4, 1)
    hvd.broadcast_parameters(model.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, child=0)

    @hvd.elastic.run
    def loop(state):
        while state.step < 12:
            if state.step == 4 and hvd.rank() == 0 and not state.child:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    state.child = os.fork()
                if state.child == 0 and how == "operation":
                    hvd.allreduce(torch.ones(4))
            if state.child == 0 and state.step == 4 and hvd.rank() == 0:
                state.child = -1  # the fork, which goes on
            optimizer.zero_grad()
            model(torch.full((2, 4), float(hvd.rank()))).sum().backward()
            optimizer.step()
            state.step += 1
            state.commit()

    loop(state)
    status = 0
    if state.child > 0:
        status = os.waitstatus_to_exitcode(os.waitpid(state.child, 0)[1])
    return [p.tolist() for p in model.parameters()], status


@pytest.mark.parametrize(("how", "backend"), [("operation", "shm"), ("training", "gloo")])
def test_a_fork_that_goes_on_ends_by_an_error_and_costs_nothing(crew, how, backend):
    job = crew.fit(forks_and_goes_on, args=(how,), np=2, backend=backend, block=False)
    (first, status), (second, _) = job.results(60)
    assert first == second
    assert status == 1
    assert job.status.resets == 0
    assert len(crew.workers()) == 4
