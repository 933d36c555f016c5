"""Ranks that do not ask for the same: an error on all of them, before data moves."""

import pytest
import torch
from torch.optim import SGD

import nbelastic.torch as hvd
from nbelastic.elastic.ranks.context import current, one_of_all
from nbelastic.errors import RanksDisagree
from tests.collectives.worlds import SOME_KINDS
from tests.torch.nets import bits
from tests.torch.ranks import on_ranks


def f32(*shape):
    return torch.ones(shape)


def sgd(*counts):
    groups = [{"params": [f32(1).requires_grad_() for _ in range(count)]} for count in counts]
    return SGD(groups, lr=0.1)


def adam():
    return torch.optim.Adam([f32(1).requires_grad_()])


def call(function):
    return function()


NONE, FP16 = hvd.Compression.none, hvd.Compression.fp16
# What ranks do with a value, that of rank 0 and of the others, and what all must say of either.
CASES = [
    (lambda it: hvd.allreduce(f32(4).to(it)), (torch.float, torch.double), "float32[4]|float64[4]"),
    (lambda it: hvd.allreduce(f32(*it)), ((2, 3), (3, 2)), "float32[2, 3]|float32[3, 2]"),
    (
        lambda it: hvd.allreduce(f32(4), op=it),
        (hvd.Sum, hvd.Max),
        "allreduce (sum)|allreduce (max)",
    ),
    (
        lambda it: hvd.grouped_allreduce([f32(4)], op=hvd.Sum, postscale_factor=it),
        (0.5, 0.25),
        "allreduce (sum, times 0.5) of float32[4]|allreduce (sum, times 0.25)",
    ),
    (
        lambda it: hvd.allreduce(f32(4), op=hvd.Sum, prescale_factor=it),
        (0.5, 1.0),
        "allreduce (sum of 0.5 times each) of float32[4]|allreduce (sum) of",
    ),
    (lambda it: hvd.allreduce(f32(4), compression=it), (FP16, NONE), "float16[4]|float32[4]"),
    (lambda it: hvd.allreduce(f32(1), name=it), ("loss", "rate\n"), r"'loss'|'rate\n'"),
    (
        lambda it: hvd.grouped_allreduce([f32(3)] * 299 + [f32(it)]),
        (3, 4),
        "allreduce (average) of 300 tensors|tensor 299 is float32[3]|float32[4]",
    ),
    (
        call,
        (lambda: hvd.allreduce(f32(4)), lambda: hvd.broadcast(f32(4), 0)),
        "allreduce (average) of float32[4]|broadcast from rank 0 of float32[4]",
    ),
    (lambda it: hvd.broadcast_(f32(4), it), (0, 1), "from rank 0|from rank 1"),
    (lambda it: hvd.allgather(f32(*it)), ((2, 3), (7, 4)), "float32[*, 3]|float32[*, 4]"),
    (lambda it: hvd.reducescatter(f32(it, 2)), (6, 5), "(average) of float32[6, 2]|float32[5, 2]"),
    (
        lambda it: hvd.sparse_allreduce_async(torch.eye(1, it).to_sparse())(),
        (3, 4),
        "sizes [[1, 3]]|sizes [[1, 4]]",
    ),
    (call, (hvd.barrier, lambda: hvd.allreduce(f32(1))), "barrier|allreduce"),
    (
        lambda it: hvd.broadcast_object({"a": 1}, it),
        (0, 1),
        "broadcast_object from rank 0|broadcast_object from rank 1",
    ),
    (
        lambda it: hvd.broadcast_parameters(torch.nn.Linear(3, it).state_dict()),
        (2, 4),
        "'bias' is float32[2]|'bias' is float32[4]",
    ),
    (
        lambda it: hvd.broadcast_optimizer_state(sgd(*it)),
        ((2, 1), (3,)),
        "groups of 2, 1 parameters|groups of 3 parameters",
    ),
    (
        lambda it: hvd.broadcast_optimizer_state(it()),
        (lambda: sgd(1), adam),
        "broadcast_optimizer_state of SGD from rank 0|broadcast_optimizer_state of Adam",
    ),
    (
        lambda it: hvd.DistributedOptimizer(sgd(it)).step(),
        (2, 3),
        "the same model and options|it trains 2 tensors; rank|it trains 3 tensors",
    ),
    (
        lambda it: hvd.DistributedOptimizer(sgd(2), op=it).step(),
        (hvd.Average, hvd.Sum),
        "op=average, |op=sum, ",
    ),
    (call, (lambda: one_of_all(current(), True), hvd.barrier), "host updates|barrier"),
]


