from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import nbelastic.torch as hvd
from nbelastic.elastic.sampler import ShardSampler
from nbelastic.elastic.state import transfer
from nbelastic.errors import CollectiveError
from nbelastic.torch.gradients.optimizer import DistributedOptimizer
from nbelastic.torch.state.lazy_commit import LEARNED
from nbelastic.torch.state.torch_state import TorchState
from tests.collectives.worlds import MAKERS, SOME_KINDS
from tests.support.world import StaticContext, run_ranks
from tests.torch.nets import (
    adam,
    bits,
    generator_bits,
    new_net,
    train,
)


def trained(state: TorchState) -> object:
    return bits([state.model, state.optimizer])


@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.parametrize("behind", [[2], [0, 3], [3, 1, 0]])
def test_N5_newcomers_are_equal_bit_for_bit_without_a_dummy_step(behind: list, kind: str) -> None:
    source = 2 if 2 not in behind else 0
    nets = [new_net(100 + rank if rank in behind else 0) for rank in range(4)]

    def main(context: StaticContext) -> object:
        net = nets[context.rank]
        optimizer = adam(net)
        state = TorchState(net, optimizer, epoch=0, losses=[], tensor=torch.zeros(0))
        if context.rank not in behind:
            train(net, optimizer, 3, seed=1)
            state.epoch, state.losses, state.tensor = 3, [0.5], torch.arange(3)
            optimizer.param_groups[0]["lr"] = 0.7  # as a reset callback does: live, not saved
        weight = net.first.weight
        state.align(behind)
        messages = context.communicator().completed
        assert net.first.weight is weight
        assert net.tied.weight is weight
        found = bits(state._values())
        train(net, optimizer, 2, seed=2)
        return found, bits(state._values()), messages

    results = run_ranks(4, main, source=source, make=MAKERS[kind])
    found = results[0][0]
    assert (found["epoch"], found["losses"], found["tensor"][1]) == (3, [0.5], (3,))
    assert found["optimizer"][0][0]["lr"] == 0.7
    for rank, result in enumerate(results):
        assert result[:2] == results[0][:2]
        if rank not in behind and rank != source and kind in ("gloo", "shm", "hierarchical"):
            assert result[2] == 0  # takes no part


def test_generators_stay_each_ranks_own() -> None:
    before = generator_bits()
    run_ranks(2, lambda context: TorchState(epoch=context.rank).sync())
    assert generator_bits() == before


def test_values_that_refer_to_the_model_refer_to_the_receivers_own() -> None:
    def main(context: StaticContext) -> None:
        net = nn.Linear(2, 1)
        number = context.rank + 7
        state = TorchState(
            net, holder=SimpleNamespace(net=net, number=number), function=lambda x: x + number
        )
        state.sync()
        assert state.holder.net is net
        assert state.holder.number == 7
        assert state.function(1) == 8

    run_ranks(2, main)


class Faulty:
    """A communicator that fails after a number of messages."""

    def __init__(self, communicator: object, good: int) -> None:
        self._communicator = communicator
        self._good = good

    def __getattr__(self, name: str) -> object:
        return getattr(self._communicator, name)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        self.receive_async(tensor, source).wait()

    def receive_async(self, tensor: torch.Tensor, source: int) -> object:
        if self._good == 0:
            raise CollectiveError("a peer is gone")
        self._good -= 1
        return self._communicator.receive_async(tensor, source)


@pytest.mark.parametrize("good", [0, 1, 2, 5])
def test_a_failure_on_the_way_leaves_the_receiver_as_it_was(
    good: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 256)
    states: dict[int, TorchState] = {}
    for rank in range(2):
        net = new_net(rank)
        optimizer = adam(net)
        states[rank] = TorchState(net, optimizer, epoch=rank, sampler=ShardSampler(range(10)))
        if rank == 0:
            train(net, optimizer)
    before = {rank: trained(state) for rank, state in states.items()}

    def fail(context: StaticContext) -> None:
        if context.rank == 1:
            context._communicator = Faulty(context.communicator(), good)
        try:
            states[context.rank].align([1])
            context.communicator().barrier()
        except CollectiveError as error:
            context.communicator().abort(str(error))
        else:
            pytest.fail("a failure went unnoticed")

    run_ranks(2, fail)
    assert {rank: trained(state) for rank, state in states.items()} == before
    assert states[1].epoch == 1
    assert states[1].sampler.num_replicas == 1

    run_ranks(2, lambda context: states[context.rank].align([1]))
    assert trained(states[0]) == trained(states[1]) == before[0]
    assert states[1].epoch == 0


def test_N6_after_a_failure_everything_is_at_one_cut() -> None:
    nets = [new_net(rank) for rank in range(4)]

    def main(context: StaticContext) -> object:
        net = nets[context.rank]
        optimizer = adam(net)
        sampler = ShardSampler(range(100), seed=2)
        state = TorchState(net, optimizer, batch=0, sampler=sampler)
        state.align([1, 2, 3])
        state.save()

        def step() -> None:
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
        return trained(state), state.batch, sorted(sampler.processed_indices)

    results = run_ranks(4, main)
    assert all(result == results[0] for result in results)
    assert results[0][1] == 2


def test_a_step_that_was_left_half_way_is_dropped_by_a_restore() -> None:
    states: dict[int, TorchState] = {}
    both = threading.Barrier(2)

    def break_off(context: StaticContext) -> None:
        net = nn.Linear(3, 1)
        optimizer = DistributedOptimizer(adam(net))
        state = states[context.rank] = TorchState(net, optimizer, losses=[])
        state.sync()
        net(torch.ones(3)).sum().backward()
        state.restore()
        optimizer.zero_grad()  # refuses while others count on the gradients
        both.wait(timeout=20)  # an abort breaks what the other still does
        context.communicator().abort("a peer is gone")

    def go_on(context: StaticContext) -> object:
        state = states[context.rank]
        state.align([])
        for _ in range(2):
            state.optimizer.zero_grad()
            state.model(torch.full((3,), float(context.rank))).sum().backward()
            state.optimizer.step()
        return bits(state._values())

    run_ranks(2, break_off)
    first, second = run_ranks(2, go_on)
    assert first == second


def test_at_a_planned_leave_what_all_have_done_counts() -> None:
    def main(context: StaticContext) -> object:
        first, second = ShardSampler(range(30)), ShardSampler(range(9))
        state = TorchState(samplers=[first, second])
        first.record_batch(0, 2 + context.rank)
        second.record_batch(0, 1)
        state.leave()
        return first.processed_num, second.processed_num

    assert run_ranks(3, main) == [(6, 3)] * 3


@pytest.mark.parametrize("copies", [False, True])
def test_a_newcomer_copies_no_more_than_the_others_and_goes_back_as_far(copies: bool) -> None:
    nets = [new_net(rank) for rank in range(2)]

    def main(context: StaticContext) -> object:
        generation, context.generation = context.generation, 0
        net = nets[context.rank]
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
        back = bits(state._values()) == received
        context.ahead = False
        state.align([1])
        return received, back, bits(state._values())

    first, second = run_ranks(2, main)
    assert (first[0], first[2]) == (second[0], second[2])
    assert (first[1], second[1]) == (False, copies)
