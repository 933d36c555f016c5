"""Operations with names, which match whatever the order in which ranks begin them."""

from __future__ import annotations

import random
import threading

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.errors import CollectiveError, RanksDisagree
from tests.collectives.worlds import MAKERS, SOME_KINDS
from tests.support.world import run_ranks


@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_any_order_and_any_operation(kind, size):
    def rank_main(context):
        rank = context.rank
        begin = {
            "sum": lambda: hvd.allreduce_async(torch.tensor([rank]), name="sum", op=hvd.Sum),
            "rows": lambda: hvd.allgather_async(torch.full((rank,), rank), name="rows"),
            "copy": lambda: hvd.broadcast_async(torch.tensor([rank]), 1, name="copy"),
            "swap": lambda: hvd.alltoall_async(torch.full((size,), rank), name="swap"),
            "part": lambda: hvd.reducescatter_async(torch.ones(size), name="part", op=hvd.Sum),
            "many": lambda: hvd.grouped_allreduce_async(
                [torch.ones(2), torch.ones(1).double()], name="many", op=hvd.Sum
            ),
        }
        order = random.Random(rank)
        for _ in range(3):
            names = order.sample(sorted(begin), len(begin))
            handles = {name: begin[name]() for name in names}
            found = {
                name: hvd.synchronize(handles[name]) for name in order.sample(names, len(names))
            }
            assert found["sum"].item() == sum(range(size))
            assert found["rows"].tolist() == [r for r in range(size) for _ in range(r)]
            assert found["copy"].item() == 1
            assert found["swap"][0].tolist() == list(range(size))
            assert found["part"].tolist() == [size]
            assert [each[0].item() for each in found["many"]] == [size, size]
        return hvd.broadcast_object(rank, 1, name="object"), hvd.allgather_object(rank, "objects")

    expected = (1, list(range(size)))
    assert run_ranks(size, rank_main, make=MAKERS[kind]) == [expected] * size


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_operations_without_a_name_may_come_in_between(kind):
    def rank_main(context):
        if context.rank == 0:
            early = hvd.allreduce_async(torch.ones(1), name="early", op=hvd.Sum)
            assert not hvd.poll(early), "the others have not begun it"
            hvd.barrier()
        else:
            hvd.barrier()
            early = hvd.allreduce_async(torch.ones(1), name="early", op=hvd.Sum)
        hvd.barrier()
        assert hvd.poll(early), "a barrier leaves nothing behind that all had begun before"
        return hvd.synchronize(early).item()

    assert run_ranks(3, rank_main, make=MAKERS[kind]) == [3.0] * 3


def test_it_goes_on_while_ranks_do_something_else():
    """Nobody waits, and the operation ends all the same."""

    def rank_main(context):
        handle = hvd.allreduce_async(torch.ones(1), name="background")
        ended = threading.Event()
        while not hvd.poll(handle):
            ended.wait(0.001)
        return handle.wait().item()

    assert run_ranks(2, rank_main) == [1.0, 1.0]


def test_a_name_twice_at_once_is_an_error_and_changes_nothing():
    def rank_main(context):
        if context.rank == 0:
            handle = hvd.allreduce_async(torch.ones(1), name="once", op=hvd.Sum)
            for begin in (hvd.allreduce_async, hvd.allgather_async):
                with pytest.raises(ValueError, match=r"duplicate name: all.* of name 'once'"):
                    begin(torch.ones(1), name="once")
            hvd.barrier()
        else:
            hvd.barrier()
            handle = hvd.allreduce_async(torch.ones(1), name="once", op=hvd.Sum)
        assert handle.wait().item() == 2
        again = hvd.allreduce(torch.ones(1), name="once", op=hvd.Sum)
        return again.item()

    assert run_ranks(2, rank_main) == [2.0, 2.0]


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_a_mismatch_fails_that_operation_only(kind):
    def rank_main(context):
        wrong = hvd.allreduce_async(torch.ones(context.rank + 1), name="wrong")
        right = hvd.allreduce_async(torch.ones(1), name="right", op=hvd.Sum)
        assert right.wait().item() == 2
        with pytest.raises(RanksDisagree, match=r"float32\[1\].*float32\[2\]") as error:
            wrong.wait()
        assert hvd.allreduce(torch.ones(1), name="wrong", op=hvd.Sum).item() == 2
        return str(error.value)

    first, second = run_ranks(2, rank_main, make=MAKERS[kind])
    assert first == second


def test_ranks_that_wait_for_different_names_find_out():
    def rank_main(context):
        with pytest.raises(RanksDisagree) as error:
            hvd.allreduce(torch.ones(1), name=f"loss {context.rank}")
        return str(error.value), hvd.allreduce(torch.ones(1), name="loss").item()

    (first, one), (second, also) = run_ranks(2, rank_main)
    assert first == second
    assert "rank 0: allreduce 'loss 0'" in first
    assert "rank 1: allreduce 'loss 1'" in first
    assert (one, also) == (1.0, 1.0)


def test_tensors_are_read_when_the_operation_begins():
    def rank_main(context):
        tensor = torch.ones(1)
        handle = hvd.allreduce_async(tensor, name="read", op=hvd.Sum)
        tensor.zero_()
        return handle.wait().item()

    assert run_ranks(2, rank_main) == [2.0, 2.0]


def test_an_abort_frees_a_waiting_rank():
    met = threading.Event()

    def rank_main(context):
        hvd.allreduce(torch.ones(1), name="both")
        hvd.barrier()
        if context.rank == 0:
            met.set()  # the abort would overtake the end of the barrier
            with pytest.raises(CollectiveError):
                hvd.allreduce(torch.ones(1), name="never")
        else:
            hvd.allreduce_async(torch.ones(1), name="other")
            assert met.wait(30)
            context.communicator().abort("rank 1 is gone")

    run_ranks(2, rank_main)
