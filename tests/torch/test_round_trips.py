"""One law for all that a state may keep: it goes back, to a newcomer, and to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data.distributed import DistributedSampler

from nbelastic.data import Batch, Loader
from nbelastic.elastic.state import transfer
from nbelastic.torch.state.lazy_commit import LEARNED
from nbelastic.torch.state.torch_state import TorchState
from tests.elastic.members import job, resumed
from tests.elastic.test_load_checkpoint import odd_tensors
from tests.support.world import run_ranks
from tests.torch import wrappers
from tests.torch.nets import Extra, bits
from tests.torch.test_state_mismatch import (
    Net,
    setting,
    state_of,
    train_step,
    usual,
    with_counter,
    with_groups,
    without_bias,
)
from tests.torch.test_torch_state import sgd
from tests.torch.training import filled


def values_of(state):
    return bits(state._values())


class Trip(NamedTuple):
    """A state as a rank builds it, and what training then changes.

    Another rank may build it otherwise, as `mine`. After the trip training may `go_on`.
    """

    build: Callable[[int], TorchState]
    change: Callable[[TorchState], object]
    mine: Callable[[int], TorchState] | None = None
    view: Callable[[TorchState], object] = values_of
    go_on: Callable[[TorchState], object] = train_step


# -- what training changes in a model and its optimizer --------------------------------------------


def widen(state):
    """Replace a parameter's values by more, as when a vocabulary grows."""
    body = state.model.body
    body.weight.data = torch.cat([body.weight.data, torch.ones(8, 1)], dim=1)
    state.optimizer.state.clear()


def make_a_bias(state):
    state.model.head.bias = nn.Parameter(torch.full((1,), 7.0))
    state.optimizer.add_param_group({"params": [state.model.head.bias], "lr": 0.3})


def exchange_parameters(state):
    first, second = state.optimizer.param_groups
    moved = [*first["params"], second["params"][1]]
    first["params"], second["params"] = second["params"][:1], moved


def split_group(state):
    (group,) = state.optimizer.param_groups
    taken, group["params"] = group["params"][:2], group["params"][2:]
    state.optimizer.param_groups.insert(0, {**group, "params": taken, "lr": 0.3})


def drop_group(state):
    group = state.optimizer.param_groups.pop(0)
    for parameter in group["params"]:
        state.optimizer.state.pop(parameter, None)


CHANGES = {
    "parameters in other groups": (with_groups, exchange_parameters),
    "a group that is two": (usual, split_group),
    "a group less": (with_groups, drop_group),
    "a larger buffer": (usual, lambda s: setattr(s.model, "mask", torch.ones(7, 7))),
    "a buffer more": (usual, lambda s: s.model.register_buffer("queue", torch.arange(3.0))),
    "a wider parameter": (usual, widen),
    "a frozen layer": (usual, lambda s: s.model.body.requires_grad_(False)),
    "a bias where there was none": (without_bias, make_a_bias),
    "a mode": (usual, setting("layers.0", "training", False)),
    "a number that is none": (usual, setting("layers.0", "momentum", None)),
    "a number": (usual, setting("layers.0", "eps", 0.25)),
    "a flag": (usual, setting("layers.1", "inplace", True)),
    "a tuple": (usual, setting("block", "window", (3, 4))),
    "an attribute of the class": (usual, setting("block", "calls", 1)),
    "an attribute more": (usual, setting("block", "warm", True)),
    "extra state": (with_counter, setting("counting", "calls", 5)),
}
TRIPS = {n: Trip(lambda _, build=build: build(), change) for n, (build, change) in CHANGES.items()}


# -- what a state may hold -------------------------------------------------------------------------


def prompted(rank):
    """A parameter in no model, which its optimizer and values refer to."""
    prompt = torch.full((2,), float(rank), requires_grad=True)
    return TorchState(None, torch.optim.Adam([prompt]), prompt=prompt, prompts=[prompt])


def sparse(rank):
    net = nn.Module()
    net.register_buffer("graph", torch.eye(3).to_sparse() * (rank + 1))
    return TorchState(net, value=net.graph)


class Rows(torch.utils.data.Dataset):
    """A dataset too large to be copied or sent."""

    def __len__(self):
        return 8

    def __reduce_ex__(self, protocol):
        raise TypeError("it was copied")


