"""What an optimizer does when a generation ends, at whatever point of a step."""

from __future__ import annotations

import functools
import threading

import pytest

import nbelastic.torch as hvd
from nbelastic.elastic.ranks.context import activate
from nbelastic.errors import CollectiveError
from tests.support.world import run_ranks
from tests.torch.fakes import ChangingContext, TwinCommunicator, UnreachableCommunicator
from tests.torch.modes import only
from tests.torch.training import (
    SGD,
    assert_close,
    assert_equal,
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


def test_sizes_change_from_generation_to_generation():
    trainers = {}

    def rank_main(context, numbers):
        trainer = trainers.get(context.rank) or Trainer(context)
        trainers[context.rank] = trainer
        hvd.broadcast_parameters(trainer.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(trainer.optimizer, root_rank=0)
        for number in numbers:
            trainer.step(context, number)
        return parameters_of(trainer.model)

    run_ranks(2, functools.partial(rank_main, numbers=[0, 1, 2]))
    run_ranks(1, functools.partial(rank_main, numbers=[3]))
    trainers.pop(1)
    results = run_ranks(3, functools.partial(rank_main, numbers=[4, 5]))
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])
    assert_close(results[0], train_alone(SGD, steps=6))


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


@only("early")
def test_a_failed_launch_leaves_backward_as_what_it_is():
    communicator = TwinCommunicator(generation=1, fail_at=1)
    context = ChangingContext(communicator)
    trainer = Trainer(context)
    reached = []
    trainer.model[0].weight.register_hook(lambda gradient: reached.append("first layer"))
    with activate(context):
        with pytest.raises(CollectiveError, match="a peer is gone"):
            loss_of(trainer.model, 0).backward()
        assert reached == []  # the rest would be for nothing
        context.enter(TwinCommunicator(generation=2))
        trainer.step(context, 0)
    alone = make_model()
    optimizer = SGD(alone.parameters())
    loss_of(alone, 0, 0, 2).backward()
    optimizer.step()
    assert_equal(parameters_of(alone), parameters_of(trainer.model))


def storages(communicator):
    return {tensor.untyped_storage().data_ptr() for tensor in communicator.lent}


@only("early")
@pytest.mark.parametrize("how", ["failure", "stale round", "reset"])
def test_buffers_that_were_lent_are_not_used_again(how):
    old = TwinCommunicator(generation=1, fail_at=2 if how == "failure" else None)
    context = ChangingContext(old)
    trainer = Trainer(context)
    with activate(context):
        if how == "failure":
            with pytest.raises(CollectiveError):
                loss_of(trainer.model, 0).backward()
        else:
            loss_of(trainer.model, 0).backward()
        if how == "reset":
            trainer.optimizer.reset()
            assert all(parameter.grad is None for parameter in trainer.model.parameters())
        new = TwinCommunicator(generation=2)
        context.enter(new)
        trainer.optimizer.zero_grad()  # not refused: that step was of another generation
        loss_of(trainer.model, 0).backward()
        trainer.optimizer.step()
    assert old.lent
    assert not storages(old) & storages(new)


@only("early")
def test_buffers_are_used_again_for_the_next_step():
    communicator = TwinCommunicator(generation=1)
    context = ChangingContext(communicator)
    trainer = Trainer(context)
    with activate(context):
        for number in range(2):  # the second lays the buckets out anew
            trainer.step(context, number)
        used = storages(communicator)
        communicator.lent.clear()
        for number in range(3):
            trainer.step(context, number)
        assert storages(communicator) <= used


@only("early")
def test_a_backward_without_step_is_forgotten_in_the_next_generation():
    context = ChangingContext(TwinCommunicator(generation=1))
    trainer = Trainer(context, backward_passes_per_step=2)
    with activate(context):
        loss_of(trainer.model, 0).backward()
        new = TwinCommunicator(generation=2)
        context.enter(new)
        for parameter in trainer.model.parameters():
            parameter.grad = None
        loss_of(trainer.model, 1).backward()
        assert new.lent == []
        loss_of(trainer.model, 1).backward()
        assert new.lent
        trainer.optimizer.step()


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


def test_survivors_share_the_order_they_have_observed():
    context = ChangingContext(TwinCommunicator(generation=1))
    trainer = Trainer(context)
    exchanges = []
    with activate(context):
        for generation in (1, 2):
            communicator = TwinCommunicator(generation=generation)
            context.enter(communicator)
            for number in range(4):
                communicator.events.clear()
                trainer.step(context, number)
                exchanges.append(communicator.events.count("broadcast"))
    assert exchanges == [1, 1, 0, 0, 2, 0, 0, 0]


def test_a_world_of_one_becomes_two_and_one_again():
    context = ChangingContext(UnreachableCommunicator(generation=1))
    trainer = Trainer(context)
    with activate(context):
        trainer.step(context, 0)
        twin = TwinCommunicator(generation=2)
        context.enter(twin)
        trainer.step(context, 1)
        assert twin.lent
        context.enter(UnreachableCommunicator(generation=3))
        trainer.step(context, 2)


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
        thread = threading.Thread(target=lambda: loss_of(trainer.model, 0).backward())
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
