"""Rounds in exchange buffers: values are copied in, combined, and copied back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from nbelastic.collectives.transport import Op
from nbelastic.collectives.tree_exchange import add_along

if TYPE_CHECKING:
    from nbelastic.collectives.transport import Tensors

_SMALLER = (torch.float16, torch.bfloat16)


class RoundPart(NamedTuple):
    """A piece of a tensor, and where it lies in a round."""

    values: torch.Tensor
    at: int


Combine = Callable[["Tensors", "torch.Tensor | None"], torch.Tensor]
"""Combines the nodes of all ranks, in order; in `out`, if it is given and the result fits there."""


def reducing(op: Op) -> Combine:
    """Return what combines a value of each rank."""
    return lambda vectors, out: _combined(vectors, op, out)


def adding_along(order: Sequence[int]) -> Combine:
    """Return what adds nodes in an order of ``reduction_tree.additions``."""
    return lambda vectors, out: add_along(vectors, order, out)


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


def combine_to(parts: Sequence[RoundPart], vectors: Tensors, combine: Combine) -> None:
    """Combine all values of a round, to the pieces."""
    out = parts[0].values if len(parts) == 1 else None
    if out is not None and any(each.device != out.device for each in vectors):
        out = None  # it lies on another GPU of this process
    total = combine(vectors, out)
    if out is None or total.data_ptr() != out.data_ptr():
        copy_out(total, 0, len(total), parts)


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
