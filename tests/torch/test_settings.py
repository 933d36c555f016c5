"""What modules hold besides their state dict: carried over, refused, or said."""

from __future__ import annotations

import copy
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from nbelastic.errors import StateMismatch
from nbelastic.torch.state.settings import moving_values
from nbelastic.torch.state.torch_state import TorchState
from tests.support.world import StaticContext, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(4, 1)
        self.temperature = 1.0
        self.shape = (2, 2)
        self.act: Any = torch.relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.head(self.body(x))) * self.temperature


def joined(change: Callable[[Net], object], prepare: Callable[[Net], object] = id) -> list[Net]:
    """Return the models of a rank that has trained, and of one that has joined it."""

    def main(context: StaticContext) -> Net:
        net = Net()
        if context.rank == 0:
            prepare(net)
        state = TorchState(net, torch.optim.SGD(net.parameters(), lr=0.1))
        if context.rank == 0:
            change(net)
            sent.append(state._pack())
        context.communicator().barrier()
        if context.rank == 1:
            state._unpack(sent[0])
        return net

    sent: list[Any] = []
    return run_ranks(2, main)


def freeze_statistics(net: Net) -> None:
    net.body[1].eval()


def set_momentum(net: Net) -> None:
    net.body[1].momentum, net.body[1].eps = None, 1e-3


def set_rate(net: Net) -> None:
    net.body[3].p = 0.0


def anneal(net: Net) -> None:
    net.temperature, net.shape = 0.25, (4, 4)


def add(net: Net) -> None:
    net.scale = 3.0


@pytest.mark.parametrize("change", [freeze_statistics, set_momentum, set_rate, anneal, add])
def test_settings_that_training_has_changed_are_carried_over(change: Any) -> None:
    first, second = joined(change)

    def settings(net: Net) -> list[dict[str, object]]:
        kinds = (bool, int, float, tuple, type(None))
        return [
            {name: value for name, value in vars(module).items() if isinstance(value, kinds)}
            for module in net.modules()
        ]

    assert settings(first) == settings(second) != settings(Net())
    assert torch.equal(first.eval()(torch.ones(2, 3)), second.eval()(torch.ones(2, 3)))


def test_what_ranks_have_built_differently_is_left_alone() -> None:
    first, second = joined(set_rate, prepare=lambda net: setattr(net, "temperature", 5.0))
    assert (first.temperature, second.temperature) == (5.0, 1.0)


def replace_activation(net: Net) -> None:
    net.body[2] = nn.GELU()


def replace_function(net: Net) -> None:
    net.act = torch.tanh


def drop(net: Net) -> None:
    net.body[3] = nn.Identity()


def wrap(net: Net) -> None:
    net.body[2] = nn.Sequential(nn.ReLU())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (replace_activation, "body.2: expected .*ReLU, came .*GELU"),
        (replace_function, "act: expected .*relu, came .*tanh"),
        (drop, "body.3: expected .*Dropout, came .*Identity"),
        (wrap, "body.2: expected .*ReLU, came .*Sequential"),
    ],
)
def test_what_cannot_be_carried_over_is_named(change: Any, said: str) -> None:
    with pytest.raises(StateMismatch, match=said):
        joined(change)


def test_lazy_modules_become_others_by_themselves() -> None:
    def main(context: StaticContext) -> None:
        net = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
        state = TorchState(net)
        if context.rank == 0:
            net(torch.ones(2, 3))
            sent.append(state._pack())
        context.communicator().barrier()
        if context.rank == 1:
            state._unpack(sent[0])

    sent: list[Any] = []
    run_ranks(2, main)


# -- values that move ------------------------------------------------------------------------------


class Moving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.annealed = 1.0
        self.calls = 0
        self.bank: list[torch.Tensor] = []
        self.queue: deque[int] = deque([1, 2], maxlen=2)
        self.mean = torch.zeros(2)
        self.constant = torch.ones(2)
        self.last_output: Any = None
        self.register_buffer("kept", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.annealed *= 0.9
        self.calls += 1
        self.bank.append(x.detach())
        self.queue.append(3)
        self.mean = 0.9 * self.mean + x.mean(0).detach()
        self.kept += 1
        self.last_output = self.layer(x)
        return self.last_output


def moved(module: nn.Module) -> set[str]:
    before = moving_values([module])
    module(torch.ones(3, 2))
    now = moving_values([module])
    return {name for name, token in now.items() if before.get(name, token) != token}


def test_values_that_forward_changes_are_found() -> None:
    names = {"bank", "queue", "mean"}  # numbers go back with the state
    assert moved(Moving()) == {f"Moving.{name}" for name in names}
    assert moved(nn.Sequential(Moving())) == {f"0.{name}" for name in names}


class Saved(Moving):
    def get_extra_state(self) -> object:
        return copy.copy(self.calls)

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


@pytest.mark.parametrize(
    "module",
    [
        Saved(),
        nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()),
        nn.TransformerEncoderLayer(2, 1, 4, batch_first=True),
        nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)),
    ],
)
def test_modules_with_extra_state_and_those_of_torch_are_left_out(module: nn.Module) -> None:
    assert moved(module) == set()
