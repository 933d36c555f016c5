from __future__ import annotations

import types
from collections import namedtuple
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import nbelastic.torch as hvd
from nbelastic.errors import NbelasticError
from nbelastic.torch.state.commit import make_commit
from nbelastic.torch.state.torch_state import TorchState
from tests.support.world import StaticContext, run_ranks
from tests.torch.nets import (
    Net,
    adam,
    bits,
    train,
)


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


def test_copies_go_to_the_host_once_a_device_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(2, 2)
    before = bits(net)

    def full(tensor: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", full)
        state = TorchState(net)
    for _ in range(2):
        state.save()
        net.weight.data.zero_()
        state.restore()
        assert bits(net) == before


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
            self.steps, self.total = 0, torch.zeros(2)

        def state_dict(self) -> dict:
            return vars(self).copy()

        def load_state_dict(self, state: dict) -> None:
            self.__dict__.update(state, total=state["total"].clone())

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
        held=[Bundle([net]), Holder(model=net)],
        loop=loop,
    )
    warmup.steps = 5
    warmup.total += 1
    state.a.append(2)
    state.restore()
    assert state.a == [1]
    assert state.a is state.b["a"] is state.first.a is state.last.a
    assert state.nets[0] is state.nets[1][0] is state.model is net
    assert state.held[0].models[0] is state.held[1]["model"] is net
    assert state.loop[0] is state.loop
    assert warmup.after.optimizer is optimizer
    assert (warmup.steps, warmup.total.tolist()) == (0, [0, 0])


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


def test_a_model_is_captured_anew_only_once_it_has_changed() -> None:
    net = nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.5))
    commits = [make_commit({"model": net})]
    changes = [lambda: None, net.eval, lambda: net[0].bias.requires_grad_(False), net[1].double]
    for change in changes:
        change()
        commits.append(make_commit({"model": net}, commits[-1]))
    contents = [commit.parts[0].content for commit in commits]
    same = [one is other for one, other in pairwise(contents)]
    assert same == [True, False, False, True]
    other = nn.Linear(1, 1)
    swapped = make_commit({"a": net, "b": other}, make_commit({"a": other, "b": net}))
    assert [(part.label, part.obj) for part in swapped.parts] == [("a", net), ("b", other)]


@pytest.mark.parametrize("call", ["commit", "save", "check_host_updates"])
def test_a_commit_between_the_backward_passes_of_a_step_is_refused(call: str) -> None:
    def main(_: StaticContext) -> None:
        model = torch.nn.Linear(3, 1)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(plain, backward_passes_per_step=2)
        state = TorchState(model, held={"optimizer": optimizer})
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
            with pytest.raises(RuntimeError, match="between the backward passes of one step"):
                getattr(state, call)()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            getattr(state, call)()

    run_ranks(2, main)


# -- models within values --------------------------------------------------------------------------


Pair = namedtuple("Pair", ["model", "ema"])


@dataclass
class Bundle:
    models: list[nn.Module]


class Holder(dict):
    pass


HOLDERS: dict[str, Any] = {
    "SimpleNamespace": (lambda model: types.SimpleNamespace(model=model), r"\.model"),
    "Bundle": (lambda model: Bundle([model]), r"\.models"),
    "Pair": (lambda model: Pair(model, 1), r"\[0\]"),
    "Holder": (lambda model: Holder(model=model), r"\['model'\]"),
}


@pytest.mark.parametrize("name", HOLDERS)
@pytest.mark.parametrize("place", [lambda each: each, lambda each: {"inner": [each]}])
def test_a_model_in_an_object_is_refused_at_construction(name: str, place: Any) -> None:
    make, where = HOLDERS[name]
    text = rf"a {name} in the state holds a model \(Linear, at {where}\) that the state does not"
    with pytest.raises(NbelasticError, match=text):
        TorchState(bundle=place(make(nn.Linear(1, 1))))
