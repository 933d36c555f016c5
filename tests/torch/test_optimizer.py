"""An optimizer step by step: what is launched when, where gradients lie, and what a fault costs."""

import dataclasses
import threading
import types
import warnings
from typing import ClassVar
from unittest import mock

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.elastic.ranks.context import activate, current
from nbelastic.errors import CollectiveError
from nbelastic.torch.gradients import layout
from nbelastic.torch.gradients.arrived import Streams
from tests.torch.fakes import (
    ChangingContext,
    LendingCommunicator,
    TwinCommunicator,
    UnreachableCommunicator,
)
from tests.torch.modes import only, set_overlaps
from tests.torch.nets import bits
from tests.torch.ranks import on_ranks
from tests.torch.training import (
    SGD,
    STEPS,
    assert_close,
    assert_equal,
    distributed,
    loss_of,
    make_model,
    parameters_of,
    stepped,
    train_alone,
)

pytestmark = pytest.mark.usefixtures("small_buckets")


@pytest.mark.parametrize(
    ("compression", "dtype"),
    [(hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)],
)
def test_compression_halves_the_bytes(twin, compression, dtype):
    model, optimizer = distributed(compression=compression)
    stepped(optimizer, model)
    assert {tensor.dtype for tensor in twin.communicator().lent} == {dtype}
    other = torch.ones(2, dtype=({torch.float16, torch.bfloat16} - {dtype}).pop())
    assert compression.compress(other)[0].dtype is other.dtype


def again(model, _optimizer):
    loss_of(model, 0).backward()


CHANGED = r"'0\.weight' was changed.*synchronize\(\) first"
# What is done between a backward and its step, and what the error says.
MISTAKES = {
    "in place": (lambda model, _: model[0].weight.grad.mul_(2), CHANGED),
    "replaced": (
        lambda model, _: setattr(model[0].weight, "grad", torch.ones(16, 6).double()),
        CHANGED,
    ),
    "removed": (lambda model, _: setattr(model[0].weight, "grad", None), CHANGED),
    "other data": (
        lambda model, _: setattr(model[0].weight.grad, "data", torch.zeros(16, 6).double()),
        CHANGED,
    ),
    "clipped": (lambda m, _: torch.nn.utils.clip_grad_norm_([m[0].weight], 1e-3), CHANGED),
    "one pass too many": (again, "more than backward_passes_per_step=1 times"),
    "other passes": (lambda _, optimizer: optimizer.set_backward_passes_per_step(2), "between st"),
}


@pytest.mark.parametrize("what", MISTAKES)
@pytest.mark.parametrize("make", [TwinCommunicator, UnreachableCommunicator], ids=["two", "alone"])
def test_a_mistake_before_the_step_is_named(what, make):
    act, words = MISTAKES[what]
    with activate(ChangingContext(make(generation=1))):
        model, optimizer = distributed(backward_passes_per_step=2)
        loss_of(model, 0).backward()
        again(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.set_backward_passes_per_step(1)
        loss_of(model, 0).backward()
        with pytest.raises(RuntimeError, match=words):  # noqa: PT012
            act(model, optimizer)
            optimizer.step()


def test_step_after_synchronize_does_not_reduce_again(twin):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), op=hvd.Sum)
    loss_of(model, 0).backward()
    optimizer.synchronize()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    with pytest.warns(UserWarning, match=r"without optimizer.skip_synchronize\(\) context"):
        optimizer.step()  # in Horovod's words
    assert_equal(gradients, [parameter.grad for parameter in model.parameters()])


def test_unfreezing_in_the_middle_of_a_step_is_refused(twin):
    model, optimizer = distributed(backward_passes_per_step=2)
    model[0].requires_grad_(False)
    loss_of(model, 0).backward()
    model[0].requires_grad_(True)
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"'0.weight' was added or unfrozen"):
        optimizer.step()


def test_skip_synchronize_without_synchronize_is_refused(twin):
    model, optimizer = distributed()
    loss_of(model, 0).backward()
    with optimizer.skip_synchronize(), pytest.raises(RuntimeError, match="synchronize"):
        optimizer.step()


@only("late")
@on_ranks(2)
def test_nobody_waits_in_backward_for_one_that_has_not_begun(context, met):
    model, optimizer = distributed()
    assert context.rank == 0 or met.wait(10)
    loss_of(model, 0, context.rank, context.size).backward()
    met.set()
    optimizer.step()
    return bits(model)


@mock.patch.object(layout, "fusion_threshold", new=lambda: 800 << current().rank)  # noqa: PT008
@pytest.mark.parametrize("late", [[True, False], [False, True]], ids=["of rank 0", "of rank 1"])
@on_ranks(2)
def test_what_all_do_does_not_depend_on_processors_and_variables_of_one(context, late):
    set_overlaps(context, not late[context.rank])
    model, optimizer = distributed()
    stepped(optimizer, model)
    assert optimizer._reducer.layout.manifest[:2] == [late[0], 800]


