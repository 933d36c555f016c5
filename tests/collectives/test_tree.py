"""Sums along a reduction tree: the same bits for any number of ranks and any blocks."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbelastic.collectives import RendezvousServer, buffers, tree_exchange
from nbelastic.collectives.gloo.communicator import TreeSum
from nbelastic.collectives.negotiation import NegotiatingCommunicator
from nbelastic.collectives.reduction_tree import IDENTITY, Blocks, Node, additions, fold
from nbelastic.errors import CollectiveError, RanksDisagree
from tests.collectives.test_operations import REDUCED
from tests.collectives.worlds import BIND, MAKERS, PATIENCE_S, World, needs_core
from tests.support.bits import any_bits, numpy_sum
from tests.support.bits import bits as bits_of

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
    return [bits_of(tensor) for tensor in tensors]


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


@st.composite
def tree_sums(draw):
    """Some sums that are begun one after the other: leaves of each, types, and cuts of a vector."""
    sums = []
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.sampled_from([0, 1, 15, 16, 17, 1000, 4999, 70_001]))
        most = st.integers(0, 4 if count > 5000 else 40)
        quotas = draw(st.lists(most, min_size=5, max_size=5).filter(any))
        cuts = draw(st.lists(st.integers(0, count), max_size=3))
        name = draw(st.sampled_from([str(dtype).removeprefix("torch.") for dtype in REDUCED]))
        apart, seed = draw(st.booleans()), draw(st.integers(0, 2**32))
        sums.append((quotas, name, sorted({0, *cuts, count}), apart, seed))
    return sums


@settings(max_examples=8, deadline=None)
@given(sums=tree_sums(), chunk=st.sampled_from([1024, 4 << 20]))
def test_any_sums_in_a_row_are_numpys(world, sums, chunk):
    """Any blocks, also empty ones; any types, lengths and bits; into nodes or into outputs."""
    size = world.size
    cases, wanted = [], []
    for quotas, name, cuts, apart, seed in sums:
        blocks = Blocks((*quotas[: size - 1], sum(quotas[size - 1 :])))
        leaves = [
            any_bits(np.random.default_rng([seed, leaf]), cuts[-1], name)
            for leaf in range(blocks.leaves)
        ]
        alone = [Node(leaf, leaf + 1) for leaf in range(blocks.leaves)]
        (total,) = fold(leaves, additions(alone, blocks.leaves), numpy_sum)
        cases.append((blocks, leaves, cuts, apart))
        wanted.append(bits_of(total))

    def rank_main(communicator):
        begun = []
        for blocks, leaves, cuts, apart in cases:
            nodes = []
            for node in blocks.covers[communicator.rank]:
                alone = [Node(leaf, leaf + 1) for leaf in range(*node)]
                (value,) = fold(leaves[slice(*node)], additions(alone, blocks.leaves), numpy_sum)
                parts = [value[begin:end].clone() for begin, end in itertools.pairwise(cuts)]
                nodes.append(parts or [value.clone()])
            outputs = None
            if apart or not nodes:
                lengths = [end - begin for begin, end in itertools.pairwise(cuts)] or [0]
                outputs = [torch.ones(length).to(leaves[0].dtype) for length in lengths]
            handle = communicator.allreduce_tree_async(nodes, blocks, outputs)
            begun.append((handle, nodes[0] if outputs is None else outputs))
        for handle, _ in begun:
            handle.wait()
        return [bits_of(torch.cat([part.view(-1) for part in parts])) for _, parts in begun]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_exchange, "_CHUNK_BYTES", chunk)
        assert world.run(rank_main) == [wanted] * size


def test_subnormal_numbers_are_flushed_if_the_rank_flushes_them(world):
    """By whichever thread adds: a training on one rank would flush them, too."""
    blocks = Blocks.even(6, world.size)
    dtype = torch.float32
    make = functools.partial(small_leaf, dtype=dtype)

    def expected():
        return bits(node_sum(Node(0, 6), 6, make))

    def flushing(function):
        torch.set_flush_denormal(True)
        try:
            return function()
        finally:
            torch.set_flush_denormal(False)

    wanted = world.do(0, lambda _: flushing(expected))
    assert wanted != expected()
    found = world.run(lambda c: flushing(lambda: bits(summed(c, blocks, make))))
    assert found == [wanted] * world.size
    found = world.run(lambda c: bits(summed(c, blocks, make)))
    assert found == [expected()] * world.size


def small_leaf(v, dtype):
    """What micro-batch `v` has: normal numbers whose sums are subnormal, or are not."""
    tiny = torch.finfo(dtype).tiny
    generator = torch.Generator().manual_seed(v)
    return [(1.0 + torch.rand(9000, generator=generator)) * tiny * (-1) ** v]


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
    if "+" in world[0].name:
        pytest.skip("the fake device puts off copies, also those to the host")
    monkeypatch.setattr(buffers, "is_on_host", lambda tensor: False)
    blocks = Blocks.even(3, world.size)

    def rank_main(communicator):
        nodes = [[torch.ones(3), torch.ones(2)] for _ in blocks.covers[communicator.rank]]
        outputs = [torch.zeros(3), torch.zeros(2)]
        communicator.allreduce_tree_async(nodes, blocks, outputs).wait()
        return [each.tolist() for each in outputs]

    total = float(sum(map(len, blocks.covers)))
    assert world.run(rank_main) == [[[total] * 3, [total] * 2]] * world.size


def test_many_nodes_need_no_more_memory_than_a_few(monkeypatch):
    """Blocks at odd places of a large tree have many nodes, and each has a chunk on its way."""
    monkeypatch.setattr(tree_exchange, "_ROOM_BYTES", 1 << 20)
    monkeypatch.setattr(tree_exchange, "_LEAST_BYTES", 1 << 10)
    blocks = Blocks((31, 62, 35))
    assert len(blocks.order) > 12
    assert tree_exchange.chunk_length(blocks, 4) * 4 * 2 * len(blocks.order) <= 1 << 20
    make = functools.partial(leaf, shapes=[(200_003,)], dtype=torch.float32)
    expected = bits(node_sum(Node(0, 128), 128, make))
    with World(MAKERS["gloo"], 3) as world:
        assert world.run(lambda c: bits(summed(c, blocks, make))) == [expected] * 3


def test_a_transport_without_an_operation_of_its_own(world):
    """Two exchanges that all communicators have come to the same bits."""
    blocks = Blocks.even(5, world.size)
    make = functools.partial(leaf, shapes=LARGE, dtype=torch.float32)

    def rank_main(communicator):
        nodes = [node_sum(node, 5, make) for node in blocks.covers[communicator.rank]]
        outputs = make(0)
        tree_exchange.allreduce_tree(communicator, nodes, blocks, outputs).wait()
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


@pytest.mark.parametrize("exchanges", [0, 1, 3, 8])
def test_a_rank_that_fails_in_a_sum_over_messages_leaves_nothing_behind(monkeypatch, exchanges):
    """Whichever exchange is its last, and whatever is still in the sockets of that generation."""
    monkeypatch.setattr(tree_exchange, "_CHUNK_BYTES", 1 << 16)
    original, left = TreeSum._exchange, [exchanges]

    def exchange(self, outputs, inputs):
        if self._rank == 1:
            if left[0] == 0:
                self._abort_signal.abort("in the middle")
            left[0] -= 1
        return original(self, outputs, inputs)

    blocks = Blocks((2, 3, 1))
    make = functools.partial(leaf, shapes=[(200_003,)], dtype=torch.float32)
    expected = bits(node_sum(Node(0, 6), 6, make))
    server = RendezvousServer(BIND)
    try:
        with World(MAKERS["gloo"], 3, store=server.address) as broken:
            with monkeypatch.context() as patch:
                patch.setattr(TreeSum, "_exchange", exchange)
                futures = [broken.start(r, lambda c: summed(c, blocks, make)) for r in range(3)]
                error = futures[1].exception(PATIENCE_S)
                assert isinstance(error, CollectiveError), error
                broken.abort("as the driver does")
                for future in futures:
                    future.exception(PATIENCE_S)
            # The next generation forms while the last one is taken down.
            with World(MAKERS["gloo"], 3, store=server.address) as world:
                assert world.run(lambda c: bits(summed(c, blocks, make))) == [expected] * 3
    finally:
        server.close()


@needs_core
@pytest.mark.parametrize("stage", ["before", "after"])
@pytest.mark.parametrize("victim", [0, 2, 3])
def test_an_abort_between_the_stages_of_a_sum_frees_all_ranks(stage, victim):
    blocks = Blocks((2, 1, 3, 1))
    make = functools.partial(leaf, shapes=LARGE, dtype=torch.float32)
    expected = bits(node_sum(Node(0, 7), 7, make))
    with World(MAKERS["hierarchical"], 4) as broken:
        across = broken[victim]._stages._cross
        original = across.allreduce_tree

        def allreduce_tree(*args):
            if stage == "after":
                original(*args)
            broken[victim].abort("between two stages")
            if stage == "before":
                original(*args)

        across.allreduce_tree = allreduce_tree
        futures = [broken.start(r, lambda c: summed(c, blocks, make)) for r in range(4)]
        assert isinstance(futures[victim].exception(PATIENCE_S), CollectiveError)
        broken.abort("as the driver does")
        for future in futures:
            error = future.exception(PATIENCE_S)
            assert error is None or isinstance(error, CollectiveError), error
        with World(MAKERS["hierarchical"], 4) as world:
            assert world.run(lambda c: bits(summed(c, blocks, make))) == [expected] * 4
