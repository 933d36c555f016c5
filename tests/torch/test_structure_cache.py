"""What a commit need not look for again, and when it has to."""

from __future__ import annotations

import pytest
import torch

from nbelastic.torch.state.structure_cache import StructureCache
from tests.torch.training import loss_of, make_model


def made():
    """Return a model and its optimizer, each with something of all that there can be."""
    model = make_model()
    model[1].register_buffer("seen", torch.zeros(2))
    optimizer = torch.optim.Adam([{"params": list(model[:2].parameters())}], lr=0.1)
    optimizer.add_param_group({"params": list(model[2:].parameters())})
    loss_of(model, 0).backward()
    optimizer.step()
    return model, optimizer


class Another(torch.nn.Linear):
    pass


def rename_parameter(model, optimizer):
    model[0]._parameters["factor"] = model[0]._parameters.pop("weight")
    model[0]._parameters["bias"] = model[0]._parameters.pop("bias")


def rename_state(model, optimizer):
    values = optimizer.state[model[0].weight]
    values["first"] = values.pop("exp_avg")
    values["exp_avg_sq"] = values.pop("exp_avg_sq")


def regroup(model, optimizer):
    first, second = (group["params"] for group in optimizer.param_groups)
    second.insert(0, first.pop())


CHANGES = {
    "a parameter where there was none": lambda model, _: model[3].register_parameter(
        "scale", torch.nn.Parameter(torch.ones(1))
    ),
    "another parameter": lambda model, _: setattr(
        model[0], "bias", torch.nn.Parameter(model[0].bias.detach().clone())
    ),
    "another buffer": lambda model, _: setattr(model[1], "seen", torch.zeros(2)),
    "a new module": lambda model, _: model.append(torch.nn.ReLU()),
    "another module": lambda model, _: model.__setitem__(1, torch.nn.ReLU()),
    "another class": lambda model, _: setattr(model[0], "__class__", Another),
    "a frozen parameter": lambda model, _: model[4].bias.requires_grad_(False),
    "another dictionary": lambda model, _: setattr(
        model[0], "_parameters", dict(model[0]._parameters)
    ),
    "another name": rename_parameter,
    "a removed module": lambda model, _: model.__delitem__(4),
    "a new group": lambda _, optimizer: optimizer.add_param_group({"params": [torch.ones(2)]}),
    "other groups": regroup,
    "other state": lambda model, optimizer: optimizer.state[model[0].weight].update(
        exp_avg=torch.zeros(16, 6)
    ),
    "state of another name": rename_state,
    "no state": lambda model, optimizer: optimizer.state.pop(model[0].weight),
}


def test_a_structure_holds_while_values_change():
    model, optimizer = made()
    cache = StructureCache([model, optimizer])
    assert cache.complete == [True, True]
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert cache.holds([model, optimizer])
    assert not cache.holds([model])
    assert not cache.holds([optimizer, model])


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_structure_does_not_hold_after(change):
    model, optimizer = made()
    cache = StructureCache([model, optimizer])
    change(model, optimizer)
    assert not cache.holds([model, optimizer])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_modules_that_keep_no_dictionaries_are_looked_at_anew():
    model = torch.jit.script(torch.nn.Linear(2, 1))
    cache = StructureCache([model])
    assert cache.complete == [False]
    assert cache.holds([model])
