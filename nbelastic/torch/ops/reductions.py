"""Reductions over all ranks, with Horovod's names and signatures.

As for all collectives, all ranks call the same ones in the same order (see
:mod:`nbelastic.torch.ops.functions`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nbelastic.collectives import Op
from nbelastic.elastic.context import current
from nbelastic.torch.ops import autograd
from nbelastic.torch.ops import collectives as ops
from nbelastic.torch.ops.adasum import Adasum, GradientOp
from nbelastic.torch.ops.compression import Compression, Compressor
from nbelastic.torch.ops.world import check_process_set

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbelastic.torch.ops.collectives import Pending

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "reducescatter",
]

Average = Op.AVERAGE
Sum = Op.SUM
Min = Op.MIN
Max = Op.MAX
Product = Op.PRODUCT


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | GradientOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> torch.Tensor:
    """Reduce `tensor` over all ranks. Differentiable: the gradient is reduced likewise.

    Parameters
    ----------
    tensor : Tensor
        Of the same shape and type on all ranks. Left as it is.
    average : bool, optional
        Horovod's older spelling of `op`: True for Average, False for Sum.
    name : str, optional
        Equal on all ranks; named in errors.
    compression : default Compression.none
        How it travels.
    op : default Average
        Average, Sum, Min, Max, Product or Adasum. The average of integers is rounded down.
        Gradients exist for Average and Sum.
    prescale_factor, postscale_factor : float, default 1.0
        Factors before and after the reduction, the same on all ranks; floating point only.
    process_set : None
        Only all ranks.

    Returns
    -------
    Tensor
        New, of the shape, type and device of `tensor`; the same on all ranks.

    Raises
    ------
    CollectiveError
        A peer is gone, or the generation is over.
    RanksDisagree
        Ranks called different operations, or with other types, shapes, reductions or factors.
    ValueError
        An argument has a value it cannot have.
    """
    (output,) = grouped_allreduce(
        [tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set
    )
    return output


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | GradientOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> list[torch.Tensor]:
    """Reduce several tensors in as few operations as possible; otherwise as :func:`allreduce`."""
    check_process_set(process_set)
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = autograd.apply(
        autograd.Allreduce,
        current(),
        _op(op, average),
        prescale_factor,
        postscale_factor,
        name,
        *(compressed for compressed, _ in pairs),
    )
    return [
        compression.decompress(output, ctx) for output, (_, ctx) in zip(reduced, pairs, strict=True)
    ]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | GradientOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> Pending[torch.Tensor]:
    """Begin what :func:`allreduce` does, without gradients; for :func:`synchronize`."""
    check_process_set(process_set)
    return ops.only(
        ops.allreduce(
            current().communicator(),
            [tensor],
            [torch.empty_like(tensor, requires_grad=False)],
            _op(op, average),
            prescale_factor,
            postscale_factor,
            name,
        )
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | GradientOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> Pending[torch.Tensor]:
    """Begin an :func:`allreduce_`; `tensor` changes in :func:`synchronize`, not before."""
    check_process_set(process_set)
    return ops.only(
        ops.allreduce(
            current().communicator(),
            [tensor],
            [tensor],
            _op(op, average),
            prescale_factor,
            postscale_factor,
            name,
        )
    )


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | GradientOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> torch.Tensor:
    """Reduce `tensor` over all ranks in place; it is left as it is if that fails."""
    return allreduce_async_(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set
    ).wait()


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | GradientOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> list[torch.Tensor]:
    """Reduce several tensors in place, in as few operations as possible."""
    check_process_set(process_set)
    communicator = current().communicator()
    return ops.allreduce(
        communicator, tensors, tensors, _op(op, average), prescale_factor, postscale_factor, name
    ).wait()


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    process_set: object = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce `tensor` over all ranks and return this rank's rows. Differentiable.

    Rows are dealt out evenly along the first dimension; the first ranks get one more where they do
    not divide. Parameters are those of :func:`allreduce`.
    """
    check_process_set(process_set)
    if tensor.dim() == 0:
        raise ValueError("reducescatter needs a tensor with at least one dimension")
    if op is not None and not isinstance(op, Op):
        raise ValueError(f"op must be Average, Sum, Min, Max or Product, not {op!r}")
    compressed, ctx = compression.compress(tensor)
    rows = autograd.apply(
        autograd.Reducescatter,
        current(),
        _op(op, None),
        prescale_factor,
        postscale_factor,
        name,
        compressed,
    )
    return compression.decompress(rows, ctx)


def _op(op: Op | GradientOp | None, average: bool | None) -> Op | GradientOp:
    if op is not None and average is not None:
        raise ValueError("give op or average, not both; op has more choices")
    if op is None:
        return Op.SUM if average is False else Op.AVERAGE
    if not isinstance(op, Op | GradientOp):
        raise ValueError(f"op must be Average, Sum, Min, Max, Product or Adasum, not {op!r}")
    return op
