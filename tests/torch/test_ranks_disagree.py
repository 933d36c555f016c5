"""Ranks that do not ask for the same: an error on all of them, before data moves."""

from __future__ import annotations

import re

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.elastic.context import current, one_of_all
from nbelastic.errors import CollectiveError, RanksDisagree
from tests.collectives.worlds import KINDS, MAKERS
from tests.support.world import run_ranks


def f32(*shape):
    return torch.ones(shape)


def sgd(*counts):
    groups = [{"params": [f32(1).requires_grad_() for _ in range(count)]} for count in counts]
    return torch.optim.SGD(groups, lr=0.1)


# What rank 0 does, what the others do, and what all must say of either.
CASES = {
    "type": (
        lambda: hvd.allreduce(f32(4)),
        lambda: hvd.allreduce(f32(4).double()),
        ("float32[4]", "float64[4]"),
    ),
    "integer type of the same size": (
        lambda: hvd.allreduce(torch.ones(4, dtype=torch.int32), op=hvd.Sum),
        lambda: hvd.allreduce(f32(4), op=hvd.Sum),
        ("int32[4]", "float32[4]"),
    ),
    "size": (
        lambda: hvd.allreduce(f32(1000)),
        lambda: hvd.allreduce(f32(10)),
        ("float32[1000]", "float32[10]"),
    ),
    "shape of the same size": (
        lambda: hvd.allreduce(f32(2, 3)),
        lambda: hvd.allreduce(f32(3, 2)),
        ("float32[2, 3]", "float32[3, 2]"),
    ),
    "nothing here, something there": (
        lambda: hvd.allreduce(f32(0)),
        lambda: hvd.allreduce(f32(2)),
        ("float32[0]", "float32[2]"),
    ),
    "reduction": (
        lambda: hvd.allreduce(f32(4), op=hvd.Sum),
        lambda: hvd.allreduce(f32(4), op=hvd.Max),
        ("allreduce (sum)", "allreduce (max)"),
    ),
    "compression": (
        lambda: hvd.allreduce(f32(4), compression=hvd.Compression.fp16),
        lambda: hvd.allreduce(f32(4)),
        ("float16[4]", "float32[4]"),
    ),
    "name": (
        lambda: hvd.allreduce(f32(1), name="loss"),
        lambda: hvd.allreduce(f32(1), name="accuracy\n"),
        ("'loss'", r"'accuracy\n'"),
    ),
    "one of many tensors": (
        lambda: hvd.grouped_allreduce([f32(3)] * 300),
        lambda: hvd.grouped_allreduce([f32(3)] * 299 + [f32(4)]),
        ("allreduce (average) of 300 tensors", "tensor 299 is float32[3]", "float32[4]"),
    ),
    "fewer tensors": (
        lambda: hvd.grouped_allreduce([f32(3)] * 3),
        lambda: hvd.grouped_allreduce([f32(3)] * 2),
        ("3 tensors", "2 tensors"),
    ),
    "operation": (
        lambda: hvd.allreduce(f32(4)),
        lambda: hvd.broadcast(f32(4), 0),
        ("allreduce (average) of float32[4]", "broadcast from rank 0 of float32[4]"),
    ),
    "begun only": (
        lambda: hvd.allreduce_async_(f32(4)),
        lambda: hvd.allgather_async(f32(4)),
        ("allreduce (average) of float32[4]", "allgather of float32[*]"),
    ),
    "root": (
        lambda: hvd.broadcast_(f32(4), 0),
        lambda: hvd.broadcast_(f32(4), 1),
        ("from rank 0", "from rank 1"),
    ),
    "type of a broadcast": (
        lambda: hvd.broadcast(f32(4), 0),
        lambda: hvd.broadcast(torch.ones(4, dtype=torch.int64), 0),
        ("float32[4]", "int64[4]"),
    ),
    "later dimension": (
        lambda: hvd.allgather(f32(2, 3)),
        lambda: hvd.allgather(f32(7, 4)),
        ("float32[*, 3]", "float32[*, 4]"),
    ),
    "type of rows": (
        lambda: hvd.alltoall(f32(6, 2)),
        lambda: hvd.alltoall(f32(6, 2).half()),
        ("alltoall of float32[*, 2]", "float16[*, 2]"),
    ),
    "rows to reduce": (
        lambda: hvd.reducescatter(f32(6, 2)),
        lambda: hvd.reducescatter(f32(5, 2)),
        ("reducescatter (average) of float32[6, 2]", "float32[5, 2]"),
    ),
    "barrier": (hvd.barrier, lambda: hvd.allreduce(f32(1)), ("barrier", "allreduce")),
    "root of an object": (
        lambda: hvd.broadcast_object({"a": 1}, 0),
        lambda: hvd.broadcast_object({"a": 1}, 1),
        ("broadcast_object from rank 0", "broadcast_object from rank 1"),
    ),
    "objects": (
        lambda: hvd.allgather_object("a"),
        lambda: hvd.broadcast_object("a"),
        ("allgather_object", "broadcast_object from rank 0"),
    ),
    "parameters": (
        lambda: hvd.broadcast_parameters(torch.nn.Linear(3, 2).state_dict()),
        lambda: hvd.broadcast_parameters(torch.nn.Linear(3, 4).state_dict()),
        ("'bias' is float32[2]", "'bias' is float32[4]"),
    ),
    "names of parameters": (
        lambda: hvd.broadcast_parameters({"a": f32(2)}),
        lambda: hvd.broadcast_parameters({"b": f32(2)}),
        ("'a' is float32[2]", "'b' is float32[2]"),
    ),
    "missing parameters": (
        lambda: hvd.broadcast_parameters({"a": f32(2), "b": f32(2)}),
        lambda: hvd.broadcast_parameters({"a": f32(2)}),
        ("'b' is float32[2]", "no more"),
    ),
    "groups of an optimizer": (
        lambda: hvd.broadcast_optimizer_state(sgd(2, 1)),
        lambda: hvd.broadcast_optimizer_state(sgd(3)),
        ("groups of 2, 1 parameters", "groups of 3 parameters"),
    ),
    "check for host updates": (
        lambda: one_of_all(current(), True),
        lambda: hvd.allreduce(f32(1)),
        ("host updates", "allreduce"),
    ),
}


