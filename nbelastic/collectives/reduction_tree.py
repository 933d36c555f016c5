"""Reduction tree: an order of summation that no number of ranks changes.

Floating point addition is not associative, so a sum has the same bits for any number of ranks only
if its order does not depend on them. The order here is a binary tree over V *leaves*, the
micro-batches of a step. A node is a range of leaves ``[begin, end)``; the root is ``[0, V)``. A
node of two leaves or more is the sum of its halves, which meet at ``(begin + end) // 2``. So V need
not be a power of two.

Each rank has a *block* of consecutive leaves, which may be empty. Its largest nodes cover the
block: one node where the block is a node itself, at most ``2 * log2(V)`` otherwise. A rank sums
within these nodes by itself. The ranks then add the nodes of all of them, from left to right, two
whenever they are the halves of a node. So the tree, not the blocks, decides which two are added.

This module is pure: values are whatever the caller's ``add`` takes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

T = TypeVar("T")

IDENTITY = -0.0
"""What an absent value is, because ``x + -0.0`` has the bits of ``x`` for every ``x``.

A plain zero has not: ``-0.0 + 0.0`` is ``0.0``. As an integer it is 0.
"""


class Node(NamedTuple):
    """The leaves from `begin` to `end`, without `end`."""

    begin: int
    end: int

    @property
    def middle(self) -> int:
        """The leaf at which the second half begins."""
        return (self.begin + self.end) // 2


def cover(begin: int, end: int, leaves: int) -> tuple[Node, ...]:
    """Return the largest nodes of a tree that together are the leaves ``[begin, end)``, in order.

    An empty range has none. The tree has so many `leaves`.
    """

    def within(node: Node) -> tuple[Node, ...]:
        if end <= node.begin or node.end <= begin:
            return ()
        if begin <= node.begin and node.end <= end:
            return (node,)
        middle = node.middle
        return within(Node(node.begin, middle)) + within(Node(middle, node.end))

    return within(Node(0, leaves)) if begin < end else ()


def additions(nodes: Sequence[Node], leaves: int) -> tuple[int, ...]:
    """Return the order in which consecutive `nodes` of a tree are added.

    That is for each node the number of additions once its value is on top of a stack, see
    :func:`fold`. What then remains are the values of the largest nodes that cover them all.
    """
    counts = []
    stack: list[Node] = []
    for node in nodes:
        stack.append(node)
        count = 0
        while len(stack) > 1 and _are_halves(stack[-2], stack[-1], leaves):
            right = stack.pop()
            stack[-1] = Node(stack[-1].begin, right.end)
            count += 1
        counts.append(count)
    return tuple(counts)


def _are_halves(left: Node, right: Node, leaves: int) -> bool:
    """Return whether two consecutive nodes are the halves of one."""
    whole = Node(left.begin, right.end)
    return whole.middle == left.end and cover(*whole, leaves) == (whole,)


def fold(values: Iterable[T], order: Iterable[int], add: Callable[[T, T], T]) -> list[T]:
    """Add values of nodes, from left to right, in an order that :func:`additions` returned.

    What remains on the stack is returned: one value if the nodes are the whole tree.
    """
    stack: list[T] = []
    for value, count in zip(values, order, strict=True):
        stack.append(value)
        for _ in range(count):
            right = stack.pop()
            stack[-1] = add(stack[-1], right)
    return stack


@dataclass(frozen=True)
class Blocks:
    """The leaves of each rank, in the order of ranks. Equal on all ranks.

    Some of the quotas, the numbers of leaves, may be zero, not all.
    """

    quotas: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(quota < 0 for quota in self.quotas) or not any(self.quotas):
            raise ValueError(
                f"quotas must be numbers of leaves, not all of them zero; they are {self.quotas}"
            )

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def even(leaves: int, ranks: int) -> Blocks:
        """Return blocks of floor and ceiling: rank ``r`` begins at leaf ``leaves * r // ranks``.

        Each block is a single node where `ranks` is a power of two and divides `leaves`.
        """
        bounds = [leaves * rank // ranks for rank in range(ranks + 1)]
        return Blocks(tuple(end - begin for begin, end in itertools.pairwise(bounds)))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.quotas)

    @functools.cached_property
    def leaves(self) -> int:
        """Number of leaves of the tree, V."""
        return sum(self.quotas)

    @functools.cached_property
    def bounds(self) -> tuple[int, ...]:
        """First leaf of each rank, and V."""
        return tuple(itertools.accumulate(self.quotas, initial=0))

    def block(self, rank: int) -> range:
        """Return the leaves of a rank."""
        return range(self.bounds[rank], self.bounds[rank + 1])

    @functools.cached_property
    def covers(self) -> tuple[tuple[Node, ...], ...]:
        """The nodes that cover each rank's block."""
        return tuple(cover(*bounds, self.leaves) for bounds in itertools.pairwise(self.bounds))

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """Order in which the nodes of all ranks are added; see :func:`fold`."""
        return additions([node for nodes in self.covers for node in nodes], self.leaves)


@functools.lru_cache(maxsize=64)
def merged(blocks: Blocks, groups: tuple[tuple[int, ...], ...]) -> Blocks:
    """Return the leaves of groups of consecutive ranks, like a host's."""
    return Blocks(tuple(sum(blocks.quotas[rank] for rank in ranks) for ranks in groups))
