from __future__ import annotations

import copy
import random
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nbelastic.elastic import transfer
from nbelastic.elastic.sampler import ShardSampler
from nbelastic.errors import CollectiveError, NbelasticError, OptionError
from nbelastic.torch.state import TorchState
from tests.support.world import StaticContext, run_ranks


class Net(nn.Module):
    """Tied and frozen parameters, buffers of all kinds, a module that keeps extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("stretched", torch.zeros(1).expand(3))
        self.extra = Extra()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        self.extra.calls += 1
        return self.tied(self.drop(self.norm(self.first(x))))


class Extra(nn.Module):
    calls = 0

    def get_extra_state(self) -> dict:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict) -> None:
        self.calls = state["calls"]


def bits(value: object) -> object:
    """Return a copy of `value` that compares equal only to what is equal bit for bit."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().clone(memory_format=torch.contiguous_format).view(-1)
        return ("tensor", tuple(value.shape), value.dtype, raw.view(torch.uint8).numpy().tobytes())
    if isinstance(value, np.ndarray):
        return ("array", value.shape, value.tobytes())
    if isinstance(value, dict):
        return {key: bits(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(bits(each) for each in value)
    return copy.deepcopy(value)


def model_bits(model: nn.Module) -> object:
    return {
        name: (bits(tensor), tensor.requires_grad)
        for name, tensor in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
    }


def optimizer_bits(optimizer: torch.optim.Optimizer) -> object:
    found = optimizer.state_dict()
    return bits({"state": found["state"], "groups": found["param_groups"]})


def generator_bits() -> object:
    return bits([random.getstate(), np.random.get_state(), torch.get_rng_state()])


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1, seed: int = 0) -> None:
    """Train a little; ranks that are threads share PyTorch's generator, so with one of its own."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(5, 4, generator=generator)).square().sum().backward()
        optimizer.step()


def new_net(seed: int) -> Net:
    torch.manual_seed(seed)
    net = Net()
    net.drop.p = 0.0
    return net


def adam(net: nn.Module, **options: object) -> torch.optim.Optimizer:
    options = {"lr": 0.1, "weight_decay": 0.1, **options}
    return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], **options)


# -- F1, F2 --------------------------------------------------------------------------------------


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


def test_F2_sampler_over_two_epochs_commit_restore_sync_next_epoch() -> None:
    batch_size, batches, size = 2, 8, 2
    samples = batches * batch_size

    def main(context: StaticContext) -> None:
        dataset = list(range(samples * size))
        sampler = ShardSampler(dataset, shuffle=False)
        loader = torch.utils.data.DataLoader(dataset, batch_size, sampler=sampler)
        state = TorchState(sampler=sampler)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for index, batch in enumerate(loader):
                assert sampler.get_indices(index, batch_size) == batch.tolist()
                sampler.record_batch(index, batch_size)
                assert sampler.processed_num == (index + 1) * batch_size
            assert index + 1 == batches
        assert len(list(loader)) == batches  # without a new epoch the same again

        sampler.set_epoch(2)
        assert sampler.processed_indices == set()
        sampler.record_batch(0, batch_size)
        sampler.record_batch(1, batch_size)
        state.commit()
        sampler.record_batch(2, batch_size)
        assert sampler.processed_num == 3 * batch_size
        state.restore()
        assert sampler.processed_num == 2 * batch_size

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


# -- restore is exact ----------------------------------------------------------------------------


class Training:
    """All that a state may hold, what can happen to it, and an independent view of its bits."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.net = Net()
        if kind == "adam":
            self.optimizer: torch.optim.Optimizer = adam(self.net, amsgrad=True)
        elif kind == "tensor lr":
            self.optimizer = adam(self.net, lr=torch.tensor(0.1), capturable=False, foreach=False)
        elif kind == "lbfgs":
            self.optimizer = torch.optim.LBFGS(
                [p for p in self.net.parameters() if p.requires_grad], lr=0.01, history_size=2
            )
        else:
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.warm = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        self.state = TorchState(
            self.net,
            self.optimizer,
            schedulers=[self.scheduler, {"warm": self.warm}],
            scaler=self.scaler,
            epoch=0,
            history=[{"loss": [1.0]}],
            table=OrderedDict(a=torch.zeros(2), b=(1, "x")),
            generator=torch.Generator().manual_seed(1),
        )
        self.added = 0

    def bits(self) -> object:
        state = self.state
        return (
            model_bits(self.net),
            self.net.extra.calls,
            optimizer_bits(self.optimizer),
            bits({k: v for k, v in self.scheduler.state_dict().items() if k[0] != "_"}),
            bits({k: v for k, v in self.warm.state_dict().items() if k[0] != "_"}),
            self.scaler.state_dict(),
            bits([state.epoch, state.history, state.table, state.generator.get_state()]),
            generator_bits(),
        )

    def happen(self, what: str, how: int) -> None:
        getattr(self, what)(how)

    def step(self, how: int) -> None:
        def loss() -> torch.Tensor:
            self.optimizer.zero_grad()
            return self.net(torch.randn(4, 4)).square().sum()

        def closure() -> torch.Tensor:
            found = loss()
            found.backward()
            return found

        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(closure)
        else:
            self.scaler.scale(loss()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if how % 2 and not self.added:
            self.scheduler.step()
            self.warm.step()

    def values(self, how: int) -> None:
        state = self.state
        state.epoch += how
        state.history.append({"loss": [how]})
        state.history[0]["loss"].append(how)
        state.table["a"].add_(1)
        state.table["c"] = torch.ones(how)
        state.table.move_to_end("a")

    def draw(self, how: int) -> None:
        for _ in range(how):
            random.random()
            np.random.rand()
            torch.rand(1)
            torch.rand(1, generator=self.state.generator)

    def buffers(self, how: int) -> None:
        net = self.net
        if how == 0:
            net.seen = torch.full((1 + self.added,), 7.0)
        elif how == 1:
            net.seen.resize_(4).fill_(1.5)
        elif how == 2:
            net.nothing = torch.ones(2)
        elif how == 3:
            net.nothing = None
        elif how == 4:
            net.register_buffer("late", torch.ones(3, dtype=torch.bfloat16))
        else:
            net.stretched = torch.full((1,), float(how)).expand(3)

    def parameters(self, how: int) -> None:
        net = self.net
        with torch.no_grad():
            if how == 0:
                net.frozen.add_(1)
            elif how == 1:
                moved = net.first.weight.data.clone()
                lbfgs = isinstance(self.optimizer, torch.optim.LBFGS)  # cannot do with strides
                net.first.weight.data = moved if lbfgs else moved.t()
            elif how == 2:
                net.frozen.data = net.first.bias.data  # now both look at the same memory
            elif how == 3:
                net.frozen.requires_grad_(not net.frozen.requires_grad)
            elif how == 4:
                net.first.bias = nn.Parameter(torch.zeros(4))
            else:
                net.register_parameter("late_weight", nn.Parameter(torch.ones(2)))

    def group(self, how: int) -> None:
        if how < 2 and not isinstance(self.optimizer, torch.optim.LBFGS):
            self.added += 1
            extra = nn.Parameter(torch.full((2,), float(self.added)))
            self.optimizer.add_param_group({"params": [extra], "lr": 0.5})
        else:
            self.optimizer.param_groups[0]["lr"] *= 0.5
            self.optimizer.param_groups[0]["note"] = [how]

    def forget(self, how: int) -> None:
        """As a new optimizer would: no state, so that it comes into being again."""
        self.optimizer.state.clear()


HAPPENINGS = ["step", "values", "draw", "buffers", "parameters", "group", "forget"]


@settings(deadline=None, max_examples=80)
@given(
    kind=st.sampled_from(["adam", "sgd", "tensor lr", "lbfgs"]),
    events=st.lists(
        st.one_of(
            st.tuples(st.sampled_from(HAPPENINGS), st.integers(0, 5)),
            st.tuples(st.sampled_from(["commit", "restore"]), st.just(0)),
        ),
        max_size=14,
    ),
)
def test_N7_restore_is_exact_whatever_happened_since(kind: str, events: list) -> None:
    training = Training(kind)
    committed = training.bits()
    identities = [id(p) for p in training.net.parameters()]
    for what, how in [*events, ("restore", 0)]:
        if what == "commit":
            training.state.save()
            committed = training.bits()
            identities = [id(p) for p in training.net.parameters()]
        elif what == "restore":
            training.state.restore()
            assert training.bits() == committed
            assert [id(p) for p in training.net.parameters()] == identities
            assert all(p.grad is None for p in training.net.parameters())
        else:
            training.happen(what, how)


def test_N7_after_a_restore_training_repeats_itself_bit_for_bit() -> None:
    training = Training("adam")
    training.step(1)
    training.state.save()
    for _ in range(3):
        training.step(1)
    first = training.bits()
    for _ in range(3):
        training.state.restore()
        for _ in range(3):
            training.step(1)
        assert training.bits() == first


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
        net, optimizer, warmup=warmup, a=shared, b={"a": shared}, nets=(net, [net]), loop=loop
    )
    warmup.steps = 5
    state.a.append(2)
    state.restore()
    assert state.a == [1]
    assert state.a is state.b["a"]
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


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_newcomer_with_lazy_modules_gets_their_parameters() -> None:
    def main(context: StaticContext) -> object:
        net = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
        state = TorchState(net)
        parameters = list(net.parameters())
        if context.rank == 0:
            net(torch.ones(3, 3))
        state.sync()
        assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
        net.eval()
        return bits(net(torch.ones(1, 3)))

    first, second = run_ranks(2, main)
    assert first == second


# -- between ranks -------------------------------------------------------------------------------


def everything(state: TorchState) -> object:
    optimizer = state.optimizer
    return (
        model_bits(state.model),
        None if optimizer is None else optimizer_bits(optimizer),
        bits({k: v for k, v in state._values().items() if k not in ("model", "optimizer")}),
    )


@pytest.mark.parametrize("behind", [[2], [0, 3], [3, 1, 0]])
def test_N5_newcomers_are_equal_bit_for_bit_without_a_dummy_step(behind: list) -> None:
    source = 2 if 2 not in behind else 0
    nets = [new_net(100 + rank if rank in behind else 0) for rank in range(4)]

    def main(context: StaticContext) -> object:
        net = nets[context.rank]
        optimizer = adam(net)
        state = TorchState(net, optimizer, epoch=0, losses=[], tensor=torch.zeros(0))
        if context.rank not in behind:
            train(net, optimizer, 3, seed=1)
            state.epoch, state.losses, state.tensor = 3, [0.5], torch.arange(3)
            optimizer.param_groups[0]["lr"] = 0.7  # as a reset callback does: live, not saved
        weight = net.first.weight
        state.align(behind)
        assert net.first.weight is weight
        assert net.tied.weight is weight
        found = everything(state)
        train(net, optimizer, 2, seed=2)
        return found, everything(state), context.communicator().completed

    results = run_ranks(4, main, source=source)
    assert results[0][0][2] == bits({"epoch": 3, "losses": [0.5], "tensor": torch.arange(3)})
    assert results[0][0][1]["groups"][0]["lr"] == 0.7
    for rank, result in enumerate(results):
        assert result[:2] == results[0][:2]
        if rank not in behind and rank != source:
            assert result[2] == 0  # takes no part


def test_generators_stay_each_ranks_own() -> None:
    before = generator_bits()
    run_ranks(2, lambda context: TorchState(epoch=context.rank).sync())
    assert generator_bits() == before


def test_sync_sends_all_kinds_of_tensors_in_any_number_of_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 64)

    def main(context: StaticContext) -> object:
        generator = torch.Generator().manual_seed(context.rank)

        def rand(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        tensors = {
            "double": rand(3).double(),
            "half": rand(5).half(),
            "bfloat": rand(7).bfloat16(),
            "complex": torch.complex(rand(3), rand(3)),
            "bool": rand(9) > 0,
            "byte": (rand(33) * 100).to(torch.uint8),
            "scalar": rand(),
            "empty": rand(0, 3),
            "strided": rand(4, 6).t()[::2],
            "channels last": rand(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
            "nan": torch.tensor([float("nan"), -0.0]) * (context.rank + 1),
        }
        state = TorchState(tensors=tensors)
        state.sync()
        return bits(state.tensors)

    results = run_ranks(5, main, source=3)
    assert all(result == results[0] for result in results)
    assert len(results[0]) == 11


class Holder:
    def __init__(self, **values: object) -> None:
        self.__dict__.update(values)


def test_values_that_refer_to_the_model_refer_to_the_receivers_own() -> None:
    def main(context: StaticContext) -> None:
        net = nn.Linear(2, 1)
        number = context.rank + 7
        state = TorchState(
            net, holder=Holder(net=net, number=number), function=lambda x: x + number
        )
        state.sync()
        assert state.holder.net is net
        assert state.holder.number == 7
        assert state.function(1) == 8

    run_ranks(2, main)


def test_an_aliased_value_of_a_receiver_does_not_overwrite_its_model() -> None:
    def main(context: StaticContext) -> object:
        net = nn.Linear(2, 1)
        state = TorchState(net, best=net.weight.data)
        if context.rank == 0:
            state.best = torch.full((1, 2), 9.0)
        state.sync()
        assert torch.equal(state.best, torch.full((1, 2), 9.0))
        return bits(net.weight)

    results = run_ranks(2, main)
    assert results[0] == results[1]


def test_parameters_outside_a_model_belong_to_their_optimizer() -> None:
    def main(context: StaticContext) -> None:
        extra = torch.full((2,), float(context.rank), requires_grad=True)
        optimizer = torch.optim.Adam([extra])
        state = TorchState(optimizer=optimizer)
        if context.rank == 0:
            extra.sum().backward()
            optimizer.step()
        state.sync()
        assert optimizer.param_groups[0]["params"][0] is extra
        assert extra.requires_grad
        extra.data.fill_(3.0)
        state.restore()
        assert extra[0].item() != 3.0

    run_ranks(2, main)


def test_states_that_do_not_match_are_refused_by_name() -> None:
    def main(context: StaticContext) -> None:
        net = nn.Linear(1, 1) if context.rank == 0 else None
        TorchState(net).sync()

    with pytest.raises(NbelasticError, match="Linear"):
        run_ranks(2, main)


class Faulty:
    """A communicator that fails after a number of messages."""

    def __init__(self, communicator: object, good: int) -> None:
        self._communicator = communicator
        self._good = good

    def __getattr__(self, name: str) -> object:
        return getattr(self._communicator, name)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        if self._good == 0:
            raise CollectiveError("a peer is gone")
        self._good -= 1
        self._communicator.receive(tensor, source)


@pytest.mark.parametrize("good", [0, 1, 2, 5])
def test_a_failure_on_the_way_leaves_the_receiver_as_it_was(
    good: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 256)
    states: dict[int, TorchState] = {}
    for rank in range(2):
        net = new_net(rank)
        optimizer = adam(net)
        states[rank] = TorchState(net, optimizer, epoch=rank, sampler=ShardSampler(range(10)))
        if rank == 0:
            train(net, optimizer)
    before = {rank: everything(state)[:2] for rank, state in states.items()}

    def fail(context: StaticContext) -> None:
        context.communicator().barrier()
        if context.rank == 1:
            context._communicator = Faulty(context.communicator(), good)
        try:
            states[context.rank].align([1])
            context.communicator().barrier()
        except CollectiveError as error:
            context.communicator().abort(str(error))
        else:
            pytest.fail("a failure went unnoticed")

    run_ranks(2, fail)
    assert {rank: everything(state)[:2] for rank, state in states.items()} == before
    assert states[1].epoch == 1
    assert states[1].sampler.num_replicas == 1

    run_ranks(2, lambda context: states[context.rank].align([1]))
    assert everything(states[0])[:2] == everything(states[1])[:2] == before[0]
    assert states[1].epoch == 0


def test_N6_after_a_failure_everything_is_at_one_cut() -> None:
    nets = [new_net(rank) for rank in range(4)]

    def main(context: StaticContext) -> object:
        net = nets[context.rank]
        optimizer = adam(net)
        sampler = ShardSampler(range(100), seed=2)
        state = TorchState(net, optimizer, batch=0, sampler=sampler)
        state.align([1, 2, 3])
        state.save()

        def step() -> None:
            train(net, optimizer, seed=state.batch)
            sampler.record_batch(state.batch, 5)
            state.batch += 1

        step()
        state.save()
        step()
        if context.rank != 3:
            state.save()  # rank 3 did not come to it
        step()
        state.restore()
        assert state.batch == (1 if context.rank == 3 else 2)
        state.align([3])
        assert sampler.processed_num == 40
        return everything(state)[:2], state.batch, sorted(sampler.processed_indices)

    results = run_ranks(4, main)
    assert all(result == results[0] for result in results)
    assert results[0][1] == 2


def test_a_planned_leave_adds_up_what_all_have_done() -> None:
    def main(context: StaticContext) -> object:
        first, second = ShardSampler(range(30)), ShardSampler(range(9))
        state = TorchState(samplers=[first, second])
        first.record_batch(0, 2 + context.rank)
        second.record_batch(0, 1)
        state.leave()
        return first.processed_num, second.processed_num

    assert run_ranks(3, main) == [(9, 3)] * 3