class Quantised(nn.Linear):
    """A module that keeps a number by its state dict alone."""

    scale = (1.0,)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = torch.tensor([*self.scale])

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.scale = state_dict.pop(prefix + "scale").tolist()
        super()._load_from_state_dict(state_dict, prefix, *args)


class Whole(nn.Sequential):
    steps = (0,)

    def state_dict(self, *args, **kwargs):
        return {"inner": super().state_dict(*args, **kwargs), "steps": [*self.steps]}

    def load_state_dict(self, state_dict, *args, **kwargs):
        self.steps = state_dict["steps"]
        return super().load_state_dict(state_dict["inner"], *args, **kwargs)


def referring(rank):
    """Values that refer to the model refer to the receiver's own."""
    net, number = nn.Linear(2, 1), rank + 7
    holder = SimpleNamespace(net=net, number=number)
    return TorchState(net, holder=holder, function=lambda x: x + number)


TRIPS |= {
    "a parameter in no model": Trip(prompted, lambda s: s.prompt.data.fill_(3.0)),
    "tensors of all types": Trip(
        lambda _: TorchState(odd=odd_tensors()),
        lambda s: s.odd.update(nan=torch.tensor([float("nan"), -0.0])),
    ),
    "sparse tensors": Trip(sparse, lambda s: setattr(s.model, "graph", 2 * s.value)),
    "a value with a graph": Trip(
        lambda rank: TorchState(net := nn.Linear(2, 1), losses=[net(torch.ones(2)).sum()]),
        lambda s: s.losses.append(2 * s.losses[0]),
        view=lambda s: bits([each.detach() for each in s.losses]),
    ),
    "a value with a parameter's memory": Trip(
        lambda rank: TorchState(net := nn.Linear(2, 1), best=net.weight.data),
        lambda s: setattr(s, "best", torch.full((1, 2), 9.0)),
    ),
    "values that refer to a model": Trip(
        referring,
        lambda s: setattr(s.holder, "number", 9),
        view=lambda s: [s.holder.net is s.model, s.holder.number, s.function(1)],
    ),
    "the epoch of torch's sampler": Trip(
        lambda rank: TorchState(sampler=DistributedSampler(Rows(), num_replicas=2, rank=rank)),
        lambda s: s.sampler.set_epoch(5),
        view=lambda s: s.sampler.epoch,
    ),
    "a loader": Trip(
        lambda rank: TorchState(loader=Loader(range(40), Batch(8, micro=2), seed=rank)),
        lambda s: (s.loader.set_epoch(2), setattr(s.loader, "step", 3)),
        view=lambda s: [s.loader.state_dict(), s.loader._dealing.rows(s.loader.step, 0).tolist()],
    ),
    "modules that override their state dict": Trip(
        lambda _: TorchState(nn.Sequential(Whole(nn.Linear(2, 2)), Quantised(2, 1))),
        lambda s: (setattr(s.model[0], "steps", [3]), setattr(s.model[1], "scale", [0.25])),
        view=lambda s: bits([*s.model.parameters(), [*s.model[0].steps], [*s.model[1].scale]]),
    ),
}


# -- optimizers that wrap others or keep state of their own ----------------------------------------


KINDS = {
    "sam": lambda net: wrappers.Sam(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9),
    "lookahead in a state dict": lambda net: wrappers.NestedLookahead(sgd(net)),
    "schedule-free": lambda net: wrappers.ScheduleFree(sgd(net)),
    "counting": lambda net: wrappers.Counting(net.parameters(), lr=0.1, momentum=0.9),
    "no optimizer": lambda net: wrappers.Plain(sgd(net)),
}


def wrapped(rank, kind):
    net = filled(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), rank)
    return TorchState(net, KINDS[kind](net), batch=0)


def loss_of(state):
    generator = torch.Generator().manual_seed(state.batch)
    loss = state.model(torch.randn(5, 3, generator=generator)).square().mean()
    loss.backward()
    return loss


