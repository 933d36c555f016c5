"""Ranks that do not ask for the same: an error on all of them, before data moves."""

from __future__ import annotations

import re

import pytest
import torch
from torch.optim import SGD

import nbelastic.torch as hvd
from nbelastic.elastic.ranks.context import current, one_of_all
from nbelastic.errors import CollectiveError, RanksDisagree
from tests.collectives.worlds import MAKERS, SOME_KINDS
from tests.support.world import run_ranks


def f32(*shape):
    return torch.ones(shape)


def sgd(*counts, shape=1):
    groups = [{"params": [f32(shape).requires_grad_() for _ in range(count)]} for count in counts]
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
    "factor before": (
        lambda: hvd.allreduce(f32(4), op=hvd.Sum, prescale_factor=0.5),
        lambda: hvd.allreduce(f32(4), op=hvd.Sum),
        ("allreduce (sum of 0.5 times each) of float32[4]", "allreduce (sum) of float32[4]"),
    ),
    "factor after": (
        lambda: hvd.grouped_allreduce([f32(4)], op=hvd.Sum, postscale_factor=0.5),
        lambda: hvd.grouped_allreduce([f32(4)], op=hvd.Sum, postscale_factor=0.25),
        ("allreduce (sum, times 0.5) of float32[4]", "allreduce (sum, times 0.25)"),
    ),
    "factor of rows": (
        lambda: hvd.reducescatter(f32(4), postscale_factor=2.0),
        lambda: hvd.reducescatter(f32(4)),
        ("reducescatter (average, times 2.0) of float32[4]", "reducescatter (average) of"),
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
    "parameters of an optimizer": (
        lambda: hvd.broadcast_optimizer_state(sgd(2)),
        lambda: hvd.broadcast_optimizer_state(sgd(2, shape=3)),
        ("group 0, parameter 0 is float32[1]", "float32[3]"),
    ),
    "kind of optimizer": (
        lambda: hvd.broadcast_optimizer_state(sgd(1)),
        lambda: hvd.broadcast_optimizer_state(torch.optim.Adam([f32(1).requires_grad_()])),
        ("broadcast_optimizer_state of SGD from rank 0", "broadcast_optimizer_state of Adam"),
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


@pytest.mark.parametrize("kind", SOME_KINDS)
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


@pytest.mark.parametrize("kind", SOME_KINDS)
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


@pytest.mark.parametrize("kind", SOME_KINDS)
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
            lambda: hvd.allgather_object("loß"),
            lambda: communicator.allreduce(torch.ones(70000)),
        )
        message = caught(operations[context.rank])
        assert caught(hvd.barrier) == message  # it stays broken
        return message

    for message in run_ranks(2, rank_main, make=MAKERS["shm"]):
        assert "rank 0 is in allgather_object" in message
        assert "rank 1 is in allreduce (sum) of 70000 float32 values" in message


def step(net, optimizer):
    optimizer.zero_grad()
    net(f32(2, 3)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.parametrize(("hidden", "steps"), [((4, 4), 1), ((4, 5), 1), ((4, 5), 2)])
def test_ranks_that_step_different_optimizers_all_get_the_error(kind, hidden, steps):
    """Their gradients may be of one size: then nothing but the sums would be wrong."""

    def rank_main(context):
        nets = [torch.nn.Linear(3, size) for size in hidden]
        pairs = [(net, hvd.DistributedOptimizer(SGD(net.parameters(), lr=0.1))) for net in nets]
        for _ in range(steps):
            for pair in pairs:
                step(*pair)
        before = [parameter.tolist() for net in nets for parameter in net.parameters()]
        message = caught(lambda: step(*pairs[context.rank]))
        assert [parameter.tolist() for net in nets for parameter in net.parameters()] == before
        assert hvd.allreduce(f32(1), op=hvd.Sum).item() == context.size
        return message

    messages = run_ranks(2, rank_main, make=MAKERS[kind])
    assert len(set(messages)) == 1
    assert "rank 0: step() of distributed optimizer 1 (SGD of 2 tensors" in messages[0]
    assert "rank 1: step() of distributed optimizer 2 (SGD of 2 tensors" in messages[0]


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_an_operation_that_meets_gradients_for_adasum_ends_in_an_error(kind):
    """Over Gloo both are gathered, and what is longer than expected ends the process."""

    def rank_main(context):
        net = torch.nn.Linear(3, 2)
        optimizer = hvd.DistributedOptimizer(SGD(net.parameters(), lr=0.1), op=hvd.Adasum)
        for _ in range(2):  # after that nothing but gradients is exchanged
            step(net, optimizer)
        if context.rank:
            return caught(hvd.barrier)
        return caught(lambda: step(net, optimizer))

    first, second = run_ranks(2, rank_main, make=MAKERS[kind])
    assert first == second
    assert "rank 0: the reduction of gradients (adasum) of 11 float32 values" in first
    assert "rank 1: barrier" in first


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_a_rank_with_another_optimizer_that_goes_on_harms_nobody(kind):
    def rank_main(context):
        net = torch.nn.Linear(3, 2)
        op = hvd.Average if context.rank else hvd.Adasum
        optimizer = hvd.DistributedOptimizer(SGD(net.parameters(), lr=0.1), op=op)
        if context.rank:
            with pytest.raises(ValueError, match="not that of rank 0"):
                step(net, optimizer)
        with pytest.raises(CollectiveError):
            step(net, optimizer) if context.rank == 0 else hvd.barrier()

    run_ranks(2, rank_main, make=MAKERS[kind])
