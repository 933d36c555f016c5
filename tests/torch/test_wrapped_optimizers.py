"""Optimizers whose state cannot be kept exactly are refused; plain attributes are kept."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
from torch import nn

from nbelastic.errors import NbelasticError
from nbelastic.torch.state.torch_state import TorchState


def sgd(net: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


class ZeroRedundancyOptimizer(torch.optim.SGD):
    pass


class Kept:
    def __init__(self, value: Any) -> None:
        self.value = value


def with_attribute(value: Any) -> Any:
    def make(net: nn.Module) -> Any:
        class Hiding(torch.optim.SGD):
            rho, note, called = 0.5, ("a", 1), staticmethod(abs)

        optimizer = Hiding(net.parameters(), lr=0.1)
        optimizer.first = next(net.parameters())
        optimizer.kept = value
        return optimizer

    return make


def with_slots(net: nn.Module) -> Any:
    class Slotted(torch.optim.SGD):
        __slots__ = ("means",)

    return Slotted(net.parameters(), lr=0.1)


def without_state_dict(net: nn.Module) -> Any:
    class Bare:
        def __init__(self) -> None:
            self.inner = sgd(net)

    return Bare()


def that_does_not_load(net: nn.Module) -> Any:
    class Refusing(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            raise KeyError("slow")

    return Refusing(net.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (with_attribute([0.5]), r"Hiding.kept \(a list\) holds values that a state cannot see"),
        (with_attribute({"m": torch.ones(1)}), r"Hiding.kept \(a dict\) holds values"),
        (with_attribute(torch.ones(1)), r"Hiding.kept \(a Tensor\) holds values"),
        (with_attribute(random.Random(1)), r"Hiding.kept \(a Random\) holds values"),
        (with_attribute(Kept(1)), r"Hiding.kept \(a Kept\) holds values .* give the class state_"),
        (with_slots, r"Slotted keeps attributes in __slots__, which a state cannot see"),
        (
            lambda net: ZeroRedundancyOptimizer(net.parameters(), lr=0.1),
            "a ZeroRedundancyOptimizer keeps of the optimizer's state only this rank's share",
        ),
        (without_state_dict, r"Bare in the state wraps an optimizer \(SGD\) that the state does"),
        (
            that_does_not_load,
            r"Refusing.load_state_dict\(\) does not take what .* has given: KeyError\('slow'\)",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(make: Any, message: str) -> None:
    net = nn.Linear(2, 1)
    with pytest.raises(NbelasticError, match=message):
        TorchState(net, make(net))


@pytest.mark.parametrize("value", [0.5, "a", None, (1, 2)])
@pytest.mark.parametrize("other", [{}, abs, logging.getLogger()])
def test_plain_attributes_are_kept_and_what_cannot_change_is_not(value: Any, other: Any) -> None:
    net = nn.Linear(2, 1)
    optimizer = with_attribute(value)(net)
    optimizer.other = other
    state = TorchState(net, optimizer)
    optimizer.kept, optimizer.late = 7, 1
    state.restore()
    assert optimizer.kept == value
    assert not hasattr(optimizer, "late")


def test_a_wrapper_whose_optimizer_is_named_as_well_needs_no_state_dict() -> None:
    net = nn.Linear(2, 1)
    optimizer = sgd(net)

    class Bare:
        def __init__(self) -> None:
            self.inner = optimizer

    state = TorchState(net, optimizer, wrapper=Bare())
    state.restore()
    assert state.wrapper.inner is optimizer
