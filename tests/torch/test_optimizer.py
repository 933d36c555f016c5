from __future__ import annotations

import dataclasses
import functools
import threading
import warnings

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.elastic.ranks.context import activate
from nbelastic.torch.gradients import layout
from tests.support.world import run_ranks
from tests.torch.fakes import ChangingContext, TwinCommunicator, UnreachableCommunicator
from tests.torch.modes import only
from tests.torch.training import (
    SGD,
    STEPS,
    assert_close,
    assert_equal,
    loss_of,
    make_model,
    parameters_of,
    train_alone,
)

ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)


pytestmark = pytest.mark.usefixtures("small_buckets")


def train(context, make_optimizer=SGD, before_step=None, **options):
    """Train on this rank's share; return the parameters."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, context.rank, context.size).backward()
        if before_step is None:
            optimizer.step()
        else:
            optimizer.synchronize()
            before_step(model)
            with optimizer.skip_synchronize():
                optimizer.step()
    return parameters_of(model)


def assert_as_alone(results, make_optimizer=SGD, **options):
    for result in results[1:]:
        assert_equal(results[0], result)
    assert_close(results[0], train_alone(make_optimizer, **options))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("make_optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_ranks_together_train_like_one_process(size, make_optimizer):
    results = run_ranks(size, lambda context: train(context, make_optimizer))
    assert_as_alone(results, make_optimizer)


def test_one_bucket_is_enough_for_a_small_model():
    assert_as_alone(run_ranks(2, train))


@pytest.mark.parametrize(
    "options",
    [
        {"groups": 2},
        {"groups": 100},
        {"gradient_predivide_factor": 4.0},
        {"process_set": hvd.global_process_set},
    ],
    ids=str,
)
def test_options_that_do_not_change_the_result(options):
    assert_as_alone(run_ranks(2, lambda context: train(context, **options)))


def test_parameters_can_be_grouped():
    def rank_main(context):
        model = make_model()
        groups = [list(model[0].parameters()), [model[4].weight, model[2].bias]]
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), groups=groups)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step, context.rank, context.size).backward()
            optimizer.step()
        return parameters_of(model)

    assert_as_alone(run_ranks(2, rank_main))


def test_sum_adds_the_gradients_of_all_ranks():
    make_optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    halved = functools.partial(torch.optim.SGD, lr=0.05)
    results = run_ranks(2, lambda context: train(context, halved, op=hvd.Sum))
    assert_as_alone(results, make_optimizer)


def test_fp16_halves_the_bytes_and_keeps_ranks_equal():
    results = run_ranks(2, lambda context: train(context, compression=hvd.Compression.fp16))
    assert_equal(*results)
    for got, want in zip(results[0], train_alone(SGD), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-3)
    context = ChangingContext(TwinCommunicator(generation=1))
    with activate(context):
        train(context, compression=hvd.Compression.fp16)
    assert {tensor.dtype for tensor in context.communicator().lent} == {torch.float16}


def test_passes_accumulate_before_gradients_are_reduced():
    def rank_main(context):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), backward_passes_per_step=2)
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(2):
                loss = loss_of(model, step, 2 * context.rank + part, 2 * context.size) / 2
                loss.backward()
            optimizer.step()
        return parameters_of(model)

    assert_as_alone(run_ranks(2, rank_main))


@only("early")
def test_nothing_is_launched_before_the_last_pass(monkeypatch):
    monkeypatch.setattr(layout, "BUCKET_BYTES", 1 << 20)
    communicator = TwinCommunicator(generation=1)
    model = make_model()
    with activate(ChangingContext(communicator)):
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), backward_passes_per_step=2)
        for step in range(2):
            loss_of(model, step).backward()
            assert len(communicator.lent) == step
            loss_of(model, step).backward()
            assert len(communicator.lent) == step + 1
            optimizer.step()
            optimizer.zero_grad()
        optimizer.set_backward_passes_per_step(1)
        loss_of(model, 2).backward()
        assert len(communicator.lent) == 3
        with pytest.raises(RuntimeError, match="between step"):
            optimizer.set_backward_passes_per_step(2)


def test_a_step_before_the_last_pass_reduces_what_there_is():
    def rank_main(context):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), backward_passes_per_step=3)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step, context.rank, context.size).backward()
            optimizer.step()
        return parameters_of(model)

    assert_as_alone(run_ranks(2, rank_main))


def clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def test_clipping_after_synchronize_works_on_reduced_gradients():
    results = run_ranks(2, lambda context: train(context, before_step=clip))
    assert_as_alone(results, before_step=clip)


@pytest.mark.parametrize("size", [1, 2])
def test_clipping_without_synchronize_is_refused(size):
    both = threading.Barrier(size)

    def rank_main(context):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), model.named_parameters())
        loss_of(model, 0).backward()
        clip(model)
        with pytest.raises(RuntimeError, match=r"'4\.bias' was changed.*synchronize\(\) first"):
            optimizer.step()
        both.wait(timeout=20)  # who leaves now breaks what is under way

    run_ranks(size, rank_main)


@pytest.mark.parametrize(
    "change",
    [
        lambda parameter: parameter.grad.mul_(2),
        lambda parameter: setattr(parameter, "grad", parameter.grad.clone()),
        lambda parameter: setattr(parameter, "grad", None),
    ],
    ids=["in place", "replaced", "removed"],
)
def test_any_change_of_a_gradient_under_way_is_noticed(change):
    model = make_model()
    with activate(ChangingContext(TwinCommunicator(generation=1))):
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), model.named_parameters())
        loss_of(model, 0).backward()
        change(model[0].weight)
        with pytest.raises(RuntimeError, match=r"'0\.weight' was changed"):
            optimizer.step()


def test_step_after_synchronize_does_not_reduce_again():
    def rank_main(context):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), op=hvd.Sum)
        loss_of(model, 0).backward()
        optimizer.synchronize()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        with warnings.catch_warnings(record=True) as warned:  # in Horovod's words
            warnings.simplefilter("always")
            optimizer.step()
        assert_equal(gradients, [parameter.grad for parameter in model.parameters()])
        return [str(each.message) for each in warned]

    for warned in run_ranks(2, rank_main):
        assert all("without optimizer.skip_synchronize() context" in each for each in warned)


def test_skip_synchronize_without_synchronize_is_refused():
    model = make_model()
    with activate(ChangingContext(TwinCommunicator(generation=1))):
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()))
        loss_of(model, 0).backward()
        with optimizer.skip_synchronize(), pytest.raises(RuntimeError, match="synchronize"):
            optimizer.step()


@only("early")
def test_buckets_are_launched_while_backward_runs():
    communicator = TwinCommunicator(generation=1)
    model = make_model()
    model[0].weight.register_hook(lambda gradient: communicator.events.append("first layer"))
    with activate(ChangingContext(communicator)):
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()))
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            communicator.events.append("backward done")
            optimizer.step()
            events, communicator.events = communicator.events, []
            launched = [number for number, event in enumerate(events) if event == "launch"]
            assert len(launched) > 2
            assert launched[0] < events.index("first layer")
            assert launched[-1] < events.index("backward done")


@only("late")
def test_nobody_waits_in_backward_for_one_that_has_not_begun():
    ended = threading.Event()

    def one_step(context):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), model.named_parameters())
        assert context.rank == 0 or ended.wait(10)
        loss_of(model, 0, context.rank, context.size).backward()
        ended.set()
        optimizer.step()
        return parameters_of(model)

    first, second = run_ranks(2, one_step)
    assert_equal(first, second)


@only("in place early")
@pytest.mark.parametrize("late", [[True, False], [False, True]], ids=["of rank 0", "of rank 1"])
def test_what_all_do_does_not_depend_on_the_processors_of_one(late):
    def rank_main(context):
        communicator = context.communicator()
        communicator.capabilities = dataclasses.replace(
            communicator.capabilities, overlaps=not late[context.rank]
        )
        operations = []
        for name in ("allreduce_async", "allreduce_coalesced_async", "allreduce_coalesced"):
            original = getattr(communicator, name)

            def noted(*arguments, name=name, original=original):
                operations.append(name)
                return original(*arguments)

            setattr(communicator, name, noted)
        return train(context), operations

    (one, operations), (other, _) = run_ranks(2, rank_main)
    assert_as_alone([one, other])
    at_once = operations.count("allreduce_coalesced")
    assert at_once == (STEPS if late[0] else 0)


@only("early")
def test_buckets_follow_the_order_in_which_gradients_arrive():
    class Backwards(torch.nn.Module):
        """Uses its layers in the opposite order of their definition."""

        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(10, 10) for _ in range(4))

        def forward(self, inputs):
            for layer in reversed(self.layers):
                inputs = layer(inputs)
            return inputs

    communicator = TwinCommunicator(generation=1)
    model = Backwards()
    model.layers[3].weight.register_hook(lambda gradient: communicator.events.append("last"))
    with activate(ChangingContext(communicator)):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
        before_last = []
        for _ in range(3):
            communicator.events.clear()
            model(torch.ones(1, 10)).sum().backward()
            before_last.append(communicator.events.index("last"))
            before_last[-1] -= communicator.events[: before_last[-1]].count("broadcast")
            optimizer.step()
            optimizer.zero_grad()
    assert before_last[0] == 0  # the bucket expected first is the last to be full
    assert before_last[1] == before_last[2] >= 2


def test_the_flag_of_any_rank_reaches_all():
    def rank_main(context):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(
            SGD(model.parameters()), compression=hvd.Compression.fp16
        )
        for step in range(3):
            context.flag = step == 1 and context.rank == 2
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return context.agreed

    assert run_ranks(3, rank_main) == [[False, True, False]] * 3


def test_a_world_of_one_exchanges_nothing():
    context = ChangingContext(UnreachableCommunicator(generation=1))
    with activate(context):
        result = train(context)
        context.flag = True
        train(context)
    assert_equal(result, train_alone(SGD))
    assert context.agreed == [False] * STEPS + [True] * STEPS