def caught(function):
    with pytest.raises(RanksDisagree) as error:
        function()
    return str(error.value)


@on_ranks(3, kinds=SOME_KINDS)
def test_ranks_that_differ_all_get_the_error_and_go_on(context):
    messages = []
    for function, values, words in CASES:
        message = caught(lambda: function(values[context.rank > 0]))  # noqa: B023
        assert hvd.allreduce(f32(1), op=hvd.Sum).item() == context.size
        assert message.index("rank 0: ") < message.index("ranks 1, 2: "), message
        assert all(each in message for each in words.split("|")), message
        messages.append(message)
    tensor = torch.full((3 + context.rank,), float(context.rank))
    for function in (hvd.allreduce_, lambda it: hvd.broadcast_(it, 0)):
        caught(lambda: function(tensor))  # noqa: B023
    assert tensor.tolist() == [float(context.rank)] * (3 + context.rank)
    return messages


@on_ranks(2, kinds=["shm"])
def test_a_user_operation_meets_gradients_in_shared_memory(context):
    """Those are not compared in words: the segment finds out, and breaks."""
    communicator = context.communicator()
    operations = (
        lambda: hvd.allgather_object("loß"),
        lambda: communicator.allreduce(torch.ones(70000)),
    )
    message = caught(operations[context.rank])
    assert caught(hvd.barrier) == message  # it stays broken
    assert "rank 0 is in allgather_object" in message
    assert "rank 1 is in allreduce (sum) of 70000 float32 values" in message
    return message


def step(net, optimizer):
    optimizer.zero_grad()
    net(f32(2, 3)).sum().backward()
    optimizer.step()


def pair(size, **options):
    net = torch.nn.Linear(3, size)
    return net, hvd.DistributedOptimizer(SGD(net.parameters(), lr=0.1), **options)


@pytest.mark.parametrize(("hidden", "steps"), [((4, 4), 1), ((4, 5), 1), ((4, 5), 2)])
@on_ranks(2, kinds=SOME_KINDS)
def test_ranks_that_step_different_optimizers_all_get_the_error(context, hidden, steps):
    """Their gradients may be of one size: then nothing but the sums would be wrong."""
    pairs = [pair(size) for size in hidden]
    for each in pairs * steps:
        step(*each)
    before = bits([net for net, _ in pairs])
    message = caught(lambda: step(*pairs[context.rank]))
    assert bits([net for net, _ in pairs]) == before
    assert hvd.allreduce(f32(1), op=hvd.Sum).item() == context.size
    assert "rank 0: step() of distributed optimizer 1 (SGD of 2 tensors" in message
    assert "rank 1: step() of distributed optimizer 2 (SGD of 2 tensors" in message
    return message


@on_ranks(2, kinds=SOME_KINDS)
def test_an_operation_that_meets_gradients_for_adasum_ends_in_an_error(context):
    its = pair(2, op=hvd.Adasum)
    for _ in range(2):  # after that nothing but gradients is exchanged
        step(*its)
    message = caught(hvd.barrier if context.rank else lambda: step(*its))
    assert "rank 0: step() of distributed optimizer 1 (SGD)" in message
    assert "rank 1: barrier" in message
    return message
