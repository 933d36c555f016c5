"""Process sets: operations of some of the ranks. N19: none is lost in a reset without a word."""

from __future__ import annotations

import inspect
import threading

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.errors import RanksDisagree
from tests.collectives.worlds import MAKERS, SOME_KINDS
from tests.support.world import run_ranks
from tests.torch.training import loss_of, make_model, parameters_of

TAKERS = sorted(
    name
    for name in hvd.__all__
    if callable(getattr(hvd, name))
    and not isinstance(getattr(hvd, name), type)
    and "process_set" in inspect.signature(getattr(hvd, name)).parameters
    and "process_set" not in name
    and name != "convert_sync_batchnorm"
)


def test_the_operations_that_take_a_set_are_found():
    assert {"DistributedOptimizer", "allgather_object", "allreduce", "barrier"} <= set(TAKERS)
    assert len(TAKERS) >= 28


FIRST = {
    "DistributedOptimizer": lambda: torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0),
    "broadcast_optimizer_state": lambda: torch.optim.SGD([torch.zeros(1)], lr=1.0),
    "broadcast_parameters": dict,
    "sparse_allreduce_async": lambda: torch.ones(1).to_sparse(),
    **{name: lambda: [torch.ones(1)] for name in TAKERS if name.startswith("grouped")},
}


def arguments_of(name):
    wanted = inspect.signature(getattr(hvd, name)).parameters
    first = () if name == "barrier" else (FIRST.get(name, lambda: torch.ones(1))(),)
    return first, {"root_rank": 0} if "root_rank" in wanted else {}


@pytest.mark.parametrize("name", TAKERS)
def test_what_is_no_set_is_refused_before_anything_is_sent(name):
    def rank_main(context):
        gone = hvd.add_process_set([0])
        assert hvd.remove_process_set(gone)
        for some in ([0], 1, hvd.ProcessSet([0]), gone):
            first, more = arguments_of(name)
            with pytest.raises(ValueError, match=r"process_set|is not added"):
                getattr(hvd, name)(*first, **more, process_set=some)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2

    run_ranks(2, rank_main)


