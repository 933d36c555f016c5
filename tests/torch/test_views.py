"""Gradients that live in the communicator's memory, and what torch and users do with them."""

import warnings

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.elastic.ranks.context import activate
from nbelastic.errors import CollectiveError
from tests.torch.fakes import ChangingContext, LendingCommunicator, UnreachableCommunicator
from tests.torch.modes import only
from tests.torch.training import (
    SGD,
    STEPS,
    assert_close,
    distributed,
    loss_of,
    make_model,
    parameters_of,
    train_alone,
)

pytestmark = pytest.mark.usefixtures("small_buckets")


@pytest.fixture
def context():
    """A rank whose peer computes the same."""
    context = ChangingContext(LendingCommunicator(generation=1))
    with activate(context):
        yield context


def views_of(context, model):
    """Return for each parameter whether its gradient lies where it was reduced."""
    return [context.communicator().holds(p.grad) for p in model.parameters()]


@only("early")
@pytest.mark.parametrize("set_to_none", [True, False], ids=["to none", "to zero"])
def test_gradients_are_views_after_each_step_and_most_during_it(context, set_to_none):
    model, optimizer = distributed()
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, step).backward()
        if step:  # in the first, ranks agree once backward has ended
            assert views_of(context, model).count(False) == 1  # the sample
        optimizer.step()
        assert all(views_of(context, model))
    assert_close(parameters_of(model), train_alone(SGD))
    assert len(context.communicator().made) <= 2 * len(optimizer._reducer.agreement.layout.buckets)


def test_nothing_of_a_former_step_is_left_for_what_gets_no_gradient(context):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), op=hvd.Sum)
    for _ in range(3):
        loss_of(model, 0).backward()
        optimizer.step()
        model[4].bias.grad.data = torch.ones(3).double()
        optimizer.zero_grad()
    lent = context.communicator().lent
    before = len(lent)
    (model[0].weight.sum() * 3).backward()
    optimizer.step()
    assert model[0].weight.grad.eq(6.0).all()
    assert [p.grad is None for p in model.parameters()] == [False] + [True] * 5
    sums = torch.cat([each.flatten() for each in lent[before:]])
    assert sums.unique().tolist() == [0.0, 2.0, 6.0]  # values; and who has used what


@pytest.mark.parametrize("set_to_none", [True, False])
def test_unscaling_a_gradient_under_way_is_noticed(context, set_to_none):
    model = make_model().float()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=set_to_none)
        scaler.scale(model(torch.ones(1, 6)).sum()).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad(set_to_none=set_to_none)
    scaler.scale(model(torch.ones(1, 6)).sum()).backward()
    with pytest.raises(RuntimeError, match="unscale gradients"):
        scaler.step(optimizer)


def test_gradients_with_a_graph_keep_it_until_they_are_reduced(context):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*create_graph")  # torch gives it once
        loss_of(model, 0).backward(create_graph=True)
    norms = [parameter.grad.square().sum() for parameter in model.parameters()]
    for norm in norms:
        (curvature,) = torch.autograd.grad(norm, model[0].weight, retain_graph=True)
        assert curvature.any()
    optimizer.step()
    assert all(views_of(context, model))
    assert not any(parameter.grad.requires_grad for parameter in model.parameters())
    optimizer.zero_grad()


@pytest.mark.parametrize("emptied", ["zero_grad", "by hand", "not at all"])
def test_a_step_left_half_way_by_another_generation_leaves_nothing(context, emptied):
    model, optimizer = distributed()
    loss_of(model, 0).backward()
    context.enter(LendingCommunicator(generation=2))
    if emptied == "zero_grad":
        optimizer.zero_grad(set_to_none=False)
        assert all(parameter.grad is None for parameter in model.parameters())
    elif emptied == "by hand":
        for parameter in model.parameters():
            parameter.grad = None
    else:
        with pytest.raises(CollectiveError, match=r"call optimizer.zero_grad\(\) before backward"):
            loss_of(model, 0).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    loss_of(model, 0).backward()
    optimizer.step()
    assert_close(parameters_of(model), train_alone(SGD, steps=1))


def test_gradients_follow_their_rank_from_generation_to_generation(context):
    model, alone = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()))
    plain = SGD(alone.parameters())
    for generation in (1, 2, 3, 4):
        solo = generation == 3
        lending = context.communicator()
        make = UnreachableCommunicator if solo else LendingCommunicator
        if generation > 1:
            context.enter(make(generation=generation))
        for step in range(2):
            loss_of(model, step).backward()
            optimizer.step()
            loss_of(alone, step).backward()
            plain.step()
        if solo:
            kept = lending.capabilities.coalesces  # they were reduced in memory of their own
            assert kept or not any(lending.holds(each.grad) for each in model.parameters())
        else:
            assert all(views_of(context, model))
    assert_close(parameters_of(model), parameters_of(alone))
