"""Sums along a reduction tree: the same bits for any number of ranks and any blocks."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from nbelastic.collectives.reduction_tree import Blocks, Node, additions, fold
from tests.collectives.test_operations import REDUCED

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
