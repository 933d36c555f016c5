"""Learning rates where the batch follows the ranks: scaled in the step, and nowhere else."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nbelastic.torch as hvd
from nbelastic.data import Batch, Loader
from nbelastic.elastic.ranks.context import activate
from nbelastic.errors import OptionError
from nbelastic.torch.elastic import LRScaler, TorchState
from tests.support.world import world_of


def made(kind=torch.optim.SGD, lr=0.5):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = kind([parameter], lr=lr)
    return parameter, optimizer


def step(parameter, optimizer):
    """Return the rate of a step, which moves a parameter of gradient 1 by it."""
    before = parameter.item()
    parameter.grad = torch.ones(1)
    optimizer.step()
    return before - parameter.item()


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    rule=st.sampled_from(["linear", "sqrt"]),
    gamma=st.sampled_from([1.0, 0.9]),
)
@settings(max_examples=20, deadline=None)
def test_the_rate_of_each_step_is_as_specified(sizes, rule, gamma):
    context = world_of(0, sizes[0])
    with activate(context):
        parameter, optimizer = made()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
        LRScaler(optimizer, reference=2, rule=rule)
        base = 0.5
        for context.size in sizes:
            factor = context.size / 2 if rule == "linear" else math.sqrt(context.size / 2)
            assert step(parameter, optimizer) == pytest.approx(base * factor, rel=1e-3)
            assert optimizer.param_groups[0]["lr"] == pytest.approx(base)
            scheduler.step()
            base *= gamma


def test_rules_by_kind_of_optimizer(alone):
    alone.size = 4
    assert LRScaler(made()[1]).factor == 4.0
    assert LRScaler(made(torch.optim.Adam)[1]).factor == 2.0
    assert LRScaler(made()[1], rule=lambda ratio: ratio / 8).factor == 0.5


def test_a_step_that_raises_leaves_no_scaled_rate(alone):
    alone.size = 3
    parameter, optimizer = made(lr=torch.tensor(0.5))
    rate = optimizer.param_groups[0]["lr"]
    LRScaler(optimizer)
    for restored in (rate, torch.tensor(0.25)):
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        if restored is not rate:
            optimizer.param_groups[0]["lr"] = restored
        assert step(parameter, optimizer) == pytest.approx(3 * restored.item())
        assert optimizer.param_groups[0]["lr"] is restored


@pytest.mark.parametrize("first", ["scaler", "state"])
@pytest.mark.parametrize("changed", [True, False], ids=["before the step", "after it"])
def test_a_state_captured_around_a_step_has_the_rates_of_the_reference(alone, first, changed):
    alone.size = 3
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if first == "scaler":
        LRScaler(optimizer)
    state = TorchState(model, optimizer)
    if first == "state":
        LRScaler(optimizer)
    for number in range(6):  # until commits copy nothing
        model(torch.ones(1, 1)).sum().backward()
        if changed and number == 5:
            with torch.no_grad():
                model.weight.mul_(2)
        optimizer.step()
        if number < 5:
            state.save()
    alone.communicator()  # before an exchange, what has changed since the commit is captured
    optimizer.param_groups[0]["lr"] = 0.0
    state.restore()
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("of", ["scaler", "loader"])
def test_a_reset_callback_that_changes_a_rate_is_refused(of):
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    if of == "scaler":
        LRScaler(optimizer)
    loader = Loader(range(8), Batch(4, micro=2)) if of == "loader" else None
    state = TorchState(model, optimizer, loader=loader)
    state.on_reset()

    def adapt():
        optimizer.param_groups[0]["lr"] = 0.7

    state.register_reset_callbacks([adapt])
    with pytest.raises(OptionError, match="a reset callback changes a learning rate"):
        state.on_reset()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reference": 0}, "must be a number of ranks"),
        ({"rule": "cubic"}, "must be 'linear', 'sqrt' or a function"),
        ({"rule": lambda _: -1.0}, "it must be positive"),
    ],
)
def test_wrong_values_are_refused(options, message):
    _, optimizer = made()
    with pytest.raises(OptionError, match=message):
        LRScaler(optimizer, **options)
    LRScaler(optimizer)
    with pytest.raises(OptionError, match="has one already"):
        LRScaler(optimizer)
