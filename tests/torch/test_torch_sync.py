import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.elastic.sampler import ShardSampler
from nbelastic.elastic.state import transfer
from nbelastic.errors import CollectiveError
from nbelastic.torch.state.lazy_commit import LEARNED
from nbelastic.torch.state.torch_state import TorchState
from tests.collectives.worlds import SOME_KINDS
from tests.support.world import run_ranks
from tests.torch.fakes import TwinCommunicator
from tests.torch.nets import (
    adam,
    bits,
    generator_bits,
    new_net,
    train,
)
from tests.torch.ranks import on_ranks
from tests.torch.training import distributed, loss_of, stepped


def trained(state):
    return bits([state.model, state.optimizer])


@pytest.mark.parametrize("behind", [[2], [0, 3], [3, 1, 0]])
@on_ranks(4, kinds=SOME_KINDS)
def test_N5_newcomers_are_equal_bit_for_bit_without_a_dummy_step(context, behind):
    context.source = 2 if 2 not in behind else 0
    net = new_net(100 + context.rank if context.rank in behind else 0)
    optimizer = adam(net)
    state = TorchState(net, optimizer, epoch=0, losses=[], tensor=torch.zeros(0))
    if context.rank not in behind:
        train(net, optimizer, 3, seed=1)
        state.epoch, state.losses, state.tensor = 3, [0.5], torch.arange(3)
        optimizer.param_groups[0]["lr"] = 0.7  # as a reset callback does: live, not saved
    weight = net.first.weight
    state.align(behind)
    communicator = context.communicator()
    if context.rank not in [*behind, context.source] and communicator.name in ("gloo", "shm"):
        assert communicator.completed == 0, "it takes no part"
    assert net.first.weight is net.tied.weight is weight
    assert (state.epoch, state.losses, state.tensor.tolist()) == (3, [0.5], [0, 1, 2])
    assert optimizer.param_groups[0]["lr"] == 0.7
    found = bits(state._values())
    train(net, optimizer, 2, seed=2)
    return found, bits(state._values())


def test_generators_stay_each_ranks_own():
    before = generator_bits()
    run_ranks(2, lambda context: TorchState(epoch=context.rank).sync())
    assert generator_bits() == before


@pytest.mark.parametrize("good", [0, 1, 2, 5])
def test_a_failure_on_the_way_leaves_the_receiver_as_it_was(good, monkeypatch):
    """After so many good messages."""
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 256)
    states = []
    for rank in range(2):
        net = new_net(rank)
        optimizer = adam(net)
        states.append(TorchState(net, optimizer, epoch=rank, sampler=ShardSampler(range(10))))
    train(states[0].model, states[0].optimizer)
    before = [trained(state) for state in states]

    def fail(context):
        communicator = context.communicator()
        begin, left = communicator.begin_receive, iter(range(good))

        def begin_receive(*arguments):
            if next(left, None) is None:
                raise CollectiveError("a peer is gone")
            return begin(*arguments)

        if context.rank == 1:
            communicator.begin_receive = begin_receive
        with pytest.raises(CollectiveError) as error:  # noqa: PT012
            states[context.rank].align([1])
            communicator.barrier()
        communicator.abort(str(error.value))

    run_ranks(2, fail)
    assert [trained(state) for state in states] == before
    assert (states[1].epoch, states[1].sampler.num_replicas) == (1, 1)

    run_ranks(2, lambda context: states[context.rank].align([1]))
    assert trained(states[0]) == trained(states[1]) == before[0]
    assert states[1].epoch == 0


@on_ranks(4)
def test_N6_after_a_failure_everything_is_at_one_cut(context):
    net = new_net(context.rank)
    optimizer = adam(net)
    sampler = ShardSampler(range(100), seed=2)
    state = TorchState(net, optimizer, batch=0, sampler=sampler)
    state.align([1, 2, 3])
    state.save()

    def step():
        train(net, optimizer, seed=state.batch)
        sampler.record_batch(state.batch, 5)
        state.batch += 1

    step()
    state.save()
    step()
    if context.rank != 3:
        state.save()  # rank 3 did not come to it
    step()
    state.restore()
    assert state.batch == (1 if context.rank == 3 else 2)
    state.align([3])
    assert sampler.processed_num == 40
    assert state.batch == 2
    return trained(state), sorted(sampler.processed_indices)


def test_a_step_that_was_left_half_way_is_dropped_by_a_restore(twin):
    model, optimizer = distributed()
    state = TorchState(model, optimizer)
    loss_of(model, 0).backward()
    state.restore()
    assert all(parameter.grad is None for parameter in model.parameters())
    twin.enter(TwinCommunicator(generation=2))
    stepped(optimizer, model)  # zero_grad() refuses while others count on the gradients


@on_ranks(3)
def test_at_a_planned_leave_what_all_have_done_counts(context):
    first, second = ShardSampler(range(30)), ShardSampler(range(9))
    state = TorchState(samplers=[first, second])
    first.record_batch(0, 2 + context.rank)
    second.record_batch(0, 1)
    state.leave()
    assert (first.processed_num, second.processed_num) == (6, 3)


@pytest.mark.parametrize("copies", [False, True])
@on_ranks(2)
def test_a_newcomer_copies_no_more_than_the_others_and_goes_back_as_far(context, copies):
    generation, context.generation = context.generation, 0
    net = new_net(context.rank)
    optimizer = adam(net)
    state = TorchState(net, optimizer, steps=0)
    for _ in range(LEARNED + 1 if context.rank == 0 else 0):
        train(net, optimizer, seed=state.steps)
        state.steps += 1
        state.commit()
    context.generation = generation
    state.always_copy = copies and context.rank == 1
    state.align([1])
    state.save()
    received = bits(state._values())
    uncopied = state._lazy.uncopied
    assert uncopied == (not state.always_copy)
    train(net, optimizer)
    hvd.allreduce(torch.zeros(1))  # where a rank may fail, so the step replaces the commit
    state.restore()
    assert context.ahead == uncopied
    assert (bits(state._values()) == received) == state.always_copy
    context.ahead = False
    state.align([1])
    return received, bits(state._values())