def step(state, times=1):
    for _ in range(times):
        getattr(state.optimizer, "train", lambda: None)()
        state.optimizer.zero_grad()
        loss_of(state)
        sam = isinstance(state.optimizer, wrappers.Sam)
        state.optimizer.step(*[lambda: loss_of(state)] * sam)
        state.batch += 1
    return state


def averages_of(state):
    getattr(state.optimizer, "eval", lambda: None)()
    return bits([*state.model.parameters()])


for kind in KINDS:
    build = lambda rank, kind=kind: wrapped(rank, kind)  # noqa: E731
    for steps in (0, 4):
        change = lambda state, steps=steps: step(state, steps)  # noqa: E731
        TRIPS[f"{kind} after {steps} steps"] = Trip(
            build, change, view=averages_of, go_on=lambda state: step(state, 5)
        )


# -- models that are compiled on one side ----------------------------------------------------------


def whole_compiled(rank):
    net = Net()
    net.counting = Extra()
    compiled = torch.compile(net)
    return state_of(compiled, torch.optim.Adam(compiled.parameters(), lr=0.1))


def part_compiled(rank, whole=False):
    net = Net()
    net.counting = Extra()
    net.head = torch.compile(net.head)
    return state_of(torch.compile(net) if whole else net)


def everywhere(state):
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.add_(1)
    state.model.eval()
    changes = {"Extra": ("calls", 5), "Block": ("temperature", 0.5)}
    for module in state.model.modules():
        if type(module).__name__ in changes:
            setattr(module, *changes[type(module).__name__])


TRIPS |= {
    "compiled to plain": Trip(whole_compiled, everywhere, lambda _: with_counter()),
    "plain to a part compiled": Trip(lambda _: with_counter(), everywhere, part_compiled),
    "compiled twice to compiled": Trip(
        lambda rank: part_compiled(rank, whole=True), everywhere, whole_compiled
    ),
}


# -- the law ---------------------------------------------------------------------------------------

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
each_trip = pytest.mark.parametrize("trip", TRIPS.values(), ids=TRIPS.keys())


@pytest.fixture(autouse=True)
def _many_chunks(monkeypatch):
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 64)


@each_trip
def test_a_state_goes_back(trip):
    state = trip.build(0)
    trip.go_on(state)
    for commits in (1, 0, 3):
        for _ in range(commits):
            state.save()
        before = trip.view(state)
        trip.change(state)
        state.restore()
        assert trip.view(state) == before
    trip.change(state)
    state.save()
    seen = []
    for _ in range(2):
        before = trip.view(state)
        trip.go_on(state)
        seen.append((before, trip.view(state)))
        state.restore()
    assert seen[0] == seen[1]


@each_trip
@pytest.mark.parametrize("way", ["newcomer", "checkpoint"])
def test_a_state_arrives_and_goes_on(trip, way, tmp_path):
    sent = []

    def grow(state):
        trip.change(state)
        sent.append(trip.view(state))

    def after(state):
        assert trip.view(state) == sent[0]
        trip.go_on(state)
        return trip.view(state)

    def join(context):
        build = trip.mine if context.rank and trip.mine else trip.build
        state = build(context.rank)
        if context.rank == 0:
            grow(state)
        state.align([1])
        return after(state)

    if way == "newcomer":
        first, second = run_ranks(2, join)
        assert first == second
    else:
        job(tmp_path, lambda: trip.build(0), grow)
        state, *_ = resumed(tmp_path, lambda: (trip.mine or trip.build)(1))
        after(state)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrapped_optimizer_goes_back_to_a_commit_without_copies(kind):
    state = wrapped(0, kind)
    for _ in range(LEARNED + 2):
        step(state).commit()
    loss_of(state)
    averages_of(state)
    state.restore()
    assert averages_of(step(state, 5)) == averages_of(step(wrapped(0, kind), LEARNED + 7))


def test_hooks_on_an_optimizers_state_dict_are_seen_after_commits():
    optimizer = sgd(nn.Linear(1, 1))
    state, kept = TorchState(None, optimizer), [1]
    optimizer.register_state_dict_post_hook(lambda _, found: {**found, "kept": kept[0]})
    optimizer.register_load_state_dict_pre_hook(lambda _, given: kept.append(given["kept"]))
    state.save()
    kept[:] = [2]
    state.restore()
    assert kept[-1] == 1
