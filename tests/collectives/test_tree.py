"""Sums along a reduction tree: the same bits for any number of ranks and any blocks."""

import contextlib
import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbelastic.collectives import RendezvousServer, tree_exchange
from nbelastic.collectives.gloo import communicator as over_gloo
from nbelastic.collectives.reduction_tree import Blocks, Node, additions, fold
from tests.collectives.test_negotiation import on
from tests.collectives.test_operations import REDUCED
from tests.collectives.worlds import (
    BIND,
    MAKERS,
    PATIENCE_S,
    World,
    eventually,
    failure,
    needs_core,
)
from tests.support.bits import any_bits, numpy_sum
from tests.support.bits import bits as bits_of


def leaf(v, counts=(70_001, 31)):
    """What micro-batch `v` has: values of many magnitudes, so that the order shows in the sum."""
    generator = np.random.default_rng([v, len(counts)])
    return [
        torch.from_numpy(
            generator.standard_normal(count) * 2.0 ** generator.integers(-9, 9, count)
        ).float()
        for count in counts
    ]


def add(left, right):
    return [a + b for a, b in zip(left, right, strict=True)]


def node_sum(node, leaves, make=leaf):
    """Sum the leaves of a node as one rank does by itself."""
    order = additions([Node(v, v + 1) for v in range(*node)], leaves)
    (total,) = fold([make(v) for v in range(*node)], order, add)
    return total


def bits(tensors):
    """Return the bits of tensors, with one pattern for all that is not a number."""
    return [bits_of(tensor) for tensor in tensors]


def begin(communicator, blocks, make=leaf):
    """Begin a sum; return its handle and where it comes: the first node, or outputs without one."""
    nodes = [node_sum(node, blocks.leaves, make) for node in blocks.covers[communicator.rank]]
    outputs = None if nodes else [torch.full_like(each, 7) for each in make(0)]
    handle = communicator.allreduce_tree_async(nodes, blocks, outputs)
    return handle, nodes[0] if outputs is None else outputs


def summed(communicator, blocks, make=leaf):
    handle, outputs = begin(communicator, blocks, make)
    handle.wait()
    return bits(outputs)


@st.composite
def tree_sums(draw):
    """Some sums that are begun one after the other: leaves of each, types, and cuts of a vector."""
    sums = []
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.sampled_from([0, 1, 15, 16, 17, 1000, 4999, 70_001, 300_001]))
        most = st.integers(0, 40 if count < 5000 else 4 if count < 100_000 else 1)
        quotas = draw(st.lists(most, min_size=5, max_size=5).filter(any))
        cuts = draw(st.lists(st.integers(0, count), max_size=3))
        name = draw(st.sampled_from([str(dtype).removeprefix("torch.") for dtype in REDUCED]))
        apart, inside = draw(st.booleans()), draw(st.sampled_from([(), (0,), (0, 1)]))
        seed = draw(st.integers(0, 2**32))
        sums.append((quotas, name, sorted({0, *cuts, count}), apart, inside, seed))
    return sums


@settings(max_examples=10, deadline=None)
@given(sums=tree_sums(), chunk=st.sampled_from([1024, 4 << 20]))
def test_any_sums_in_a_row_are_numpys(world, sums, chunk):
    """Any blocks, also empty ones; any types, lengths, bits and memory; into nodes or outputs."""
    size = world.size
    cases, wanted = [], []
    for quotas, name, cuts, apart, inside, seed in sums:
        blocks = Blocks((*quotas[: size - 1], sum(quotas[size - 1 :])))
        leaves = [
            any_bits(np.random.default_rng([seed, leaf]), cuts[-1], name)
            for leaf in range(blocks.leaves)
        ]
        alone = [Node(leaf, leaf + 1) for leaf in range(blocks.leaves)]
        (total,) = fold(leaves, additions(alone, blocks.leaves), numpy_sum)
        cases.append((blocks, leaves, cuts, apart, inside))
        wanted.append(bits_of(total))

    def rank_main(communicator):
        begun = []
        for blocks, leaves, cuts, apart, inside in cases:
            nodes = []
            for node in blocks.covers[communicator.rank]:
                alone = [Node(leaf, leaf + 1) for leaf in range(*node)]
                (value,) = fold(leaves[slice(*node)], additions(alone, blocks.leaves), numpy_sum)
                value = value.clone()
                if communicator.rank % 2 in inside:  # in memory that need not be copied
                    value = communicator.empty(len(value), value.dtype).copy_(value)
                parts = [value[begin:end] for begin, end in itertools.pairwise(cuts)]
                nodes.append(parts or [value])
            outputs = None
            if apart or not nodes:
                lengths = [end - begin for begin, end in itertools.pairwise(cuts)] or [0]
                outputs = [torch.ones(length).to(leaves[0].dtype) for length in lengths]
            handle = communicator.allreduce_tree_async(nodes, blocks, outputs)
            given = [bits(node) for node in nodes] if outputs is not None else []
            begun.append((handle, nodes[0] if outputs is None else outputs, nodes, given))
        for handle, _, nodes, given in begun:
            handle.wait()
            assert given == [bits(node) for node in nodes if given]
        return [bits_of(torch.cat([part.view(-1) for part in parts])) for _, parts, *_ in begun]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_exchange, "_CHUNK_BYTES", chunk)
        assert world.run(rank_main) == [wanted] * size


