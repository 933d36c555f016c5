"""Plain attributes of modules: part of a commit, of what a newcomer gets, and of a checkpoint."""

from __future__ import annotations

import functools
import re
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from nbelastic.errors import StateMismatch
from nbelastic.torch.state.torch_state import TorchState
from tests.support.world import StaticContext, run_ranks
from tests.torch.test_state_mismatch import align, resume_from, save_to


class Block(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0
        self.rank = 0
        self.window: tuple[int, ...] = (1, 2)
        self.act = torch.relu
        self.score = _double
        self.cache = None


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU(), nn.Dropout(0.5))
        self.block = Block()


def state_of(net: nn.Module | None = None) -> TorchState:
    net = Net() if net is None else net
    return TorchState(net, torch.optim.SGD(net.parameters(), lr=0.1), epoch=0)


def _mode(net: Any) -> None:
    net.body[1].eval()


def _whole_mode(net: Any) -> None:
    net.eval()


def _momentum(net: Any) -> None:
    net.body[1].momentum = None


def _eps(net: Any) -> None:
    net.body[1].eps = 0.25


def _dropout(net: Any) -> None:
    net.body[3].p = 0.0


def _inplace(net: Any) -> None:
    net.body[2].inplace = True


def _annealed(net: Any) -> None:
    net.block.temperature *= 0.5


def _tuple(net: Any) -> None:
    net.block.window = (3, 4)


def _first_call(net: Any) -> None:
    net.block.calls += 1


def _new_name(net: Any) -> None:
    net.block.warm = True


CHANGES = [_mode, _whole_mode, _momentum, _eps, _dropout, _inplace, _annealed, _tuple]
CHANGES += [_first_call, _new_name]


def settings(net: nn.Module) -> dict[str, Any]:
    plain = (bool, int, float, str, tuple, type(None))
    return {
        f"{path}.{name}": value
        for path, module in net.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, plain)
    }


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", ["newcomer", "checkpoint"])
def test_settings_that_training_has_changed_are_taken_over(
    change: Any, way: str, tmp_path: Any
) -> None:
    def changed(state: TorchState) -> None:
        change(state.model)
        found.append(settings(state.model))

    def main(context: StaticContext) -> dict[str, Any]:
        state = state_of()
        if context.rank == 0:
            changed(state)
        state.align([1])
        return settings(state.model)

    found: list[dict[str, Any]] = []
    if way == "newcomer":
        took = run_ranks(2, main)[1]
    else:
        save_to(tmp_path, state_of, changed)
        took = settings(resume_from(tmp_path, state_of)[0].model)
    assert took == found[0]
    assert took != settings(Net())


class Ranked(Net):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.block.rank = rank


def test_settings_that_differ_by_rank_stay() -> None:
    def main(context: StaticContext) -> tuple[int, float]:
        state = state_of(Ranked(context.rank))
        if context.rank == 0:
            state.model.block.temperature = 0.5
        state.align([1])
        return state.model.block.rank, state.model.block.temperature

    assert run_ranks(2, main) == [(0, 0.5), (1, 0.5)]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("commits", [0, 1, 5])
def test_settings_are_rolled_back(change: Any, commits: int) -> None:
    state = state_of()
    for _ in range(commits):
        state.save()
    before = settings(state.model)
    change(state.model)
    state.restore()
    assert settings(state.model) == before


@pytest.mark.parametrize("change", CHANGES)
def test_a_commit_has_the_settings_of_its_time(change: Any) -> None:
    state = state_of()
    state.save()
    change(state.model)
    state.save()
    at_commit = settings(state.model)
    state.model.train()
    state.model.block.temperature = 7.0
    state.restore()
    assert settings(state.model) == at_commit


def test_what_is_no_setting_is_left_alone() -> None:
    state = state_of()
    state.model.block.cache = cache = torch.zeros(2)
    state.model.block.log = log = [1]
    state.restore()
    assert state.model.block.cache is cache
    assert state.model.block.log is log


def test_tensors_of_a_step_are_not_kept_by_commits() -> None:
    state = state_of()
    state.save()
    for _ in range(2):
        state.model.block.cache = hidden = torch.zeros(3)
        state.save()
    kept = weakref.ref(hidden)
    state.model.block.cache = None
    del hidden
    assert kept() is None


def _module(net: Any) -> None:
    net.body[2] = nn.GELU()


def _module_more(net: Any) -> None:
    net.body.append(nn.Tanh())


def _own_function(net: Any) -> None:
    net.block.score = _triple


def _lambda(net: Any) -> None:
    net.block.score = lambda x: x


def _of_torch(net: Any) -> None:
    net.block.act = nn.functional.gelu


def _partial(net: Any) -> None:
    net.block.act = functools.partial(torch.clamp, min=0)


def _forward(net: Any) -> None:
    net.block.forward = _triple


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_module, "class of model.body.2: expected ReLU, came GELU"),
        (_module_more, "class of model.body.4: expected nothing, came Tanh"),
        (_own_function, "function model.block.score: expected _double, came _triple"),
        (_lambda, "came _lambda.<locals>.<lambda> (line"),
        (_of_torch, "function model.block.act: expected _VariableFunctionsClass.relu, came gelu"),
        (_partial, "function model.block.act: expected _VariableFunctionsClass.relu, came"),
        (_forward, "function model.block.forward: expected nothing, came _triple"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(change: Any, message: str) -> None:
    def main(context: StaticContext) -> None:
        state = state_of()
        if context.rank == 0:
            change(state.model)
        align(context, state)

    with pytest.raises(StateMismatch, match=re.escape(message)) as caught:
        run_ranks(2, main)
    assert "switch functions by a flag" in str(caught.value)


def test_functions_that_ranks_have_built_differently_are_their_own_business() -> None:
    def main(context: StaticContext) -> None:
        net = Net()
        if context.rank:
            net.body[2] = nn.Identity()
            net.block.score = _triple
        state_of(net).align([1])

    run_ranks(2, main)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_module_that_is_made_by_its_first_batch() -> None:
    def main(context: StaticContext) -> nn.Module:
        net = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
        state = TorchState(net)
        if context.rank == 0:
            net(torch.ones(3, 4))
            net[1].momentum = 0.5
        state.align([1])
        net(torch.ones(3, 4))
        return net

    for net in run_ranks(2, main):
        assert net[0].in_features == 4
        assert net[1].momentum == 0.5


COMPILES = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@COMPILES
def test_scripted_models() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5)))
    state = TorchState(model)
    state.save()
    model.eval()
    state.save()
    state._pack()


@COMPILES
@pytest.mark.parametrize("compiled", [(True, False), (False, True), (True, True)])
def test_settings_of_compiled_models(compiled: tuple[bool, bool], tmp_path: Any) -> None:
    def build(number: int) -> Any:
        return lambda: state_of(torch.compile(Net()) if compiled[number] else Net())

    def inner(model: Any) -> Any:
        return getattr(model, "_orig_mod", model)

    def change(state: TorchState) -> None:
        state.model.eval()
        inner(state.model).block.temperature = 0.5
        state.model.body[1].momentum = None

    save_to(tmp_path, build(0), change)
    model = resume_from(tmp_path, build(1))[0].model
    assert not model.training
    assert not any(module.training for module in inner(model).modules())
    assert inner(model).block.temperature == 0.5
    assert model.body[1].momentum is None
