from __future__ import annotations

import copy
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.utils.data.distributed import DistributedSampler

from nbelastic.errors import OptionError
from nbelastic.torch.elastic import ElasticSampler
from nbelastic.torch.state.torch_state import TorchState
from tests.support.world import StaticContext, run_ranks
from tests.torch.nets import (
    Net,
    adam,
    model_bits,
    train,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def test_F1_sync_change_restore_change_commit_restore() -> None:
    def main(context: StaticContext) -> object:
        net = nn.Linear(2, 1)
        nn.init.constant_(net.weight, float(context.rank + 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1 * (context.rank + 1))
        state = TorchState(model=net, optimizer=optimizer, batch=20 + context.rank, epoch=10)
        seen = []

        def look() -> None:
            lr = optimizer.param_groups[0]["lr"]
            seen.append((net.weight.tolist(), lr, state.batch, state.epoch))

        def modify() -> None:
            nn.init.constant_(net.weight, 5.0)
            optimizer.param_groups[0]["lr"] = 7.0
            state.batch, state.epoch = 21, 11

        state.sync()
        look()
        modify()
        state.restore()
        look()
        modify()
        state.commit()
        look()
        state.restore()
        look()
        return seen

    synced = ([[1.0, 1.0]], 0.1, 20, 10)
    modified = ([[5.0, 5.0]], 7.0, 21, 11)
    assert run_ranks(3, main) == [[synced, synced, modified, modified]] * 3


class Rows(torch.utils.data.Dataset):
    """A dataset too large to be copied or sent."""

    def __len__(self) -> int:
        return 8

    def __reduce_ex__(self, protocol: object) -> str:
        raise TypeError("it was copied")


def test_torchs_own_sampler_has_its_epoch_set_and_keeps_its_rows() -> None:
    """Horovod's example for CIFAR-10 has two of them in its state."""

    def main(context: StaticContext) -> object:
        sampler = DistributedSampler(Rows(), num_replicas=2, rank=context.rank)
        sampler.set_epoch(3 + context.rank)
        state = TorchState(train_sampler=sampler)
        state.sync()
        assert state.train_sampler is sampler
        seen = [sampler.epoch]
        for epoch in (4, 5):
            sampler.set_epoch(epoch)
            if epoch == 4:
                state.commit()
        state.restore()
        return [*seen, sampler.epoch, sampler.rank]

    assert run_ranks(2, main) == [[3, 4, 0], [3, 4, 1]]


def test_F2_sampler_over_two_epochs_commit_restore_sync_next_epoch() -> None:
    batch_size, batches, size = 2, 8, 2
    samples = batches * batch_size

    def main(context: StaticContext) -> None:
        dataset = list(range(samples * size))
        sampler = ElasticSampler(dataset, shuffle=False)
        loader = torch.utils.data.DataLoader(dataset, batch_size, sampler=sampler)
        state = TorchState(sampler=sampler)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for index, batch in enumerate(loader):
                assert sampler.get_indices(index, batch_size) == batch.tolist()
                sampler.record_batch(index, batch_size)
                assert sampler.processed_num == (index + 1) * batch_size * size
            assert index + 1 == batches
        assert len(list(loader)) == batches  # without a new epoch the same again

        sampler.set_epoch(2)
        assert sampler.processed_indices == set()
        sampler.record_batch(0, batch_size)
        sampler.record_batch(1, batch_size)
        state.commit()
        sampler.record_batch(2, batch_size)
        assert sampler.processed_num == 3 * batch_size * size
        state.restore()
        assert sampler.processed_num == 2 * batch_size * size

        state.sync()
        assert sampler.processed_indices == set(range(2 * batch_size * size))
        assert len(sampler.remaining_indices) == size * (samples - 2 * batch_size)
        assert len(loader) == batches - 2
        assert len(list(loader)) == batches - 2

        sampler.set_epoch(3)
        assert sampler.processed_indices == set()
        assert len(sampler.remaining_indices) == samples * size
        assert len(loader) == batches

    run_ranks(size, main)


def test_optimizer_state_that_was_not_there_is_removed_and_the_snapshot_is_never_trained() -> None:
    net = Net()
    optimizer = adam(net)
    state = TorchState(net, optimizer)
    before = model_bits(net)
    for _ in range(3):
        train(net, optimizer, 2)
        assert optimizer.state
        state.restore()
        assert not optimizer.state
        assert model_bits(net) == before


def test_restore_works_in_place() -> None:
    net = Net()
    optimizer = adam(net)
    train(net, optimizer)
    state = TorchState(net, optimizer)
    moments = [each["exp_avg"] for each in optimizer.state.values()]
    groups = [id(group) for group in optimizer.param_groups]
    addresses = [p.data_ptr() for p in net.parameters()]
    copies = [each.data_ptr() for each in state._copies.values]
    train(net, optimizer)
    state.restore()
    train(net, optimizer)
    state.save()
    assert all(a is b["exp_avg"] for a, b in zip(moments, optimizer.state.values(), strict=True))
    assert [p.data_ptr() for p in net.parameters()] == addresses
    assert [id(group) for group in optimizer.param_groups] == groups
    assert [each.data_ptr() for each in state._copies.values] == copies


def test_tensors_that_came_to_share_memory_are_told_apart_again() -> None:
    net = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    state = TorchState(net)
    before = model_bits(net)
    net[0].weight.data = net[1].weight.data
    state.restore()
    assert model_bits(net) == before
    net[0].weight.data.zero_()
    state.restore()
    assert model_bits(net) == before


def test_copies_go_to_the_host_once_a_device_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(2, 2)
    before = model_bits(net)

    def full(tensor: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", full)
        state = TorchState(net)
    for _ in range(2):
        state.save()
        net.weight.data.zero_()
        state.restore()
        assert model_bits(net) == before


def test_N7_a_step_of_a_scaler_that_was_under_way_is_forgotten() -> None:
    net = nn.Linear(4, 1)
    optimizer = adam(net)
    scaler = torch.amp.GradScaler("cpu")
    state = TorchState(net, optimizer, scaler=scaler)
    for _ in range(2):
        scaler.scale(net(torch.randn(3, 4)).sum()).backward()
        scaler.unscale_(optimizer)
        state.restore()
    off = torch.amp.GradScaler("cpu", enabled=False)
    TorchState(scaler=off).restore()


def test_values_that_share_objects_share_them_after_a_restore() -> None:
    class Warmup:
        """Keeps the optimizer in its state dict, as some do."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.after = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            self.steps = 0

        def state_dict(self) -> dict:
            return {"after": self.after, "steps": self.steps}

        def load_state_dict(self, state: dict) -> None:
            self.__dict__.update(state)

    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    shared = [1]
    loop: list = []
    loop.append(loop)
    warmup = Warmup(optimizer)
    state = TorchState(
        net,
        optimizer,
        warmup=warmup,
        first=SimpleNamespace(a=shared),
        a=shared,
        b={"a": shared},
        last=SimpleNamespace(a=shared),
        nets=(net, [net]),
        loop=loop,
    )
    warmup.steps = 5
    state.a.append(2)
    state.restore()
    assert state.a == [1]
    assert state.a is state.b["a"] is state.first.a is state.last.a
    assert state.nets[0] is state.nets[1][0] is state.model is net
    assert state.loop[0] is state.loop
    assert warmup.after.optimizer is optimizer
    assert warmup.steps == 0


def test_an_object_that_copies_from_its_state_dict_gets_the_committed_values() -> None:
    class Meter:
        def __init__(self) -> None:
            self.total = torch.zeros(2)

        def state_dict(self) -> dict:
            return {"total": self.total}

        def load_state_dict(self, state: dict) -> None:
            self.total = state["total"].clone()

    meter = Meter()
    state = TorchState(meter=meter)
    meter.total += 1
    state.restore()
    assert meter.total.tolist() == [0, 0]


def test_long_lists_of_numbers_cost_little() -> None:
    def best_of(function: Callable[[], object]) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        return min(times)

    state = TorchState(losses=[0.5] * 100_000)
    assert best_of(state.save) < best_of(lambda: copy.deepcopy(state.losses))
    state.losses.append(1.0)
    state.restore()
    assert len(state.losses) == 100_000


def test_gradients_and_flags_of_a_model_without_an_optimizer() -> None:
    net = nn.Linear(2, 1)
    state = TorchState(net)
    net(torch.ones(2)).sum().backward()
    net.bias.requires_grad_(False)
    state.restore()
    assert net.weight.grad is None
    assert net.bias.requires_grad


def test_a_value_with_a_graph_is_kept_without_it() -> None:
    net = nn.Linear(2, 1)
    state = TorchState(net, losses=[net(torch.ones(2)).sum()])
    kept = state.losses[0].item()
    state.losses[0] = None
    state.restore()
    assert state.losses[0].item() == kept


def test_models_and_optimizers_may_be_lists_tuples_and_dicts() -> None:
    nets = {"g": nn.Linear(2, 2), "d": nn.Linear(2, 2)}
    optimizers = (adam(nets["g"]), adam(nets["d"]))
    state = TorchState(nets, optimizers)
    before = [model_bits(net) for net in nets.values()]
    for net, optimizer in zip(nets.values(), optimizers, strict=True):
        net(torch.ones(2)).sum().backward()
        optimizer.step()
    state.restore()
    assert [model_bits(net) for net in nets.values()] == before
    assert state.model["g"] is nets["g"]
    assert state.optimizer[1] is optimizers[1]


def test_attributes_may_be_assigned_models_too() -> None:
    state = TorchState(nn.Linear(1, 1), scheduler=None)
    first = state.model
    state.model = nn.Linear(2, 2)
    second, bias = state.model, state.model.bias.clone()
    state.restore()
    assert state.model is first
    state.model = second
    state.save()
    with torch.no_grad():
        state.model.bias.add_(1)
    state.restore()
    assert state.model is second
    assert torch.equal(second.bias, bias)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_modules_become_part_once_they_have_parameters() -> None:
    net = nn.Sequential(nn.LazyLinear(2))
    state = TorchState(net)
    net(torch.ones(1, 3))
    state.restore()
    state.save()
    before = model_bits(net)
    with torch.no_grad():
        net[0].weight.add_(1)
    state.restore()
    assert model_bits(net) == before


@pytest.mark.parametrize("name", ["save", "_names", "restore"])
def test_names_that_a_state_needs_itself_are_refused(name: str) -> None:
    with pytest.raises(OptionError, match=name):
        TorchState(**{name: 1})