def test_subnormal_numbers_are_flushed_if_the_rank_flushes_them(world):
    """By whichever thread adds: a training on one rank would flush them, too."""
    blocks = Blocks.even(6, world.size)

    def make(v):
        """Return normal numbers whose sums are subnormal, or are not."""
        values = 1.0 + torch.rand(9000, generator=torch.Generator().manual_seed(v))
        return [values * torch.finfo(torch.float32).tiny * (-1) ** v]

    def flushing(flushes, function):
        torch.set_flush_denormal(flushes)
        try:
            return function()
        finally:
            torch.set_flush_denormal(False)

    def rank_main(communicator):
        order = (True, False, True)
        begun = []
        for flushes in order:
            begun.append(flushing(flushes, lambda: begin(communicator, blocks, make)))
            if communicator.capabilities.devices:  # a fake's stream adds when somebody waits for it
                flushing(flushes, begun[-1][0].wait)
        for handle, _ in begun:
            eventually(handle.done, "done()")
            handle.wait()
        return [bits(outputs) for _, outputs in begun]

    one, other = (
        world.do(0, lambda _, f=f: flushing(f, lambda: bits(node_sum(Node(0, 6), 6, make))))
        for f in (True, False)
    )
    assert one != other
    assert world.run(rank_main) == [[one, other, one]] * world.size


def test_many_nodes_need_no_more_memory_than_a_few(monkeypatch):
    """Blocks at odd places of a large tree have many nodes, and each has a chunk on its way."""
    monkeypatch.setattr(tree_exchange, "_ROOM_BYTES", 1 << 20)
    monkeypatch.setattr(tree_exchange, "_LEAST_BYTES", 1 << 10)
    blocks = Blocks((31, 62, 35))
    assert len(blocks.order) > 12
    assert tree_exchange.chunk_length(blocks, 4) * 4 * 2 * len(blocks.order) <= 1 << 20


@needs_core
def test_hosts_whose_blocks_do_not_follow_each_other():
    with World(on("abab"), 4) as world:
        assert world[0].name == "hierarchical"
        found = world.run(lambda c: summed(c, Blocks((2, 1, 3, 2))))
        assert found == [bits(node_sum(Node(0, 8), 8))] * 4


def test_a_rank_that_fails_in_a_sum_over_messages_leaves_nothing_behind(monkeypatch):
    """Whichever exchange is its last, and whatever is still in the sockets of that generation."""
    monkeypatch.setattr(tree_exchange, "_CHUNK_BYTES", 1 << 16)
    original, left = over_gloo.exchange_messages, [3]

    def exchange(owner, abort_signal, rank, *others):
        if rank == 1:
            if left[0] == 0:
                abort_signal.abort("in the middle")
            left[0] -= 1
        return original(owner, abort_signal, rank, *others)

    blocks = Blocks((2, 3, 1))
    make = functools.partial(leaf, counts=[200_003])
    expected = bits(node_sum(Node(0, 6), 6, make))
    with (
        contextlib.closing(RendezvousServer(BIND)) as server,
        World(MAKERS["gloo"], 3, store=server.address) as broken,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(over_gloo, "exchange_messages", exchange)
            futures = [broken.start(r, lambda c: summed(c, blocks, make)) for r in range(3)]
            failure(futures[1])
            broken.abort("as the driver does")
            for future in futures:
                future.exception(PATIENCE_S)
        # The next generation forms while the last one is taken down.
        with World(MAKERS["gloo"], 3, store=server.address) as world:
            assert world.run(lambda c: summed(c, blocks, make)) == [expected] * 3
