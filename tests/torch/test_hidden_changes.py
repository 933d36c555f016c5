"""Changes through ``.data``, which leave no mark, between a commit and the next step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import nbelastic.torch as hvd
from nbelastic.torch.state.torch_state import TorchState
from tests.torch.nets import model_bits


@pytest.fixture(autouse=True, scope="module")
def _a_world_of_one() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def _decay(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.data.mul_(0.9)


def _clip(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.data.sub_(0.01).clamp_(-0.5, 0.5)


def _noise(net: nn.Module) -> None:
    net[0].weight.data += 0.125


def _copy(net: nn.Module) -> None:
    net[2].weight.data.copy_(net[2].weight.data * 0.5)


def _numpy(net: nn.Module) -> None:
    net[0].weight.detach().numpy()[:] *= 0.5


def _row(net: nn.Module) -> None:
    net[0].weight.data[1] /= 2


CHANGES = [_decay, _clip, _noise, _copy, _numpy, _row]


class Failed(Exception):
    pass


def train(steps: int, change: Any, fail_at: int = -1, *, large: bool = False) -> Any:
    """Train and commit each step; fail once between the change and the step, and go back."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    state = TorchState(net, optimizer, step=0)
    state.save()
    failed = False
    while state.step < steps:
        optimizer.zero_grad()
        net(torch.full((2, 4), float(state.step))).sum().backward()
        change(net)
        if state.step == fail_at and not failed:
            failed = True
            state.restore()
            continue
        optimizer.step()
        state.step += 1
        state.commit()
    return model_bits(net), state._lazy.uncopied


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("fail_at", [1, 2, 3, 5, 9, 11])
def test_a_failure_does_not_apply_them_twice(change: Any, fail_at: int) -> None:
    assert train(14, change, fail_at)[0] == train(14, change)[0]


@pytest.mark.parametrize("fail_at", [1, 5])
def test_a_large_model_that_is_trusted_at_once(fail_at: int, monkeypatch: Any) -> None:
    monkeypatch.setattr("nbelastic.torch.state.lazy_commit.LARGE", 1)
    assert train(8, _decay, fail_at)[0] == train(8, _decay)[0]


def test_without_them_commits_copy_nothing() -> None:
    assert train(6, lambda net: None)[1]
    assert not train(6, _decay)[1]


def test_changes_that_begin_later_are_noticed_sometime() -> None:
    calls: list[int] = []

    def late(net: nn.Module) -> None:
        calls.append(1)
        if len(calls) > 6:
            _decay(net)

    assert not train(12, late)[1]


def test_values_that_are_no_numbers_are_no_change() -> None:
    net = nn.Linear(2, 2)
    with torch.no_grad():
        net.weight[0] = float("nan")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = TorchState(net, optimizer)
    for _ in range(6):
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state.commit()
    assert state._lazy.uncopied


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_other_types(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    state = TorchState(None, optimizer)
    for _ in range(6):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        state.commit()
    assert state._lazy.uncopied