def caught(function):
    with pytest.raises(RanksDisagree) as error:
        function()
    return str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_differ_all_get_the_error_and_go_on(kind):
    def rank_main(context):
        messages = []
        for first, others, _ in CASES.values():
            messages.append(caught(others if context.rank else first))
            assert hvd.allreduce(f32(1), op=hvd.Sum).item() == context.size
        return messages

    here, *rest = run_ranks(3, rank_main, make=MAKERS[kind])
    assert all(there == here for there in rest)
    for (case, (*_, words)), message in zip(CASES.items(), here, strict=True):
        first, second = message.index("rank 0: "), message.index("ranks 1, 2: ")
        assert first < second, case
        for word in words:
            assert word in message, case


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_differ_find_their_tensors_as_they_were(kind):
    def rank_main(context):
        tensor = torch.full((3 + context.rank,), float(context.rank))
        for function in (hvd.allreduce_, lambda it: hvd.broadcast_(it, 0)):
            caught(lambda: function(tensor))  # noqa: B023
        assert tensor.tolist() == [float(context.rank)] * (3 + context.rank)

    run_ranks(2, rank_main, make=MAKERS[kind])


def test_each_of_many_sides_is_named_with_its_ranks():
    def rank_main(context):
        return caught(lambda: hvd.allreduce(f32(context.rank // 2 + 1)))

    message = run_ranks(5, rank_main)[4]
    sides = re.findall(r"(ranks? [\d, ]+): allreduce \(average\) of float32\[(\d)\]", message)
    assert sides == [("ranks 0, 1", "1"), ("ranks 2, 3", "2"), ("rank 4", "3")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_dies_while_others_compare_ends_the_comparison(kind):
    def rank_main(context):
        if context.rank == 0:
            context.communicator().abort("rank 0 is gone")
            return
        with pytest.raises(CollectiveError) as error:
            hvd.allreduce(f32(1))
        assert not isinstance(error.value, RanksDisagree)

    run_ranks(2, rank_main, make=MAKERS[kind])


def test_a_user_operation_meets_gradients_in_shared_memory():
    """Those are not compared in words: the segment finds out, and breaks."""

    def rank_main(context):
        communicator = context.communicator()
        operations = (
            lambda: hvd.allreduce(f32(2), name="loß"),
            lambda: communicator.allreduce(torch.ones(70000)),
        )
        message = caught(operations[context.rank])
        assert caught(hvd.barrier) == message  # it stays broken
        return message

    for message in run_ranks(2, rank_main, make=MAKERS["shm"]):
        assert "rank 0 is in allreduce 'lo?' (average) of float32[2]" in message
        assert "rank 1 is in allreduce (sum) of 70000 float32 values" in message
