"""Reductions of buffers, by communicators or by each rank after an allgather.

Adasum is a sum of orthogonal gradients, an average of parallel ones, from Maleki et al., "Scaling
Distributed Training with Adaptive Summation", arXiv:2006.02924::

    adasum(a, b) = (1 - a·b / (2 a·a)) a  +  (1 - a·b / (2 b·b)) b

Neighbouring ranks are combined, then neighbouring pairs, and so on. Every rank gathers all
gradients and computes the same in float64, by elementwise operations alone, so the result has the
same bits on all ranks. Memory and communication grow with the number of ranks.
"""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Callable, Sequence

import torch

from nbelastic.collectives import Op


class GradientOp(enum.Enum):
    """Reductions of gradients that communicators do not have."""

    ADASUM = "adasum"


class BitwiseOp(enum.Enum):
    """Reductions of whole numbers that communicators do not have."""

    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"


Adasum = GradientOp.ADASUM
AnyOp = Op | GradientOp | BitwiseOp

_PAIRWISE: dict[AnyOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    BitwiseOp.BAND: torch.bitwise_and,
    BitwiseOp.BOR: torch.bitwise_or,
    BitwiseOp.BXOR: torch.bitwise_xor,
    Op.SUM: torch.add,
    Op.AVERAGE: torch.add,  # divided once all are added
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.PRODUCT: torch.mul,
}

# Types that communicators do not reduce, as themselves or as pairs of real numbers.
_GATHERED = {torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex32}

# The square of a norm below which a vector counts as zero, as in Horovod.
_NOTHING = sys.float_info.min**0.5


def is_direct(dtype: torch.dtype, op: AnyOp) -> bool:
    """Return whether communicators reduce this type; what they know nothing of, they refuse."""
    # As pairs of real numbers they add up, but have other products and no order.
    if dtype.is_complex and op not in (Op.SUM, Op.AVERAGE):
        return False
    return isinstance(op, Op) and dtype not in _GATHERED


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of complex numbers as pairs, which add up as they do."""
    return torch.view_as_real(tensor) if tensor.dtype.is_complex else tensor


def wire_op(op: AnyOp, dtype: torch.dtype) -> Op:
    """Return the operation to ask a communicator for: :func:`scale` divides whole numbers."""
    assert isinstance(op, Op)
    return Op.SUM if op is Op.AVERAGE and not is_inexact(dtype) else op


def reduce_gathered(
    buffer: torch.Tensor, everyone: Sequence[torch.Tensor], op: AnyOp, lengths: Sequence[int]
) -> None:
    """Reduce the buffers of all ranks; Adasum is of each of the parts of these `lengths`."""
    if isinstance(op, GradientOp):
        parts = [torch.split(each, list(lengths)) for each in (buffer, *everyone)]
        for target, *vectors in zip(*parts, strict=True):
            target.copy_(combine(vectors))
        return
    buffer.copy_(functools.reduce(_PAIRWISE[op], everyone))
    if op is Op.AVERAGE and is_inexact(buffer.dtype):
        buffer.div_(len(everyone))  # `scale` divides whole numbers


def scale(tensor: torch.Tensor, op: AnyOp, size: int, factor: float) -> None:
    """Divide a sum of whole numbers that is to be an average; multiply the result by `factor`."""
    divisor = size if op is Op.AVERAGE and not is_inexact(tensor.dtype) else 1
    if divisor != 1 and factor == 1.0 and tensor.dtype is not torch.bool:
        tensor.div_(divisor, rounding_mode="trunc")  # float64 would round above 2**53
    else:
        multiply(tensor, factor / divisor)


def multiply(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place; integers in float64, cut off, as in Horovod."""
    if factor == 1.0:
        return
    if is_inexact(tensor.dtype):
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double().mul_(factor))


def is_inexact(dtype: torch.dtype) -> bool:
    """Return whether numbers of a type are rounded."""
    return dtype.is_floating_point or dtype.is_complex


def combine(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the Adasum of vectors in their order, in float64."""
    level = [vector.double() for vector in vectors]  # squares overflow in float16
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        level = [_combined(a, b) for a, b in pairs] + level[len(level) // 2 * 2 :]
    return level[0]


def _combined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    def factor(square: float) -> float:
        return 1.0 if square < _NOTHING else 1.0 - ab / square / 2  # NaN makes NaN

    aa, ab, bb = _sums(torch.stack([a * a, a * b, b * b]))  # BLAS's dot() has an order of its own
    return a * factor(aa) + b * factor(bb)


def _sums(rows: torch.Tensor) -> list[float]:
    """Add up each row by halves: an order that depends on nothing but its length."""
    while rows.shape[1] > 1:
        half = (rows.shape[1] + 1) // 2
        rest = rows[:, half:]
        rows = rows[:, :half].clone()
        rows[:, : rest.shape[1]] += rest
    return rows[:, 0].tolist() if rows.shape[1] else [0.0] * len(rows)