@only("early")
@pytest.mark.parametrize("order", [1, -1])
def test_buckets_follow_the_order_in_which_gradients_arrive(twin, order):
    communicator = twin.communicator()
    model = torch.nn.Sequential(*(torch.nn.Linear(10, 10) for _ in range(4)))
    before_last = []
    model[0].weight.register_hook(lambda _: before_last.append(len(communicator.lent)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*model.parameters()][::order], 0.1))
    for _ in range(3):
        communicator.lent.clear()
        model(torch.ones(1, 10)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert before_last[0] == 0  # in the first, ranks agree once backward has ended
    assert before_last[1] == before_last[2] >= 2


@on_ranks(3)
def test_the_flag_of_any_rank_reaches_all(context):
    model, optimizer = distributed(compression=hvd.Compression.fp16)
    for step in range(3):
        context.flag = step == 1 and context.rank == 2
        stepped(optimizer, model, step)
    assert context.agreed == [False, True, False]


# -- gradients that live in the communicator's memory ----------------------------------------------


@pytest.fixture
def context(twin):
    """A rank whose peer computes the same, in memory that was lent."""
    twin.enter(LendingCommunicator(generation=1))
    return twin


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
    assert len(context.communicator().made) <= 2 * len(optimizer._reducer.layout.buckets)


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
    stepped(optimizer, model)  # from here on they are copied during backward
    optimizer.zero_grad()
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
    (model, optimizer), alone = distributed(), make_model()
    plain = SGD(alone.parameters())
    for generation in (1, 2, 3, 4):
        solo = generation == 3
        lending = context.communicator()
        make = UnreachableCommunicator if solo else LendingCommunicator
        if generation > 1:
            context.enter(make(generation=generation))
        for step in range(2):
            for its, net in ((optimizer, model), (plain, alone)):
                loss_of(net, step).backward()
                its.step()
        if solo:
            kept = lending.capabilities.coalesces  # they were reduced in memory of their own
            assert kept or not any(lending.holds(each.grad) for each in model.parameters())
        else:
            assert all(views_of(context, model))
    assert_close(parameters_of(model), parameters_of(alone))


# -- a generation that ends, at whatever point of a step -------------------------------------------


def storages(communicator):
    return {tensor.untyped_storage().data_ptr() for tensor in communicator.lent}


@pytest.mark.parametrize("how", ["failure", "stale", "reset", "misuse"])
def test_a_step_left_half_way_ends_the_generation_and_the_use_of_its_buffers(twin, how, mode):
    old, new = twin.communicator(), TwinCommunicator(generation=2)
    model, optimizer = distributed()
    stepped(optimizer, model)
    optimizer.zero_grad()
    if how == "failure":
        old.fail_at, before = len(old.lent) + 2, parameters_of(model)
        with pytest.raises(CollectiveError):
            stepped(optimizer, model)
        assert_equal(before, parameters_of(model))
        assert all(parameter.grad is None for parameter in model.parameters())
    else:
        loss_of(model, 0).backward()
    if how == "reset":
        optimizer.reset()
    if how == "misuse":
        with pytest.raises(RuntimeError, match="computed more than"):
            loss_of(model, 0).backward()
    if how in ("reset", "misuse"):
        assert all(parameter.grad is None for parameter in model.parameters())
        with pytest.raises(CollectiveError, match="generation 1 was left half-way"):
            stepped(optimizer, model)
    twin.enter(new)
    stepped(optimizer, model)  # zero_grad() is not refused: that step was of another generation
    assert mode != "early" or not storages(old) & storages(new)


@on_ranks(2)
def test_some_ranks_may_reset_between_steps(context):
    model, optimizer = distributed()
    for number in range(STEPS):
        if number == 1 + context.rank:
            optimizer.reset()
        stepped(optimizer, model, number, context.rank, 2)
    assert_close(parameters_of(model), train_alone(SGD))
    return bits(model)


@only("early")
def test_hooks_find_their_rank_in_any_thread(twin):
    model, optimizer = distributed()
    with activate(ChangingContext(UnreachableCommunicator(generation=1))):
        thread = threading.Thread(target=stepped, args=(optimizer, model))
        thread.start()
        thread.join()
    assert twin.communicator().lent


@only("late")
def test_a_backward_of_a_broken_generation_ends_early(twin):
    model, _optimizer = distributed()
    loss, seen = loss_of(model, 0), []
    model[0].bias.register_hook(seen.append)
    model[4].bias.register_hook(lambda _: twin.communicator().abort("a peer is gone"))
    with pytest.raises(CollectiveError, match="a peer is gone"):
        loss.backward()
    assert not seen
    assert all(parameter.grad is None for parameter in model.parameters())


# -- streams that only take notes; test_gpu.py has real ones ---------------------------------------


GPU = torch.device("cuda", 0)


@dataclasses.dataclass(unsafe_hash=True)
class Stream:
    """Equal to all of its number; notes whom it has waited for."""

    stream_id: int
    device_index: int = 0
    device_type: int = 1
    awaited: list = dataclasses.field(default_factory=list, compare=False)
    meanwhile: ClassVar = lambda: None

    def wait_stream(self, other):
        self.awaited.append(other.stream_id)
        Stream.meanwhile()


def test_each_stream_is_waited_for_once_and_whoever_comes_next_waits_for_the_last(monkeypatch):
    streams, present = Streams(), [Stream(0)]
    cuda = types.SimpleNamespace(current_stream=lambda _: present[-1], Stream=Stream)
    monkeypatch.setattr(torch, "cuda", cuda)
    now = lambda index: (present[-1].stream_id, index, 1)  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", now, raising=False)
    hook = streams.noting(types.SimpleNamespace(device=GPU), lambda _: None)

    def on(number, act, *arguments):
        present.append(Stream(number))
        act(*arguments)
        return sorted(present.pop().awaited)

    for number in (1, 2, 2):
        on(number, hook, None)
    assert [on(number, streams.join, GPU, []) for number in (3, 3, 4)] == [[1, 2], [], [3]]
    with monkeypatch.context() as patch:  # noted while others are waited for: left for the next
        patch.setattr(Stream, "meanwhile", lambda: on(1, hook, None))
        assert on(5, streams.join, GPU, []) == [4]
    assert on(5, streams.join, GPU, []) == [1]
