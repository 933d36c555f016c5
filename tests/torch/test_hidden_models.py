"""Models within values of a state that a restore would replace by copies."""

from __future__ import annotations

import types
from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from nbelastic.errors import NbelasticError
from nbelastic.torch.state.torch_state import TorchState

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
    "UserDict": (lambda model: UserDict(model=model), r"\.data"),
}


@pytest.mark.parametrize("name", HOLDERS)
@pytest.mark.parametrize("place", [lambda each: each, lambda each: {"inner": [each]}])
def test_a_model_in_an_object_is_refused_at_construction(name: str, place: Any) -> None:
    make, where = HOLDERS[name]
    text = rf"a {name} in the state holds a model \(Linear, at {where}\) that the state does not"
    with pytest.raises(NbelasticError, match=text):
        TorchState(bundle=place(make(nn.Linear(1, 1))))


@pytest.mark.parametrize("name", HOLDERS)
def test_a_model_that_the_state_has_may_be_in_an_object_too(name: str) -> None:
    model = nn.Linear(1, 1)
    held = HOLDERS[name][0](model)
    state = TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), held=held)
    before = model.weight.detach().clone()
    state.save()
    with torch.no_grad():
        model.weight.add_(1)
    state.restore()
    inside = {
        "SimpleNamespace": lambda: state.held.model,
        "Bundle": lambda: state.held.models[0],
        "Pair": lambda: state.held.model,
        "Holder": lambda: state.held["model"],
        "UserDict": lambda: state.held["model"],
    }[name]()
    assert inside is model
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("make", [lambda m: {"a": m}, lambda m: [m], lambda m: (m, {"b": [m]})])
def test_models_in_plain_containers_are_right(make: Any) -> None:
    model = nn.Linear(1, 1)
    state = TorchState(models=make(model))
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1)
    state.restore()
    assert torch.equal(model.weight, before)
