"""The tree itself: what blocks are made of, and that they do not show in a sum."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nbelastic.collectives.reduction_tree import (
    IDENTITY,
    Blocks,
    Node,
    additions,
    cover,
    fold,
)

quotas = st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any).map(tuple)


def written(left, right):
    return f"({left}+{right})"


def sum_of(node, leaves):
    """Write the sum of a node as one rank forms it."""
    each = [Node(leaf, leaf + 1) for leaf in range(*node)]
    (total,) = fold([str(leaf) for leaf in range(*node)], additions(each, leaves), written)
    return total


def by_halves(begin, end):
    middle = (begin + end) // 2
    return (
        str(begin)
        if end - begin == 1
        else written(by_halves(begin, middle), by_halves(middle, end))
    )


@given(quotas)
def test_no_blocks_change_the_sum(quotas):
    blocks = Blocks(quotas)
    nodes = [sum_of(node, blocks.leaves) for each in blocks.covers for node in each]
    assert fold(nodes, blocks.order, written) == [by_halves(0, blocks.leaves)]


@given(st.integers(1, 200), st.data())
def test_a_cover_has_few_nodes_and_all_leaves(leaves, data):
    begin = data.draw(st.integers(0, leaves))
    end = data.draw(st.integers(begin, leaves))
    nodes = cover(begin, end, leaves)
    assert [leaf for node in nodes for leaf in range(*node)] == [*range(begin, end)]
    assert len(nodes) <= max(1, 2 * math.ceil(math.log2(leaves)))
    assert not any(additions(nodes, leaves)), "no two are the halves of one"


@given(quotas, st.data())
def test_what_a_host_adds_up_are_the_nodes_of_its_block(quotas, data):
    """So hosts may add what their ranks have, before they add over the hosts."""
    blocks = Blocks(quotas)
    cuts = sorted({0, len(quotas), *data.draw(st.lists(st.integers(0, len(quotas))))})
    for first, last in itertools.pairwise(cuts):
        nodes = [node for each in blocks.covers[first:last] for node in each]
        sums = fold(nodes, additions(nodes, blocks.leaves), lambda a, b: Node(a.begin, b.end))
        assert tuple(sums) == cover(blocks.bounds[first], blocks.bounds[last], blocks.leaves)


@given(st.integers(1, 64), st.integers(1, 12))
def test_even_blocks_are_of_floor_and_ceiling(leaves, ranks):
    blocks = Blocks.even(leaves, ranks)
    assert (blocks.leaves, blocks.ranks) == (leaves, ranks)
    assert set(blocks.quotas) <= {leaves // ranks, -(-leaves // ranks)}
    if leaves % ranks == 0 and ranks.bit_count() == 1:
        assert [len(nodes) for nodes in blocks.covers] == [1] * ranks


def test_quotas_without_leaves_are_refused():
    for wrong in ((), (0, 0), (3, -1)):
        with pytest.raises(ValueError, match="numbers of leaves"):
            Blocks(wrong)


def test_adding_the_identity_changes_no_bit():
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    every = every[~every.isnan()]
    for left, right in ((every, IDENTITY), (torch.full_like(every, IDENTITY), every)):
        assert torch.equal((left + right).view(torch.int16), every.view(torch.int16))
    assert (torch.tensor([7, 0, -7]) + torch.full((3,), IDENTITY).int()).tolist() == [7, 0, -7]
