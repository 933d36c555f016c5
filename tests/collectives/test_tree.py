"""Sums along a reduction tree: the same bits for any number of ranks and any blocks."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from nbelastic.collectives import Communicator, buffers
from nbelastic.collectives.gloo import tree
from nbelastic.collectives.negotiation import NegotiatingCommunicator
from nbelastic.collectives.reduction_tree import IDENTITY, Blocks, Node, additions, fold
from nbelastic.errors import CollectiveError, RanksDisagree
from tests.collectives.test_operations import REDUCED
from tests.collectives.worlds import MAKERS, PATIENCE_S, World, needs_core

SHAPES = [(3, 5), (0,), (1,), (7,)]
LARGE = [(70_001,), (31,)]
AT_ONCE = pytest.mark.parametrize("at_once", [True, False], ids=["waited", "begun"])


def leaf(v, shapes, dtype):
    """What micro-batch `v` has: values of many magnitudes, so that the order shows in the sum."""
    generator = np.random.default_rng([v, len(shapes)])
    found = []
    for shape in shapes:
        values = generator.standard_normal(shape) * 2.0 ** generator.integers(-9, 9, shape)
        if not dtype.is_floating_point:
            values = np.abs(values) % 100  # a sum beyond the type's range wraps around
        found.append(torch.from_numpy(np.asarray(values)).to(dtype))
    return found


def add(left, right):
    return [a + b for a, b in zip(left, right, strict=True)]


def node_sum(node, leaves, make):
    """Sum the leaves of a node as one rank does by itself."""
    order = additions([Node(v, v + 1) for v in range(*node)], leaves)
    (total,) = fold([make(v) for v in range(*node)], order, add)
    return total


def bits(tensors):
    """Return the bits of tensors, with one pattern for all that is not a number."""
    found = []
    for tensor in tensors:
        plain = tensor.clone(memory_format=torch.contiguous_format)
        if plain.dtype.is_floating_point:
            plain[plain.isnan()] = torch.nan
        found.append(plain.view(-1).view(torch.uint8).numpy().tobytes())
    return found


def blocks_for(size, leaves):
    """Blocks of floor and ceiling, and some that are not: with nothing, and cut at odd places."""
    yield Blocks.even(leaves, size)
    rest = leaves - (size - 1) if leaves >= size else 0
    if rest > 1:
        yield Blocks((1,) * (size - 1) + (rest,))
        yield Blocks((rest,) + (1,) * (size - 1))
    if size > 1:
        yield Blocks((0,) * (size - 1) + (leaves,))
        yield Blocks((*Blocks.even(leaves, size - 1).quotas, 0))


def summed(communicator, blocks, make, *, at_once=True):
    """Return what a rank receives, in outputs of its own if its block is empty."""
    nodes = [node_sum(node, blocks.leaves, make) for node in blocks.covers[communicator.rank]]
    outputs = None
    if not nodes:
        outputs = [torch.full_like(each, 7) for each in make(0)]
    if at_once:
        communicator.allreduce_tree(nodes, blocks, outputs)
    else:
        communicator.allreduce_tree_async(nodes, blocks, outputs).wait()
    return nodes[0] if outputs is None else outputs


def cases_for(size):
    """Yield blocks, shapes and a type: all blocks with one type, all types with even blocks."""
    for leaves in (1, 5, 8):
        for number, blocks in enumerate(blocks_for(size, leaves)):
            yield blocks, SHAPES, torch.float32
            if number == 0:
                yield blocks, LARGE, torch.float32
    for dtype in REDUCED:
        yield Blocks.even(6, size), SHAPES, dtype


@AT_ONCE
def test_sums_have_the_bits_of_the_tree(world, at_once):
    cases = list(cases_for(world.size))

    def rank_main(communicator):
        return [
            bits(summed(communicator, blocks, make(shapes, dtype), at_once=at_once))
            for blocks, shapes, dtype in cases
        ]

    def make(shapes, dtype):
        return functools.partial(leaf, shapes=shapes, dtype=dtype)

    wanted = [
        bits(node_sum(Node(0, blocks.leaves), blocks.leaves, make(shapes, dtype)))
        for blocks, shapes, dtype in cases
    ]
    for found in world.run(rank_main):
        for case, actual, expected in zip(cases, found, wanted, strict=True):
            assert actual == expected, case


def test_sums_mix_with_other_operations_in_flight(world):
    """Each in its own order, and messages of users in theirs."""
    blocks = Blocks.even(8, world.size)

    def rank_main(communicator):
        me, size = communicator.rank, communicator.size
        sums, others, handles = [], [], []
        for number in range(6):
            nodes = [[torch.full((1000,), float(number))] for _ in blocks.covers[me]]
            plain = torch.full((1000,), float(number))
            handles.append(communicator.allreduce_tree_async(nodes, blocks))
            handles.append(communicator.allreduce_async(plain))
            if size > 1:
                received = torch.zeros(3)
                handles.append(communicator.send_async(torch.full((3,), me + 0.5), (me + 1) % size))
                handles.append(communicator.receive_async(received, (me - 1) % size))
                others.append((received, (me - 1) % size + 0.5))
            sums.append((nodes[0][0], number * sum(map(len, blocks.covers))))
            others.append((plain, number * size))
        for handle in handles:
            handle.wait()
            assert handle.done()
        return [(tensor.unique().tolist(), float(value)) for tensor, value in sums + others]

    for outcomes in world.run(rank_main):
        for found, expected in outcomes:
            assert found == [expected]


def test_outputs_apart_leave_nodes_as_they_are(world):
    blocks = Blocks.even(6, world.size)

    def rank_main(communicator):
        nodes = [[torch.ones(40_000)] for _ in blocks.covers[communicator.rank]]
        output = torch.zeros(40_000)
        communicator.allreduce_tree(nodes, blocks, [output])
        return [each.unique().tolist() for node in nodes for each in node], output.unique().tolist()

    total = float(sum(map(len, blocks.covers)))
    for nodes, output in world.run(rank_main):
        assert all(each == [1.0] for each in nodes)
        assert output == [total]


def test_an_absent_value_changes_no_bit_of_the_others(world):
    """A plain zero would: the sum of it and a negative zero is a positive one."""
    blocks = Blocks.even(8, world.size)
    special = torch.tensor([-0.0, 0.0, 1e-45, -1e-45, float("inf"), -float("inf"), 1.5])

    def rank_main(communicator):
        me = communicator.rank
        nodes = [[torch.full_like(special, IDENTITY)] for _ in blocks.covers[me]]
        if me == communicator.size - 1:
            nodes[0][0].copy_(special)
        communicator.allreduce_tree(nodes, blocks)
        return bits(nodes[0])

    assert world.run(rank_main) == [bits([special])] * world.size


def test_tensors_in_other_memory_are_summed_through_a_copy(world, monkeypatch):
    """As on an accelerator: see test_shm."""
    monkeypatch.setattr(buffers, "_is_on_host", lambda tensor: False)
    blocks = Blocks.even(3, world.size)

    def rank_main(communicator):
        nodes = [[torch.ones(3), torch.ones(2)] for _ in blocks.covers[communicator.rank]]
        outputs = [torch.zeros(3), torch.zeros(2)]
        communicator.allreduce_tree_async(nodes, blocks, outputs).wait()
        return [each.tolist() for each in outputs]

    total = float(sum(map(len, blocks.covers)))
    assert world.run(rank_main) == [[[total] * 3, [total] * 2]] * world.size


def test_a_share_of_many_chunks_needs_memory_for_two(world, monkeypatch):
    """Over Gloo; with others it is one more sum."""
    monkeypatch.setattr(tree, "_CHUNK_BYTES", 4096)
    make = functools.partial(leaf, shapes=[(30_011,)], dtype=torch.float32)
    blocks = Blocks.even(6, world.size)
    expected = bits(node_sum(Node(0, 6), 6, make))
    assert world.run(lambda c: bits(summed(c, blocks, make))) == [expected] * world.size


def test_a_transport_without_an_operation_of_its_own(world):
    """Two exchanges that all communicators have come to the same bits."""
    blocks = Blocks.even(5, world.size)
    make = functools.partial(leaf, shapes=LARGE, dtype=torch.float32)

    def rank_main(communicator):
        nodes = [node_sum(node, 5, make) for node in blocks.covers[communicator.rank]]
        outputs = make(0)
        Communicator.allreduce_tree_async(communicator, nodes, blocks, outputs).wait()
        return bits(outputs)

    expected = bits(node_sum(Node(0, 5), 5, make))
    assert world.run(rank_main) == [expected] * world.size


@needs_core
def test_ranks_with_other_blocks_raise_the_same_error():
    with World(MAKERS["shm"], 2) as world:
        blocks = [Blocks((4, 4)), Blocks((2, 2))]
        futures = [
            world.start(rank, lambda c: c.allreduce_tree([[torch.ones(3)]], blocks[c.rank]))
            for rank in range(2)
        ]
        errors = [future.exception(PATIENCE_S) for future in futures]
        assert all(isinstance(error, RanksDisagree) for error in errors), errors
        assert str(errors[0]) == str(errors[1])
        assert "blocks of 4, 4 leaves" in str(errors[0])


class _Alternating(NegotiatingCommunicator):
    """A communicator whose neighbours are on different hosts."""

    def __init__(self, rendezvous):
        super().__init__(rendezvous, host=f"host-{rendezvous.rank % 2}")


@needs_core
def test_hosts_whose_blocks_do_not_follow_each_other():
    blocks = Blocks((2, 1, 3, 2))
    with World(_Alternating, 4) as world:
        assert world[0].name == "hierarchical"
        make = functools.partial(leaf, shapes=LARGE, dtype=torch.float32)
        expected = bits(node_sum(Node(0, 8), 8, make))
        assert world.run(lambda c: bits(summed(c, blocks, make))) == [expected] * 4


@pytest.mark.parametrize("moment", ["before", "during"])
def test_a_peer_that_is_cut_off_fails_the_sum(pair, moment):
    """Waiting ranks are freed at once, in whatever chunk of the sum they are."""
    blocks = Blocks((1, 2))

    def rank_main(communicator):
        nodes = [[torch.ones(4_000_000)] for _ in blocks.covers[communicator.rank]]
        communicator.allreduce_tree(nodes, blocks)

    waiting = pair.start(0, rank_main)
    pair.wait_until_waiting([0])
    if moment == "during":
        other = pair.start(1, rank_main)
        pair[1].abort("in the middle")
        assert isinstance(other.exception(PATIENCE_S), (CollectiveError, type(None)))
    else:
        pair[1].abort("before it began")
    error = waiting.exception(PATIENCE_S)
    if moment == "before" or error is not None:
        assert isinstance(error, CollectiveError)
        again = pair.start(0, lambda c: c.allreduce(torch.ones(3)))
        assert isinstance(again.exception(PATIENCE_S), CollectiveError)
