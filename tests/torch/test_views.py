"""Gradients that live in the communicator's memory, and what torch and users do with them."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import nbelastic.torch as hvd
from nbelastic.collectives import Op
from nbelastic.elastic.ranks.context import activate
from nbelastic.errors import CollectiveError
from nbelastic.torch.gradients import layout
from tests.support.world import run_ranks
from tests.torch.fakes import ChangingContext, LendingCommunicator, UnreachableCommunicator
from tests.torch.modes import only
from tests.torch.training import (
    SGD,
    STEPS,
    assert_close,
    assert_equal,
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
    communicator = context.communicator()
    can = communicator.capabilities
    in_place = layout.PIECE_BYTES if can.coalesces else layout.LARGE_BYTES
    if can.coalesces and not can.overlaps:
        in_place = 0
    return [communicator.holds(p.grad) or p.grad.nbytes >= in_place for p in model.parameters()]


@only("early")
@pytest.mark.parametrize("set_to_none", [True, False], ids=["to none", "to zero"])
def test_gradients_are_views_after_each_step_and_most_during_it(context, set_to_none):
    model, optimizer = distributed()
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, step).backward()
        assert views_of(context, model).count(False) == 1  # the sample
        optimizer.step()
        assert all(views_of(context, model))
    assert_close(parameters_of(model), train_alone(SGD))
    assert len(context.communicator().made) <= 2 * len(optimizer._reducer._agreement.layout.groups)


@pytest.mark.parametrize(
    ("options", "averages", "op"),
    [
        ({}, True, Op.AVERAGE),
        ({}, False, Op.SUM),
        ({"compression": hvd.Compression.bf16}, True, Op.AVERAGE),
        ({"compression": hvd.Compression.fp16}, False, Op.SUM),
        ({"gradient_predivide_factor": 4.0}, True, Op.SUM),
        ({"gradient_predivide_factor": 4.0}, False, Op.SUM),
        ({"op": hvd.Sum}, True, Op.SUM),
    ],
    ids=str,
)
def test_gradients_are_averaged_in_passing(options, averages, op):
    communicator = LendingCommunicator(generation=1, averages=averages)
    context = ChangingContext(communicator)
    context.flag = True
    with activate(context):
        model = make_model()
        alone = make_model()
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), **options)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            alone.load_state_dict(model.state_dict())
        assert set(communicator.ops) == {op}
        assert context.agreed == [True] * 3
        optimizer.zero_grad()
        loss_of(model, 0).backward()
        optimizer.synchronize()
    loss_of(alone, 0).backward()
    factor = 2 if options.get("op") is hvd.Sum else 1
    for got, want in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.grad, factor * want.grad, rtol=2e-2, atol=1e-3)


def test_kept_gradients_add_up_where_they_are(context):
    model, alone = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    plain = torch.optim.SGD(alone.parameters(), 0.1)
    for step in range(4):  # none sets them to zero
        loss_of(model, step).backward()
        optimizer.step()
        loss_of(alone, step).backward()
        plain.step()
    assert_close(parameters_of(model), parameters_of(alone))
    assert all(views_of(context, model))


def test_kept_gradients_of_what_is_not_used_any_more_count():
    """As ever: what is in ``grad`` when a step is made takes part in it."""

    def rank_main(context):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
        loss_of(model, 0, context.rank, context.size).backward()
        optimizer.step()
        kept = model[4].bias.grad.clone()
        model[0](torch.ones(1, 6).double()).sum().backward()
        optimizer.step()
        return kept, model[4].bias.grad

    for kept, grad in run_ranks(2, rank_main):
        torch.testing.assert_close(kept, grad)


def test_nothing_of_a_former_step_is_left_for_what_gets_no_gradient(context):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), op=hvd.Sum)
    for _ in range(3):
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    lent = context.communicator().lent
    before = len(lent)
    (model[0].weight.sum() * 3).backward()
    optimizer.step()
    assert model[0].weight.grad.eq(6.0).all()
    assert [p.grad is None for p in model.parameters()] == [False] + [True] * 5
    sums = torch.cat([each.flatten() for each in lent[before:]])
    assert sums.unique().tolist() == [0.0, 2.0, 6.0]  # values; and who has used what


def test_passes_accumulate_in_the_buffer(context):
    model, alone = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), backward_passes_per_step=3)
    plain = SGD(alone.parameters())
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        plain.zero_grad()
        for part in range(3):
            loss_of(model, step, part, 3).backward()
            loss_of(alone, step, part, 3).backward()
        optimizer.step()
        plain.step()
        assert all(views_of(context, model))
    assert_close(parameters_of(model), parameters_of(alone))


def test_clipping_works_on_views(context):
    model, optimizer = distributed()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with optimizer.skip_synchronize():
            optimizer.step()
    clip = functools.partial(torch.nn.utils.clip_grad_norm_, max_norm=0.05)
    assert_close(
        parameters_of(model), train_alone(SGD, before_step=lambda model: clip(model.parameters()))
    )


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_and_shared_parameters(context, reentrant):
    def train(model, optimizer):
        model[2] = torch.nn.Linear(16, 16).double()
        model[2].load_state_dict(make_model()[2].state_dict())
        for step in range(3):
            optimizer.zero_grad()
            inputs = torch.full((2, 6), 0.1 * step, dtype=torch.float64, requires_grad=True)
            hidden = checkpoint(model[:2], inputs, use_reentrant=reentrant)
            hidden = checkpoint(model[3], model[2](model[2](hidden)), use_reentrant=False)
            model[4](hidden).square().sum().backward()
            optimizer.step()
        return parameters_of(model)

    model, alone = make_model(), make_model()
    model[2], alone[2] = torch.nn.Identity(), torch.nn.Identity()
    shared = make_model()[2]
    model[2] = shared
    got = train(model, hvd.DistributedOptimizer(SGD(model.parameters())))
    want = train(alone, SGD(alone.parameters()))
    assert_close(got[:2] + got[4:], want[:2] + want[4:])


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


def test_replacing_the_data_of_a_gradient_under_way_is_noticed(context):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), model.named_parameters())
    loss_of(model, 0).backward()
    model[2].weight.grad.data = torch.zeros(16, 16).double()
    with pytest.raises(RuntimeError, match=r"'2.weight' was changed"):
        optimizer.step()


def test_gradients_may_be_changed_in_any_way_between_steps(context):
    model, alone = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    plain = torch.optim.SGD(alone.parameters(), 0.1)
    for step in range(4):
        for each, stepped in ((model, optimizer), (alone, plain)):
            loss_of(each, step).backward()
            stepped.step()
            each[0].weight.grad.data = each[0].weight.grad.data * 0.5
            each[0].bias.grad = each[0].bias.grad * 0.5
            each[2].weight.grad *= 0.5
            each[2].bias.grad = None
    assert_close(parameters_of(model), parameters_of(alone))


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
    optimizer.zero_grad()


@only("early")
def test_gradients_given_away_are_gone(context):
    model, optimizer = distributed()
    for step in range(2):
        loss_of(model, step).backward()
        optimizer.step()
    old = context.communicator()
    old._fail_at = len(old.lent) + 1
    with pytest.raises(CollectiveError, match="a peer is gone"):
        loss_of(model, 2).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    context.enter(LendingCommunicator(generation=2))
    before = [made.clone() for made in old.made]
    for step in range(2):
        loss_of(model, step).backward()
        optimizer.step()
    assert all(views_of(context, model))
    assert_equal(before, old.made)


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
    alone = make_model()
    plain = SGD(alone.parameters())
    loss_of(alone, 0).backward()
    plain.step()
    assert_close(parameters_of(model), parameters_of(alone))


def test_gradients_follow_their_rank_from_generation_to_generation(context):
    model, alone = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()))
    plain = SGD(alone.parameters())
    for generation in (1, 2, 3, 4):
        solo = generation == 3
        make = UnreachableCommunicator if solo else LendingCommunicator
        if generation > 1:
            context.enter(make(generation=generation))
        for step in range(2):
            loss_of(model, step).backward()
            optimizer.step()
            loss_of(alone, step).backward()
            plain.step()
        if not solo:
            assert all(views_of(context, model))
    assert_close(parameters_of(model), parameters_of(alone))


def test_a_world_of_one_lets_go_of_buffers(context):
    model, optimizer = distributed()
    loss_of(model, 0).backward()
    optimizer.step()
    lending = context.communicator()
    context.enter(UnreachableCommunicator(generation=2))
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, 1).backward()
    optimizer.step()
    assert not any(lending.holds(parameter.grad) for parameter in model.parameters())
