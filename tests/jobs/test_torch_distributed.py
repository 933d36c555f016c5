"""torch.distributed in jobs on real workers: variables, FSDP2, checkpoints by a second thread."""

import contextlib
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

import nbelastic.torch as hvd
from nbelastic.errors import CollectiveError
from tests.support.clusters import sizes, until
from tests.support.training import once, step_by_step


def test_variables_of_torchrun_are_there_before_the_function_and_follow_resets(crew):
    def train():
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        first = [int(os.environ[name]) for name in names]
        horovods = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        assert first == [int(os.environ[f"HOROVOD_{name}"]) for name in horovods]
        assert int(os.environ["MASTER_PORT"])

        seen = set()

        def over(state):
            places = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()
            assert [int(os.environ[name]) for name in names] == list(places)
            seen.add(places)
            state.alone += hvd.size() == 1
            time.sleep(0.01)
            return state.alone == 3

        step_by_step(over, alone=0)
        return first, sorted(seen), os.environ["MASTER_ADDR"]

    job = crew.fit(train, np=2, min_np=1, max_np=2, block=False)
    until(lambda: job.status.commits > 5, "commits")
    job.scale(max_np=1)
    ((first, seen, address),) = job.results()
    assert first in ([0, 2, 0, 2], [1, 2, 1, 2])
    assert seen == sorted([(0, 1, 0, 1), tuple(first)])
    assert address == "nbelastic.invalid"  # accelerate wants one


def test_fsdp_works_on_a_fixed_world_and_is_refused_in_an_elastic_loop(crew):
    def train():
        dist.init_process_group("nbelastic")
        dist.barrier()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        plain = [each.detach().clone() for each in model.parameters()]
        mesh = dist.init_device_mesh("cpu", (2,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.ones(2, 4)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        full = [each.full_tensor().detach() for each in model.parameters()]
        assert not any(map(torch.equal, full, plain))
        try:
            hvd.elastic.TorchState(model, optimizer)
        except ValueError as error:
            return str(error), [each.tolist() for each in full]

    (text, one), (_, other) = crew.fit(train, np=2).results()
    assert "sharded over the ranks" in text
    assert one == other


def test_async_save_in_a_loop_goes_on_after_a_kill(crew, tmp_path):
    def train(path):
        dist.init_process_group("gloo")
        model = torch.nn.Linear(3, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
        group = dist.new_group()
        state = hvd.elastic.TorchState(model, optimizer, step=0, written=[])

        @hvd.elastic.run
        def loop(state):
            future, of = None, 0
            while state.step < 40 or dist.get_world_size() < 2:
                optimizer.zero_grad()
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                state.step += 1
                time.sleep(0.01)
                if future is not None and future.done():
                    with contextlib.suppress(CollectiveError):
                        future.result()
                        state.written = [*state.written, of]
                    future = None
                ready = torch.tensor(float(future is None))
                dist.all_reduce(ready)
                if ready.item() == dist.get_world_size():
                    place = f"{path}/{state.step}-{dist.get_world_size()}"
                    values = {"weight": model.weight.detach().clone()}
                    of = state.step
                    future = dcp.async_save(values, checkpoint_id=place, process_group=group)
                    if state.step > 20 and dist.get_rank() == 1 and once(Path(path, "killed")):
                        os.kill(os.getpid(), signal.SIGKILL)
                state.commit()
            return state.step, len(state.written)

        return loop(state)

    job = crew.fit(train, args=(str(tmp_path),), np=2, min_np=1, max_np=2)
    outcomes = job.results()
    assert all(step >= 40 and written >= 3 for step, written in outcomes)
    assert sizes(job) == [2, 1, 2]
