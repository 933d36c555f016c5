"""An optimizer step by step: what is launched when, where gradients lie, and what a fault costs."""

import dataclasses
import threading
import types
import warnings

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.elastic.ranks.context import activate, current
from nbelastic.errors import CollectiveError
from nbelastic.torch.gradients import layout
from nbelastic.torch.gradients.arrived import Streams
from tests.support.world import run_ranks
from tests.torch.fakes import (
    ChangingContext,
    LendingCommunicator,
    TwinCommunicator,
    UnreachableCommunicator,
)
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


def test_the_number_of_passes_can_change_between_steps(twin):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), backward_passes_per_step=2)
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="between step"):
        optimizer.set_backward_passes_per_step(1)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    loss_of(model, 1).backward()
    with pytest.raises(RuntimeError, match="more than backward_passes_per_step=1 times"):
        loss_of(model, 1).backward()


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
def test_what_all_do_does_not_depend_on_processors_and_variables_of_one(monkeypatch, late):
    monkeypatch.setattr(layout, "fusion_threshold", lambda: 800 << current().rank)

    def rank_main(context):
        communicator = context.communicator()
        communicator.capabilities = dataclasses.replace(
            communicator.capabilities, overlaps=not late[context.rank]
        )
        model, optimizer = distributed()
        loss_of(model, 0).backward()
        optimizer.step()
        return optimizer._reducer.agreement.layout.manifest[1:]

    assert run_ranks(2, rank_main) == [(late[0], 800)] * 2


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


# -- gradients that live in the communicator's memory ----------------------------------------------


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


# -- a generation that ends, at whatever point of a step -------------------------------------------


class Trainer:
    """A rank's model and optimizer, which outlive generations."""

    def __init__(self, context, **options):
        self.model = make_model()
        with activate(context):
            self.optimizer = hvd.DistributedOptimizer(SGD(self.model.parameters()), **options)

    def step(self, context, number):
        self.optimizer.zero_grad()
        loss_of(self.model, number, context.rank, context.size).backward()
        self.optimizer.step()


def test_a_peer_that_dies_in_backward_costs_the_step_and_no_more():
    trainers = {}
    communicators = {}
    all_stepped = threading.Barrier(3)

    def first_generation(context):
        trainer = trainers[context.rank] = Trainer(context)
        communicators[context.rank] = context.communicator()
        trainer.step(context, 0)
        all_stepped.wait(timeout=20)
        before = parameters_of(trainer.model)
        if context.rank == 2:  # as its agents would, had the process died in backward
            for communicator in communicators.values():
                communicator.abort("rank 2 is gone")
            return
        with pytest.raises(CollectiveError, match="rank 2 is gone"):
            trainer.step(context, 1)
        assert_equal(before, parameters_of(trainer.model))
        assert all(parameter.grad is None for parameter in trainer.model.parameters())

    run_ranks(3, first_generation)

    def second_generation(context):
        trainer = trainers[context.rank]
        for number in (1, 2):
            trainer.step(context, number)
        return parameters_of(trainer.model)

    results = run_ranks(2, second_generation)
    assert_equal(*results)
    assert_close(results[0], train_alone(SGD, steps=3))


def storages(communicator):
    return {tensor.untyped_storage().data_ptr() for tensor in communicator.lent}


@only("early")
@pytest.mark.parametrize("how", ["failure", "stale round", "reset"])
def test_buffers_that_were_lent_are_not_used_again(how):
    old = TwinCommunicator(generation=1)
    context = ChangingContext(old)
    trainer = Trainer(context)
    with activate(context):
        trainer.step(context, 0)
        trainer.optimizer.zero_grad()
        if how == "failure":
            old.fail_at = len(old.lent) + 2
            with pytest.raises(CollectiveError):
                loss_of(trainer.model, 0).backward()
        else:
            loss_of(trainer.model, 0).backward()
        if how == "reset":
            trainer.optimizer.reset()
            assert all(parameter.grad is None for parameter in trainer.model.parameters())
        new = TwinCommunicator(generation=2)
        context.enter(new)
        trainer.step(context, 0)  # zero_grad() is not refused: that step was of another generation
    assert old.lent
    assert not storages(old) & storages(new)