@pytest.mark.parametrize("name", TAKERS)
def test_only_members_call_operations(name):
    def rank_main(context):
        some = hvd.add_process_set([1])
        first, more = arguments_of(name)
        more = {key: 1 for key in more}
        if context.rank == 1:
            getattr(hvd, name)(*first, **more, process_set=some)
        elif name != "DistributedOptimizer":  # others step by themselves
            with pytest.raises(ValueError, match="rank 0 is not in process set 1"):
                getattr(hvd, name)(*first, **more, process_set=some)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2

    run_ranks(2, rank_main)


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_every_operation_within_its_set(kind):
    def rank_main(context):
        rank = context.rank
        even, odd = hvd.add_process_set([2, 0]), hvd.add_process_set([1, 3])
        assert (even.ranks, odd.ranks) == ([0, 2], [1, 3])
        mine, other = (odd, even) if rank % 2 else (even, odd)
        assert (mine.included(), other.included()) == (True, False)
        assert (mine.rank(), other.rank(), mine.size()) == (rank // 2, None, 2)
        first, second = mine.ranks
        for name in (None, "named"):
            options = {"name": name, "process_set": mine}
            x = torch.full((2,), float(rank), requires_grad=True)
            total = hvd.allreduce(x, op=hvd.Sum, **options)
            assert total.tolist() == [first + second] * 2
            total.sum().backward()
            assert x.grad.tolist() == [2.0, 2.0]
            assert hvd.allgather(torch.tensor([rank]), **options).tolist() == mine.ranks
            assert hvd.broadcast(torch.tensor([rank]), second, **options).item() == second
            assert hvd.alltoall(torch.tensor([rank, -rank]), **options).tolist()[0] == (
                first if rank == first else -first
            )
            assert hvd.reducescatter(torch.ones(2), op=hvd.Sum, **options).tolist() == [2.0]
            assert hvd.broadcast_object(rank, second, **options) == second
            assert hvd.allgather_object(rank, **options) == mine.ranks
            sparse = hvd.sparse_allreduce_async(torch.ones(1).to_sparse(), op=hvd.Sum, **options)
            assert sparse().to_dense().item() == 2
        hvd.barrier(mine)
        tensors = {"a": torch.full((2,), float(rank))}
        hvd.broadcast_parameters(tensors, first, process_set=mine)
        assert tensors["a"][0] == first
        with pytest.raises(ValueError, match="root_rank must be a rank of"):
            hvd.broadcast(torch.ones(1), other.ranks[0], process_set=mine)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 4
        for each in (odd, even):
            assert hvd.remove_process_set(each)
            assert not hvd.remove_process_set(each)
        assert (mine.process_set_id, mine.included(), mine.size()) == (None, None, None)
        return hvd.add_process_set([0, 2]).process_set_id

    assert run_ranks(4, rank_main, make=MAKERS[kind]) == [3] * 4


def test_a_set_does_not_wait_for_other_ranks():
    arrived = threading.Event()

    def rank_main(context):
        pair = hvd.add_process_set([1, 2])
        if context.rank == 0:
            assert arrived.wait(20)
        else:
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == 2
            hvd.barrier(pair)
            arrived.set()
        hvd.barrier()

    run_ranks(3, rank_main)


def test_a_mismatch_in_a_set_fails_there_and_leaves_all_usable():
    def rank_main(context):
        pair = hvd.add_process_set([0, 2])
        if context.rank != 1:
            with pytest.raises(RanksDisagree, match=r"float32\[1\].*float32\[3\]"):
                hvd.allreduce(torch.ones(context.rank + 1), process_set=pair)
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == 2
        return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    assert run_ranks(3, rank_main) == [3.0] * 3


def test_sets_that_cannot_be_made():
    def rank_main(context):
        hvd.add_process_set([0])
        for ranks, words in (
            ([0], "there is a process set of ranks"),
            ([0, 1], "there is a process set of ranks"),
            ([7], "among 2 ranks is impossible"),
            ([], "among 2 ranks is impossible"),
        ):
            with pytest.raises(ValueError, match=words):
                hvd.add_process_set(ranks)
        with pytest.raises(RanksDisagree, match=r"add_process_set of ranks \[0\]"):
            hvd.add_process_set([context.rank])
        for wrong in ("01", 3, [1.5], [True], [0, 0], [-1]):
            with pytest.raises(ValueError, match="ProcessSet"):
                hvd.ProcessSet(wrong)
        assert not hvd.remove_process_set(hvd.global_process_set)
        assert hvd.global_process_set.ranks == [0, 1]
        assert hvd.global_process_set.process_set_id == 0

    run_ranks(2, rank_main)


def test_sets_given_to_init():
    def rank_main(context):
        front, back = hvd.ProcessSet([0, 1]), hvd.ProcessSet([2])
        hvd.init(process_sets=[front, back, [1]])
        hvd.init(process_sets="dynamic")
        assert (front.process_set_id, back.process_set_id) == (1, 2)
        if context.rank < 2:
            assert hvd.allgather_object(context.rank, process_set=front) == [0, 1]
        return hvd.add_process_set([0, 2]).process_set_id

    assert run_ranks(3, rank_main) == [4] * 3


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_an_optimizer_of_a_set(kind):
    def rank_main(context):
        pair = hvd.add_process_set([0, 2])
        model = make_model()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), process_set=pair
        )
        for number in range(3):
            optimizer.zero_grad()
            loss_of(model, number, context.rank // 2, 2).backward()
            optimizer.step()
            hvd.allreduce(torch.ones(1))
        return parameters_of(model), context.agreed

    (first, flags), (alone, _), (third, also) = run_ranks(3, rank_main, make=MAKERS[kind])
    assert all(torch.equal(a, b) for a, b in zip(first, third, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, alone, strict=True))
    reference = make_model()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        loss_of(reference, number).backward()
        optimizer.step()
    for mine, expected in zip(first, parameters_of(reference), strict=True):
        torch.testing.assert_close(mine, expected)
    assert flags == also == [], "what a set agrees on is not known to all"


def test_a_shutdown_removes_all_sets_and_they_can_be_added_again():
    def rank_main(context):
        first = hvd.add_process_set([0])
        hvd.shutdown()
        assert first.process_set_id is None
        hvd.init()
        again = hvd.add_process_set([0])
        if context.rank == 0:
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=again).item() == 1.0
        hvd.barrier()
        return again.process_set_id

    assert len(set(run_ranks(2, rank_main))) == 1


def test_a_set_that_is_removed_leaves_no_communicator():
    def rank_main(context):
        pair = hvd.add_process_set([0, 1])
        if context.rank < 2:
            hvd.allreduce(torch.ones(1), process_set=pair)
            hvd.allreduce(torch.ones(1), process_set=pair, name="a")
            layer = hvd.SyncBatchNorm(3, process_set=pair)
            layer(torch.randn(4, 3)).sum().backward()
        hvd.remove_process_set(pair)
        return sorted(context.communicator()._subgroups)

    assert run_ranks(3, rank_main) == [[], [], []]
