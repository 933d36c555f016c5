"""Sums along a reduction tree: the same bits for any number of ranks and any blocks."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nbelastic.collectives import tree_exchange
from nbelastic.collectives.reduction_tree import Blocks, Node, additions, fold
from tests.collectives.test_negotiation import on
from tests.collectives.test_operations import REDUCED
from tests.collectives.worlds import World, eventually, needs_core
from tests.support.bits import any_bits, bits, numpy_sum


def node_sum(leaves, node=None, add=torch.add):
    """Sum the leaves of a node, by default of the whole tree, as one rank does by itself."""
    its = range(*node) if node else range(len(leaves))
    order = additions([Node(leaf, leaf + 1) for leaf in its], len(leaves))
    (total,) = fold([leaves[leaf] for leaf in its], order, add)
    return total.clone()


def begin(communicator, blocks, leaves):
    """Begin a sum; return its handle and where it comes: the first node, or outputs without one."""
    nodes = [[node_sum(leaves, node)] for node in blocks.covers[communicator.rank]]
    outputs = nodes[0] if nodes else [torch.full_like(leaves[0], 7)]
    return communicator.allreduce_tree_async(nodes, blocks, outputs), outputs[0]


def summed(communicator, blocks, leaves):
    handle, output = begin(communicator, blocks, leaves)
    handle.wait()
    return bits(output)


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
@example(sums=[([0, 0, 0, 0, 1], "float32", [0, 9], False, (), 0)], chunk=1024)  # a host has none
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
        cases.append((blocks, leaves, cuts, apart, inside))
        wanted.append(bits(node_sum(leaves, add=numpy_sum)))

    def rank_main(communicator):
        begun = []
        for blocks, leaves, cuts, apart, inside in cases:
            nodes = []
            for node in blocks.covers[communicator.rank]:
                value = node_sum(leaves, node, numpy_sum)
                if communicator.rank % 2 in inside:  # in memory that need not be copied
                    value = communicator.empty(len(value), value.dtype).copy_(value)
                parts = [value[begin:end] for begin, end in itertools.pairwise(cuts)]
                nodes.append(parts or [value])
            outputs = None
            if apart or not nodes:
                lengths = [end - begin for begin, end in itertools.pairwise(cuts)] or [0]
                outputs = [torch.ones(length).to(leaves[0].dtype) for length in lengths]
            handle = communicator.allreduce_tree_async(nodes, blocks, outputs)
            kept = [] if outputs is None else [each for node in nodes for each in node]
            begun.append(
                (handle, nodes[0] if outputs is None else outputs, kept, [*map(bits, kept)])
            )
        for handle, _, kept, before in begun:
            handle.wait()
            assert [*map(bits, kept)] == before
        return [bits(torch.cat([part.view(-1) for part in parts])) for _, parts, *_ in begun]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_exchange, "_CHUNK_BYTES", chunk)
        assert world.run(rank_main) == [wanted] * size


def test_subnormal_numbers_are_flushed_if_the_rank_flushes_them(make):
    """By whichever thread adds: a training on one rank would flush them, too."""
    blocks = Blocks.even(6, 2)
    # Normal numbers whose sums are subnormal.
    values = 1.0 + torch.rand((6, 9000), generator=torch.Generator().manual_seed(0))
    leaves = [*(values * torch.finfo(torch.float32).tiny * torch.tensor([[1], [-1]]).repeat(3, 1))]

    def rank_main(communicator):
        torch.set_flush_denormal(True)
        handle, output = begin(communicator, blocks, leaves)
        if not communicator.capabilities.devices:  # a fake's stream adds when somebody waits for it
            eventually(handle.done, "done()")
        handle.wait()
        return bits(output), bits(node_sum(leaves))

    with World(make, 2) as world:
        ((one, wanted),) = {*world.run(rank_main)}
    assert one == wanted != bits(node_sum(leaves))


def test_many_nodes_need_no_more_memory_than_a_few(monkeypatch):
    """Blocks at odd places of a large tree have many nodes, and each has a chunk on its way."""
    monkeypatch.setattr(tree_exchange, "_ROOM_BYTES", 1 << 20)
    monkeypatch.setattr(tree_exchange, "_LEAST_BYTES", 1 << 10)
    blocks = Blocks((31, 62, 35))
    assert tree_exchange.chunk_length(blocks, 4) * 4 * 2 * len(blocks.order) <= 1 << 20


@needs_core
def test_hosts_whose_blocks_do_not_follow_each_other():
    leaves = [*torch.randn(8, 70_001)]
    with World(on("abab"), 4) as world:
        assert world[0].name == "hierarchical"
        found = world.run(lambda c: summed(c, Blocks((2, 1, 3, 2)), leaves))
        assert found == [bits(node_sum(leaves))] * 4
