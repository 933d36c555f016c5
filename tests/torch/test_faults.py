"""What an optimizer does when a generation ends, at whatever point of a step."""

import threading

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.elastic.ranks.context import activate
from nbelastic.errors import CollectiveError
from nbelastic.torch.gradients import layout
from tests.support.world import run_ranks
from tests.torch.fakes import ChangingContext, TwinCommunicator, UnreachableCommunicator
from tests.torch.modes import only
from tests.torch.training import (
    SGD,
    assert_close,
    assert_equal,
    distributed,
    loss_of,
    make_model,
    parameters_of,
    train_alone,
)

pytestmark = pytest.mark.usefixtures("small_buckets")


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


def test_the_first_gradient_makes_a_member_of_a_job_without_loop():
    class Waiting(ChangingContext):
        """Has not been a member yet; size is what the driver foresees."""

        def communicator(self):
            if self.generation == 0:
                self.enter(TwinCommunicator(generation=1))
            return super().communicator()

    context = Waiting(UnreachableCommunicator(generation=0))
    trainer = Trainer(context)
    assert context.generation == 0
    with activate(context):
        for number in range(2):
            trainer.step(context, number)
    assert context.generation == 1
    assert context.communicator().lent


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


# -- gradients that are only noted -----------------------------------------------------------------


@pytest.fixture
def one_bucket(monkeypatch, small_buckets):
    monkeypatch.setattr(layout, "BUCKET_BYTES", 1 << 20)


def trained(steps=3):
    """Return a model and its optimizer that have learned in which order gradients arrive."""
    model, optimizer = distributed()
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.usefixtures("one_bucket")
@pytest.mark.parametrize("last", [False, True], ids=["but the last", "all"])
def test_misuse_is_noticed_in_the_second_backward(twin, last):
    model, optimizer = trained()
    if not last:
        model[0].requires_grad_(False)
    model(torch.ones(1, 6).double()).sum().backward()
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) was called after backward"):
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"' was computed more than .*=1 times"):  # noqa: PT012
        model(torch.ones(1, 6).double()).sum().backward()
        optimizer.step()
    assert all(parameter.grad is None for parameter in model[2:].parameters())
