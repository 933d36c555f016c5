"""Reduction of a buffer of any type, by the communicator or after an allgather."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence

import torch

from nbelastic.collectives import Communicator, Handle, Op
from nbelastic.torch.ops.operation.adasum import GatheredReduction, GradientOp, adasum_async


class BitwiseOp(enum.Enum):
    """Reductions of whole numbers that communicators do not have."""

    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"


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


def is_direct(dtype: torch.dtype, op: AnyOp) -> bool:
    """Return whether communicators reduce this type; what they know nothing of, they refuse."""
    # As pairs of real numbers they add up, but have other products and no order.
    if dtype.is_complex and op not in (Op.SUM, Op.AVERAGE):
        return False
    return isinstance(op, Op) and dtype not in _GATHERED


def reduce_async(
    communicator: Communicator, buffer: torch.Tensor, op: AnyOp, lengths: Sequence[int] = ()
) -> Handle:
    """Begin to reduce a flat buffer in place. Adasum is of each of the parts of these `lengths`."""
    if isinstance(op, GradientOp):
        return adasum_async(communicator, buffer, lengths)
    if is_direct(buffer.dtype, op):
        return communicator.allreduce_async(as_real(buffer), wire_op(op, buffer.dtype))
    combine = _PAIRWISE[op]

    def reduce(everyone: Sequence[torch.Tensor]) -> None:
        buffer.copy_(functools.reduce(combine, everyone))
        if op is Op.AVERAGE and is_inexact(buffer.dtype):
            buffer.div_(len(everyone))  # `scale` divides whole numbers

    return GatheredReduction(communicator, buffer, reduce)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of complex numbers as pairs, which add up as they do."""
    return torch.view_as_real(tensor) if tensor.dtype.is_complex else tensor


def wire_op(op: AnyOp, dtype: torch.dtype) -> Op:
    """Return the operation to ask a communicator for: :func:`scale` divides whole numbers."""
    assert isinstance(op, Op)
    return Op.SUM if op is Op.AVERAGE and not is_inexact(dtype) else op


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
