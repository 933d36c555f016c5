import dataclasses
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
    assert_equal,
    distributed,
    loss_of,
    make_model,
    parameters_of,
    train_alone,
)

pytestmark = pytest.mark.usefixtures("small_buckets")


@pytest.mark.parametrize(
    ("compression", "dtype"),
    [(hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)],
)
def test_compression_halves_the_bytes(twin, compression, dtype):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), compression=compression)
    loss_of(model, 0).backward()
    optimizer.step()
    assert {tensor.dtype for tensor in twin.communicator().lent} == {dtype}
    other = torch.ones(2, dtype=({torch.float16, torch.bfloat16} - {dtype}).pop())
    assert compression.compress(other)[0].dtype is other.dtype


@only("early")
def test_nothing_is_launched_before_the_last_pass(twin, monkeypatch):
    monkeypatch.setattr(layout, "BUCKET_BYTES", 1 << 20)
    communicator = twin.communicator()
    model = make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), backward_passes_per_step=2)
    for step in range(2):
        loss_of(model, step).backward()
        assert len(communicator.lent) == step
        loss_of(model, step).backward()
        assert len(communicator.lent) == 2 * step  # none in the first, before ranks agree
        optimizer.step()
        optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    loss_of(model, 2).backward()
    assert len(communicator.lent) == 3
    with pytest.raises(RuntimeError, match="between step"):
        optimizer.set_backward_passes_per_step(2)


@pytest.mark.parametrize(
    "change",
    [
        lambda parameter: parameter.grad.mul_(2),
        lambda parameter: setattr(parameter, "grad", parameter.grad.clone()),
        lambda parameter: setattr(parameter, "grad", None),
        lambda parameter: setattr(parameter.grad, "data", torch.zeros(16, 6).double()),
        lambda parameter: torch.nn.utils.clip_grad_norm_([parameter], 1e-3),
    ],
    ids=["in place", "replaced", "removed", "other data", "clipped"],
)
@pytest.mark.parametrize("make", [TwinCommunicator, UnreachableCommunicator], ids=["two", "alone"])
def test_any_change_of_a_gradient_under_way_is_noticed(change, make):
    model = make_model()
    with activate(ChangingContext(make(generation=1))):
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), model.named_parameters())
        loss_of(model, 0).backward()
        change(model[0].weight)
        with pytest.raises(RuntimeError, match=r"'0\.weight' was changed.*synchronize\(\) first"):
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


def test_skip_synchronize_without_synchronize_is_refused(twin):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()))
    loss_of(model, 0).backward()
    with optimizer.skip_synchronize(), pytest.raises(RuntimeError, match="synchronize"):
        optimizer.step()


@only("early")
def test_buckets_are_launched_while_backward_runs(twin):
    communicator = twin.communicator()
    model = make_model()
    model[0].weight.register_hook(lambda gradient: communicator.events.append("first layer"))
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()))
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        communicator.events.append("backward done")
        optimizer.step()
        events, communicator.events = communicator.events, []
        launched = [number for number, event in enumerate(events) if event == "launch"]
        assert len(launched) > 2
        if step:  # in the first, ranks agree once backward has ended
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


@pytest.mark.parametrize("late", [[True, False], [False, True]], ids=["of rank 0", "of rank 1"])
def test_what_all_do_does_not_depend_on_the_processors_of_one(late):
    def rank_main(context):
        communicator = context.communicator()
        communicator.capabilities = dataclasses.replace(
            communicator.capabilities, overlaps=not late[context.rank]
        )
        model, optimizer = distributed()
        loss_of(model, 0).backward()
        optimizer.step()
        return optimizer._reducer.agreement.layout.manifest.after_backward

    assert run_ranks(2, rank_main) == [late[0]] * 2


@only("early")
@pytest.mark.parametrize("order", [1, -1])
def test_buckets_follow_the_order_in_which_gradients_arrive(twin, order):
    communicator = twin.communicator()
    model = torch.nn.Sequential(*(torch.nn.Linear(10, 10) for _ in range(4)))
    model[0].weight.register_hook(lambda gradient: communicator.events.append("last"))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*model.parameters()][::order], 0.1))
    before_last = []
    for _ in range(3):
        communicator.events.clear()
        model(torch.ones(1, 10)).sum().backward()
        before_last.append(communicator.events.index("last"))
        optimizer.step()
        optimizer.zero_grad()
    assert before_last[0] == 0  # in the first, ranks agree once backward has ended
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
        model, optimizer = distributed()
        for step in range(4):
            context.flag = step >= 2
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    assert_equal(parameters_of(model), train_alone(SGD))
    assert context.agreed == [False, False, True, True]
