"""Sums along a tree in C++, bit for bit against numpy."""

import itertools
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbelastic.collectives.reduction_tree import Blocks, fold
from nbelastic.collectives.shm.segment import tree_of
from nbelastic.native import core
from tests.support.bits import any_bits, bits, numpy_sum

from .test_core import FLOATS, WHOLE, on_all, tensor_in

# 16 KB travel with the post; a window of staging memory is 512 KB, less if ranks have many nodes.
COUNTS = (1, 37, 1_025, 5_000, 140_000, 300_001)


@pytest.fixture(scope="module")
def teams():
    """Groups of one to four ranks."""
    teams = {}
    for size in range(1, 5):
        fd = core.create(size)
        teams[size] = [core.Group(fd, rank, size, 20.0) for rank in range(size)]
        os.close(fd)
    yield teams
    for groups in teams.values():
        for group in groups:
            group.close()


blocks_of = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any).map(tuple).map(Blocks)


@settings(max_examples=40, deadline=None)
@given(
    blocks=blocks_of,
    name=st.sampled_from(FLOATS + WHOLE),
    count=st.sampled_from(COUNTS),
    inside=st.sampled_from(["in", "out", "mixed"]),
    pieces=st.integers(1, 3),
    elsewhere=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_a_sum_has_the_bits_of_numpys(teams, blocks, name, count, inside, pieces, elsewhere, seed):
    generator = np.random.default_rng(seed)
    parts = [[any_bits(generator, count, name) for _ in cover] for cover in blocks.covers]
    (wanted,) = fold([node for each in parts for node in each], blocks.order, numpy_sum)
    cuts = sorted({0, *generator.integers(0, count, pieces - 1).tolist(), count})

    def places(tensor):
        size = tensor.dtype.itemsize
        return [
            (tensor.data_ptr() + begin * size, end - begin)
            for begin, end in itertools.pairwise(cuts)
        ]

    def reduce(rank, group):
        nodes = [part.clone() for part in parts[rank]]
        if inside == "in" or (inside == "mixed" and rank == 1):
            nodes = [tensor_in(group, count, part.dtype).copy_(part) for part in nodes]
        output = nodes[0] if nodes and not elsewhere else torch.zeros(count, dtype=wanted.dtype)
        arguments = places(output), tree_of(blocks), core.TYPES[name]
        group.wait(group.allreduce_tree_async([places(node) for node in nodes], *arguments))
        return bits(output), [bits(node) for node in nodes if node is not output]

    for rank, (found, kept) in enumerate(on_all(teams[blocks.ranks], reduce)):
        assert found == bits(wanted)
        assert kept == [bits(part) for part in parts[rank]][len(parts[rank]) - len(kept) :]


@pytest.mark.parametrize(
    ("leaves", "nodes", "order"),
    [([2], [1, 1], [0]), ([2], [2], [0, 2]), ([2], [2], [0]), ([0], [0], []), ([9], [1], [1])],
)
def test_a_shape_that_is_no_tree_is_refused(leaves, nodes, order):
    with pytest.raises(ValueError, match=r"."):
        core.Tree(leaves, nodes, order)