@pytest.mark.parametrize("how", ["reset", "misuse"])
def test_a_step_left_half_way_ends_the_generation_for_this_rank(how):
    context = ChangingContext(TwinCommunicator(generation=1))
    trainer = Trainer(context)
    with activate(context):
        loss_of(trainer.model, 0).backward()
        if how == "reset":
            trainer.optimizer.reset()
        else:
            with pytest.raises(RuntimeError, match="computed more than"):
                loss_of(trainer.model, 0).backward()
        with pytest.raises(CollectiveError, match="generation 1 was left half-way"):
            trainer.step(context, 0)
        context.enter(TwinCommunicator(generation=2))
        trainer.step(context, 0)


def test_some_ranks_may_reset_between_steps():
    def rank_main(context):
        trainer = Trainer(context)
        for number in range(4):
            if number == 1 + context.rank:
                trainer.optimizer.reset()
            trainer.step(context, number)
        return parameters_of(trainer.model)

    results = run_ranks(2, rank_main)
    assert_equal(*results)
    assert_close(results[0], train_alone(SGD, steps=4))


@only("early")
def test_hooks_find_their_rank_in_any_thread():
    twin = TwinCommunicator(generation=1)
    context = ChangingContext(twin)
    trainer = Trainer(context)
    with activate(context), activate(ChangingContext(UnreachableCommunicator(generation=1))):
        thread = threading.Thread(target=lambda: trainer.step(context, 0))
        thread.start()
        thread.join()
    assert twin.lent


@only("late")
def test_a_backward_of_a_broken_generation_ends_early():
    twin = TwinCommunicator(generation=1)
    context = ChangingContext(twin)
    trainer = Trainer(context)
    with activate(context):
        loss = loss_of(trainer.model, 0)
        seen = []
        trainer.model[0].bias.register_hook(seen.append)
        trainer.model[4].bias.register_hook(lambda _: twin.abort("a peer is gone"))
        with pytest.raises(CollectiveError, match="a peer is gone"):
            loss.backward()
    assert not seen
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


# -- streams that only take notes; test_gpu.py has real ones ---------------------------------------


GPU = torch.device("cuda", 0)


class Stream:
    """Equal to all of its number; notes whom it has waited for."""

    def __init__(self, stream_id, device_index=0, device_type=1):
        self.stream_id, self.device_index, self.device_type = stream_id, device_index, device_type
        self.awaited = []
        self.meanwhile = lambda: None

    def __eq__(self, other):
        return self.stream_id == other.stream_id

    def __hash__(self):
        return self.stream_id

    def wait_stream(self, other):
        self.awaited.append(other.stream_id)
        self.meanwhile()


@pytest.fixture
def gpu(monkeypatch):
    """The present stream can be set; gradients are noted on it."""
    gpu = types.SimpleNamespace(present=Stream(0))
    cuda = types.SimpleNamespace(current_stream=lambda device: gpu.present, Stream=Stream)
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(
        torch._C,
        "_cuda_getCurrentStream",
        lambda index: (gpu.present.stream_id, index, 1),
        raising=False,
    )
    return gpu


def test_each_stream_is_waited_for_once_and_whoever_comes_next_waits_for_the_last(gpu):
    streams, parameter = Streams(), types.SimpleNamespace(device=GPU)
    hook = streams.noting(parameter, lambda _: None)
    seen = [Stream(number) for number in range(6)]

    def note(*numbers):
        for number in numbers:
            before, gpu.present = gpu.present, seen[number]
            hook(parameter)
            gpu.present = before

    def join(number):
        gpu.present = seen[number]
        streams.join(GPU, [])
        return sorted(seen[number].awaited)

    note(1, 2, 2)
    assert join(3) == join(3) == [1, 2]
    assert join(4) == [3]
    seen[5].meanwhile = lambda: note(1)  # noted while others are waited for: left for the next
    assert join(5) == [4]
    seen[5].meanwhile = lambda: None
    assert join(5) == [1, 4]
