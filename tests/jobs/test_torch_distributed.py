"""torch.distributed in jobs on real workers: DDP through a kill and a join, groups, FSDP2."""

from collections import Counter

from tests.support.clusters import sizes, until

ROWS = 96


def test_ddp_as_everyone_writes_it_goes_on_through_a_kill_and_a_join(crew, tmp_path):
    def train(flag):
        import hashlib
        import os
        import signal
        import time
        from pathlib import Path

        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        import nbelastic.torch as hvd

        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        torch.manual_seed(dist.get_rank())
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)
        )
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
        sampler = hvd.elastic.ElasticSampler(range(ROWS))
        state = hvd.elastic.TorchState(ddp, optimizer, sampler=sampler, epoch=0, seen=[], was=[])

        @hvd.elastic.run
        def loop(state):
            while state.epoch < 3 or dist.get_world_size() < 2:
                indices = list(sampler)
                for number in range(0, len(indices), 4):
                    rows = indices[number : number + 4]
                    inputs = torch.tensor(rows).float().view(-1, 1).expand(-1, 4) / ROWS
                    optimizer.zero_grad()
                    ddp(inputs).pow(2).mean().backward()
                    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
                    optimizer.step()
                    last = dist.get_rank() == dist.get_world_size() - 1
                    if state.epoch == 1 and number == 16 and last and not Path(flag).exists():
                        Path(flag).touch()
                        os.kill(os.getpid(), signal.SIGKILL)
                    everyone = [None] * dist.get_world_size()
                    dist.all_gather_object(everyone, rows)
                    state.seen = [
                        *state.seen,
                        (state.epoch, [row for rows in everyone for row in rows]),
                    ]
                    state.was = [*state.was, len(everyone)]
                    sampler.record_batch(number // 4, 4)
                    time.sleep(0.01)
                    state.commit()
                state.epoch += 1
                sampler.set_epoch(state.epoch)
            parameters = b"".join(each.detach().numpy().tobytes() for each in ddp.parameters())
            return hashlib.sha1(parameters).hexdigest(), state.seen, state.was

        return loop(state)

    job = crew.fit(train, args=(str(tmp_path / "killed"),), np=2, min_np=1, max_np=2)
    outcomes = job.results()
    assert len(outcomes) == 2
    assert outcomes[0] == outcomes[1]
    _, seen, was = outcomes[0]
    assert sizes(job) == [2, 1, 2]
    assert set(was) == {1, 2}
    for epoch in range(3):
        counts = Counter(row for number, rows in seen if number == epoch for row in rows)
        assert set(counts) == set(range(ROWS))
        assert sum(counts.values()) <= ROWS + 2  # shares are padded by one at most, at each deal


def test_variables_of_torchrun_are_there_before_the_function_and_follow_resets(crew):
    def train():
        import os
        import time

        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        first = [int(os.environ[name]) for name in names]
        horovods = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        assert first == [int(os.environ[f"HOROVOD_{name}"]) for name in horovods]
        assert int(os.environ["MASTER_PORT"])

        import nbelastic.torch as hvd

        state = hvd.elastic.ObjectState(
            hvd.broadcast_object, lambda: (hvd.rank(), hvd.size()), steps=0, alone=0
        )
        seen = set()

        @hvd.elastic.run
        def loop(state):
            while state.alone < 3:
                places = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()
                assert [int(os.environ[name]) for name in names] == list(places)
                seen.add(places)
                state.alone += hvd.size() == 1
                time.sleep(0.01)
                state.commit()

        loop(state)
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
        import torch
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        import nbelastic.torch as hvd

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
