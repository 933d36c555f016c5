"""Sums along a reduction tree by direct exchange: each rank sums a share.

Every rank sends each other rank its share of this rank's nodes, adds what it receives in the tree's
order, and sends the sum to all others. The tree, not the number of ranks, decides what is added to
what.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from nbelastic.collectives.buffers import Delivered, on_host
from nbelastic.collectives.reduction_tree import fold

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from nbelastic.collectives.reduction_tree import Blocks
    from nbelastic.collectives.transport import Handle, TensorTransport

_LINE = 16
"""Shares begin at multiples of so many elements."""

_SERIAL = 32_000
"""Elements that are added at a time: few enough for torch not to start threads of its own."""


def share_bounds(count: int, ranks: int) -> list[int]:
    """Return where the share of each rank in `count` elements begins, and `count`."""
    lines = -(-count // _LINE)
    return [min(lines * rank // ranks * _LINE, count) for rank in range(ranks + 1)]


def sum_along_tree(
    values: Sequence[torch.Tensor],
    order: Sequence[int],
    output: torch.Tensor,
    scratch: Collection[int] = (),
) -> None:
    """Add `values` in an order of ``reduction_tree.additions`` to one sum.

    They are vectors of one length in host memory, of which those with an index in `scratch` may be
    overwritten. `output` may be one of them, and shares no memory with others.
    """
    for begin in range(0, output.numel(), _SERIAL):
        end = begin + _SERIAL
        parts = [value[begin:end] for value in values]
        _sum_parts(parts, order, output[begin:end], {id(parts[index]) for index in scratch})


def _sum_parts(
    values: list[torch.Tensor], order: Sequence[int], output: torch.Tensor, scratch: set[int]
) -> None:
    left_to_do = sum(order)
    made = []  # keeps what is identified in `scratch`

    def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        nonlocal left_to_do
        left_to_do -= 1
        if left_to_do == 0:
            return torch.add(left, right, out=output)
        for each in (left, right):
            if id(each) in scratch:
                return torch.add(left, right, out=each)
        made.append(torch.add(left, right))
        scratch.add(id(made[-1]))
        return made[-1]

    (total,) = fold(values, order, add)
    if total.data_ptr() != output.data_ptr():
        output.copy_(total)


class FlatTensors:
    """Tensors of one type as one `vector` in host memory: their own memory if there is one tensor.

    To `load` is to have their values there from the beginning.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, load: bool = True) -> None:
        self._flat = [tensor.detach().view(-1) for tensor in tensors]
        if len(self._flat) == 1:
            self.vector = on_host(self._flat[0], load=load)
        elif load:
            self.vector = on_host(torch.cat(self._flat))
        else:
            count = sum(each.numel() for each in self._flat)
            self.vector = torch.empty(count, dtype=self._flat[0].dtype)

    def deliver(self) -> None:
        """Copy the vector to the tensors, unless it is their memory."""
        parts = torch.split(self.vector, [each.numel() for each in self._flat])
        for tensor, part in zip(self._flat, parts, strict=True):
            if tensor.data_ptr() != part.data_ptr():
                tensor.copy_(part)


def allreduce_tree(
    transport: TensorTransport,
    nodes: Sequence[Sequence[torch.Tensor]],
    blocks: Blocks,
    outputs: Sequence[torch.Tensor],
) -> Handle:
    """Sum along a tree by two exchanges of `transport`, the first of which it waits for."""
    rank, size = transport.rank, transport.size
    target = FlatTensors(outputs, load=False)
    count = target.vector.numel()
    bounds = list(itertools.pairwise(share_bounds(count, size)))
    vectors = [FlatTensors(tensors).vector for tensors in nodes]
    sent = [
        torch.cat([vector[begin:end] for vector in vectors] or [target.vector[:0]])
        for begin, end in bounds
    ]
    own = bounds[rank][1] - bounds[rank][0]
    received = [target.vector.new_empty(len(cover) * own) for cover in blocks.covers]
    transport.begin_all_to_all(received, sent).wait()
    pieces = [piece for each in received if each.numel() for piece in torch.split(each, own)]
    total = target.vector.new_empty(own)
    sum_along_tree(pieces, blocks.order, total, range(len(pieces)))
    shares = [target.vector[begin:end] for begin, end in bounds]
    return Delivered(transport.begin_all_to_all(shares, [total] * size), target.deliver)
