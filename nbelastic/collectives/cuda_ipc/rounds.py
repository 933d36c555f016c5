"""Rounds in exchange buffers: values are copied in, combined, and copied back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from nbelastic.collectives.reduction_tree import fold
from nbelastic.collectives.transport import Op

if TYPE_CHECKING:
    from nbelastic.collectives.transport import Nodes, Tensors

_SMALLER = (torch.float16, torch.bfloat16)


class RoundPart(NamedTuple):
    """A piece of a tensor, and where it lies in a round."""

    values: torch.Tensor
    at: int


Combine = Callable[["Nodes", "torch.Tensor | None"], list[torch.Tensor]]
"""Combines the nodes of ranks, by rank, and returns what remains: one, if the ranks are all.

That is in `out`, if it is given and the result fits there.
"""

Finish = Callable[[torch.Tensor, "Tensors"], None]
"""Puts the result of a slice in the first of its places, of a row each, from what remains."""


def reducing(op: Op) -> Combine:
    """Return what combines a value of each rank."""
    return lambda slices, out: [_combined([each for (each,) in slices], op, out)]


def adding_along(order: Sequence[int]) -> Combine:
    """Return what adds nodes in an order of ``reduction_tree.additions``."""

    def combine(slices: Nodes, out: torch.Tensor | None) -> list[torch.Tensor]:
        remaining = sum(order)

        def add(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            nonlocal remaining
            remaining -= 1
            return torch.add(first, second, out=out if remaining == 0 else None)

        return fold([each for of_rank in slices for each in of_rank], order, add)

    return combine


def rounds(tensors: Tensors, capacity: int) -> Iterator[list[RoundPart]]:
    """Yield the pieces that fit into a buffer at a time. Ranks may split values differently."""
    parts: list[RoundPart] = []
    used = 0
    for tensor in tensors:
        start = 0
        while start < tensor.numel():
            length = min(tensor.numel() - start, capacity - used)
            parts.append(RoundPart(tensor[start : start + length], used))
            start += length
            used += length
            if used == capacity:
                yield parts
                parts, used = [], 0
    if parts:
        yield parts


_PAIRWISE: dict[Op, Callable[..., torch.Tensor]] = {
    Op.PRODUCT: torch.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
}


def _combined(slices: Tensors, op: Op, out: torch.Tensor | None = None) -> torch.Tensor:
    """Reduce slices in their order. Smaller floats are reduced as float32, and rounded once."""
    first, *rest = slices
    if first.dtype in _SMALLER:
        total, out = first.float(), None  # `out` has the smaller type
    else:
        total = first
    for each in rest:
        # Never in place in `first`, which is a rank's buffer.
        target = total if total is not first else out
        total = _PAIRWISE.get(op, torch.add)(total, each, out=target)
    if op is Op.AVERAGE:
        total.div_(len(slices))
    return total


def copy_in(buffer: torch.Tensor, parts: Sequence[RoundPart]) -> None:
    """Copy pieces to where they lie in a round."""
    places = [buffer[part.at : part.at + part.values.numel()] for part in parts]
    torch._foreach_copy_(places, [part.values for part in parts])  # few kernels, not one a piece


def combine_to(parts: Sequence[RoundPart], by_rank: Nodes, combine: Combine) -> None:
    """Combine all values of a round, to the pieces."""
    count = sum(part.values.numel() for part in parts)
    slices = [[row[:count] for row in of_rank] for of_rank in by_rank]
    out = parts[0].values if len(parts) == 1 else None
    if out is not None and any(row.device != out.device for row in itertools.chain(*slices)):
        out = None  # it lies on another GPU of this process
    (total,) = combine(slices, out)
    if out is None or total.data_ptr() != out.data_ptr():
        copy_out(total, 0, count, parts)


def copy_out(buffer: torch.Tensor, low: int, high: int, parts: Sequence[RoundPart]) -> None:
    """Copy a slice of a buffer to its pieces."""
    places, values = [], []
    for part, at in parts:
        first, last = max(low, at), min(high, at + part.numel())
        if first < last:
            places.append(part[first - at : last - at])
            values.append(buffer[first:last])
    if places:
        torch._foreach_copy_(places, values)
