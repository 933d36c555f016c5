"""Ranks that have no more data take part in what the others do."""

from __future__ import annotations

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.elastic.ranks.context import current, one_of_all
from nbelastic.errors import CollectiveError, RanksDisagree
from tests.collectives.worlds import MAKERS, SOME_KINDS
from tests.support.world import run_ranks
from tests.torch.training import loss_of, make_model, parameters_of


@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.parametrize("size", [3])
def test_joined_ranks_contribute_zeros_to_sums_and_averages(kind, size):
    def rank_main(context):
        for first in range(size):
            for name in (None, "loss"):
                if context.rank != first:
                    ones = torch.ones(2, 3)
                    mean = hvd.allreduce(ones, name=name)
                    torch.testing.assert_close(mean, ones * (size - 1) / size)
                    assert hvd.allreduce(ones, op=hvd.Sum)[0, 0] == size - 1
                    whole = hvd.allreduce(torch.tensor([-5]), name=name)
                    assert whole.item() == int(-5 * (size - 1) / size)
                    hvd.barrier()
                last = hvd.join()
                assert last != first
                assert hvd.allgather_object(last) == [last] * size
        return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    assert run_ranks(size, rank_main, make=MAKERS[kind]) == [size] * size


def test_join_alone_returns_at_once():
    assert run_ranks(1, lambda context: hvd.join()) == [0]


FORBIDDEN = {
    "Allgather": lambda: hvd.allgather(torch.ones(2)),
    "Broadcast": lambda: hvd.broadcast(torch.ones(2), 0),
    "Alltoall": lambda: hvd.alltoall(torch.ones(6)),
    "Reducescatter": lambda: hvd.reducescatter(torch.ones(6)),
    "Allreduce": lambda: hvd.allreduce(torch.ones(2), op=hvd.Max),
    "Broadcast_parameters": lambda: hvd.broadcast_parameters({"a": torch.ones(2)}),
    "Allgather_object": lambda: hvd.allgather_object(1),
    "Broadcast_object": lambda: hvd.broadcast_object(1, name="named"),
    "Add_process_set": lambda: hvd.add_process_set([0]),
}


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_other_operations_raise_on_the_ranks_that_call_them(kind):
    def rank_main(context):
        if context.rank != 1:
            for verb, call in FORBIDDEN.items():
                with pytest.raises(RanksDisagree) as error:
                    call()
                if verb != "Add_process_set":
                    assert str(error.value).startswith(f"{verb} is not supported with Join"), verb
                    assert "rank 1 has joined" in str(error.value)
        hvd.join()
        return hvd.allgather(torch.tensor([context.rank])).tolist()

    assert run_ranks(3, rank_main, make=MAKERS[kind]) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.parametrize("overlaps", [True, False])
def test_joined_ranks_take_part_in_steps(kind, overlaps, monkeypatch):
    from nbelastic.collectives import Capabilities, Communicator

    monkeypatch.setattr(Communicator, "capabilities", Capabilities(overlaps=overlaps))
    batches = [1, 3, 2]

    def rank_main(context):
        model, other = make_model(), make_model()
        makers = [(torch.optim.SGD, model), (torch.optim.Adam, other)]
        optimizers = [
            hvd.DistributedOptimizer(make(net.parameters(), lr=0.1)) for make, net in makers
        ]
        for number in range(batches[context.rank]):
            for optimizer, net in zip(optimizers, (model, other), strict=True):
                optimizer.zero_grad()
                loss_of(net, number, context.rank, 3).backward()
                optimizer.step()
            hvd.allreduce(torch.ones(1))
        last = hvd.join()
        assert last == 1
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        return parameters_of(model)

    reference = make_model()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        present = [rank for rank in range(3) if number < batches[rank]]
        for rank in present:
            (loss_of(reference, number, rank, 3) / 3).backward()
        optimizer.step()
    for found in run_ranks(3, rank_main, make=MAKERS[kind]):
        for mine, expected in zip(found, parameters_of(reference), strict=True):
            torch.testing.assert_close(mine, expected)


def test_a_rank_without_any_batch_takes_part_in_first_steps():
    def rank_main(context):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        before = parameters_of(model)
        if context.rank:
            for number in range(3):
                optimizer.zero_grad()
                loss_of(model, number).backward()
                optimizer.step()
        hvd.join()
        same = [torch.equal(a, b) for a, b in zip(before, parameters_of(model), strict=True)]
        assert all(parameter.grad is None for parameter in model.parameters()) or context.rank
        return all(same)

    assert run_ranks(2, rank_main) == [True, False], "a joined rank does not step"


def test_joined_ranks_answer_the_check_of_a_commit():
    def rank_main(context):
        context.check_membership = lambda: context.agree(one_of_all(context, context.flag))
        context.flag = context.rank == 0
        if context.rank == 1:
            assert one_of_all(current(), mine=False)
        hvd.join()
        return context.agreed

    assert run_ranks(2, rank_main) == [[True], []]


def test_a_death_ends_the_wait_of_joined_ranks():
    def rank_main(context):
        if context.rank == 0:
            with pytest.raises(CollectiveError):
                hvd.join()
            return
        hvd.allreduce(torch.ones(1))
        context.communicator().abort("rank 1 is gone")

    run_ranks(2, rank_main)
