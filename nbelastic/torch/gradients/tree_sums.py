"""Sums of tensors over the micro-batches of a step, on a rank and over ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch

from nbelastic.collectives import Communicator
from nbelastic.collectives.reduction_tree import IDENTITY, Node, cover
from nbelastic.elastic.ranks.step_share import StepShare


@functools.cache
def _joined_in(first: int, second: int, leaves: int) -> Node:
    """Return the smallest node of a tree that has the leaves `first` and `second` > `first`."""
    node = Node(0, leaves)
    while not first < node.middle <= second:
        halves = Node(node.begin, node.middle), Node(node.middle, node.end)
        node = halves[first >= node.middle]
    return node


class MicroBatchSum:
    """Sum of a tensor over the micro-batches of a rank, which arrive in order.

    Two values are added where the tree has a node for them, once both are complete: a binary
    counter. If the step is not exact, the sum is a plain one, in the order of arrival.
    """

    __slots__ = ("_begin", "_leaves", "_stack")

    def __init__(self, share: StepShare) -> None:
        self._leaves = share.micro_batches if share.exact else 0
        self._begin = share.block.start
        self._stack: list[tuple[int, torch.Tensor]] = []

    def __bool__(self) -> bool:
        """Return whether there is a value."""
        return bool(self._stack)

    def add(self, leaf: int, value: torch.Tensor, *, whole: bool = True) -> torch.Tensor:
        """Add the value of a leaf, or a part of the value, given away; return the sum so far."""
        stack = self._stack
        self._join(leaf)  # what could be added only once the leaves between were known to be absent
        if stack and stack[-1][0] == leaf:
            stack[-1][1].add_(value)
        else:
            stack.append((leaf, value))
        self._join(leaf + whole)
        return stack[-1][1]

    def _join(self, done: int) -> None:
        """Add values whose common node is in the block and has no leaves from `done` on."""
        stack, leaves = self._stack, self._leaves
        while len(stack) > 1:
            (first, left), (second, right) = stack[-2:]
            if leaves:
                node = _joined_in(first, second, leaves)
                if node.end > done or node.begin < self._begin:
                    return
            stack[-2:] = [(first, left.add_(right))]

    def finish(self, nodes: Sequence[Node]) -> list[torch.Tensor | None]:
        """Return the value of each of `nodes`, the largest ones in the block; None if absent."""
        found: list[torch.Tensor | None] = [None] * len(nodes)
        for number, node in enumerate(nodes):
            held = [value for leaf, value in self._stack if node.begin <= leaf < node.end]
            if held:
                *rest, total = held  # the later, the smaller their common nodes
                for value in reversed(rest):
                    total = value.add_(total)
                found[number] = total
        self._stack = []
        return found


def sum_over_ranks(
    communicator: Communicator,
    share: StepShare,
    sums: Sequence[MicroBatchSum],
    like: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Return sums over all micro-batches, IDENTITY of none, as `like`; for all ranks."""
    block = share.block
    nodes: Sequence[Node] = ()
    if share.exact:
        nodes = cover(block.start, block.stop, share.micro_batches)
    elif block:
        nodes = (Node(block.start, block.stop),)
    columns = [each.finish(nodes) for each in sums]
    if communicator.size == 1:
        pairs = zip(columns, like, strict=True)
        return [
            torch.full_like(each, IDENTITY, requires_grad=False) if own is None else own
            for (own, *_), each in pairs
        ]
    totals = [*like]
    by_type: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(like):
        by_type.setdefault((tensor.dtype, tensor.device), []).append(index)
    for indices in by_type.values():
        rows = [
            [_value(columns[index][node], like[index]) for index in indices]
            for node in range(len(nodes))
        ]
        # A rank without micro-batches has room for the sums, and nothing to add.
        outputs = rows[0] if rows else [_value(None, like[index]) for index in indices]
        if share.exact:
            # By default the sums replace the first row, which is `outputs`.
            room = None if rows else _numbers(outputs)
            blocks = share.blocks_of(communicator.size)
            communicator.allreduce_tree([*map(_numbers, rows)], blocks, room)
        else:
            communicator.allreduce_coalesced(_numbers(outputs))
        for index, total in zip(indices, outputs, strict=True):
            if like[index].is_contiguous():
                totals[index] = total
            else:
                totals[index] = torch.empty_like(like[index], requires_grad=False).copy_(total)
    return totals


def _numbers(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors without complex numbers. Their `data` counts changes in place by itself."""
    return [torch.view_as_real(t).data if t.is_complex() else t.data for t in tensors]


def _value(value: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return a value in contiguous memory, or a tensor of absent values."""
    if value is not None:
        return value.contiguous()
    return torch.full(like.shape, IDENTITY, dtype=like.dtype, device=like.device)
