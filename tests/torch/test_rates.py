"""Learning rates where the batch follows the ranks: scaled in the step, and nowhere else."""

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nbelastic.torch as hvd
from nbelastic.data import Batch, Loader
from nbelastic.elastic.ranks.context import activate
from nbelastic.errors import OptionError, StateMismatch
from nbelastic.torch.elastic import LRScaler, TorchState, by_samples
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
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=6),
    warmup=st.integers(0, 4),
    rule=st.sampled_from(["linear", "sqrt"]),
    gamma=st.sampled_from([1.0, 0.9]),
)
@settings(max_examples=40, deadline=None)
def test_the_rate_of_each_step_is_as_specified(sizes, warmup, rule, gamma):
    context = world_of(0, sizes[0][0])
    scale = float if rule == "linear" else math.sqrt
    with activate(context):
        parameter, optimizer = made()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
        scaler = LRScaler(optimizer, reference=2, rule=rule, warmup=warmup)
        factor, base = scale(sizes[0][0] / 2), 0.5
        for size, runs in itertools.groupby(sizes, lambda each: each[0]):
            steps = sum(count for _, count in runs)  # the same size again is no change
            context.size = size
            start, target = factor, scale(size / 2)
            for number in range(steps):
                ramp = min(number / warmup, 1.0) if warmup and target > start else 1.0
                factor = start + (target - start) * ramp
                assert scaler.factor == pytest.approx(factor)
                assert step(parameter, optimizer) == pytest.approx(base * factor, rel=1e-3)
                assert optimizer.param_groups[0]["lr"] == pytest.approx(base)
                scheduler.step()
                base *= gamma
            # The ramp goes on from where the last step was about to take it.
            ramp = min(steps / warmup, 1.0) if warmup and target > start else 1.0
            factor = start + (target - start) * ramp


def test_rules_by_kind_of_optimizer(alone):
    alone.size = 4
    assert LRScaler(made()[1]).factor == 4.0
    assert LRScaler(made(torch.optim.Adam)[1]).factor == 2.0
    assert LRScaler(made()[1], rule=lambda ratio: ratio / 8).factor == 0.5


def test_a_step_that_raises_leaves_no_scaled_rate(alone):
    alone.size = 3
    parameter, optimizer = made(lr=torch.tensor(0.5))
    scaler, rate = LRScaler(optimizer), optimizer.param_groups[0]["lr"]
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert step(parameter, optimizer) == pytest.approx(1.5)
    assert optimizer.param_groups[0]["lr"] is rate
    assert (rate.item(), scaler.factor) == (0.5, 3.0)


def test_the_warmup_is_part_of_a_commit(alone):
    parameter, optimizer = made()
    scaler = LRScaler(optimizer, warmup=4)
    state = TorchState(None, optimizer, scaler=scaler)
    alone.size = 5
    for factor in (1.0, 2.0, 3.0):
        assert scaler.factor == factor
        if factor == 2.0:
            state.save()
        step(parameter, optimizer)
    state.restore()
    assert scaler.factor == 2.0
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_schedule_by_samples_ends_where_it_should(alone):
    alone.size = 4
    schedule = functools.partial(
        torch.optim.lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.0
    )
    _, optimizer = made()
    scheduler = by_samples(schedule(optimizer, total_iters=12), reference=2)
    for alone.size, steps in ((4, 2), (1, 4), (3, 4)):  # 4 + 2 + 6 steps of two ranks
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
    assert scheduler.get_last_lr() == [0.0]
    saved = scheduler.state_dict()
    other = by_samples(schedule(made()[1], total_iters=12), 2)
    other.load_state_dict(saved)
    assert other.state_dict() == saved


def test_a_rate_that_was_multiplied_by_the_size_is_refused(alone):
    alone.size = 2
    saved = LRScaler(made(lr=0.1 * 2)[1]).state_dict()
    alone.size = 3
    LRScaler(made(lr=0.2)[1]).load_state_dict(saved)
    with pytest.raises(StateMismatch, match=r"build the optimizer without `\* hvd\.size\(\)`"):
        LRScaler(made(lr=0.1 * 3)[1]).load_state_dict(saved)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("extra", [LRScaler, lambda _: Loader(range(8), Batch(4, micro=2))])
def test_a_reset_callback_that_changes_a_rate_is_refused(extra):
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    state = TorchState(model, optimizer, extra=extra(optimizer))
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
        ({"warmup": -1}, "must be a whole number of steps"),
        ({"rule": "cubic"}, "must be 'linear', 'sqrt' or a function"),
        ({"rule": lambda _: -1.0}, "it must be positive"),
    ],
)
def test_wrong_values_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        LRScaler(made()[1], **options)
    _, optimizer = made()
    _first = LRScaler(optimizer)
    with pytest.raises(OptionError, match="has one already"):
        LRScaler(optimizer)
    with pytest.raises(OptionError, match="must be a learning rate scheduler"):
        by_samples(optimizer.state)
