"""Reductions over all ranks, with Horovod's names and signatures.

As for all collectives, all ranks call the same ones in the same order (see
:mod:`nbelastic.torch.ops.functions`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nbelastic.collectives import Op
from nbelastic.torch.compression import AnyCompressor, Compression
from nbelastic.torch.ops import autograd
from nbelastic.torch.ops.coordination.comparison import begin
from nbelastic.torch.ops.coordination.process_sets import group_of
from nbelastic.torch.ops.operation import tensor_operations as operations
from nbelastic.torch.ops.operation.reduction import GradientOp
from nbelastic.torch.ops.operation.tensor_operations import Pending, awaited, only, single

Average = Op.AVERAGE
Sum = Op.SUM
Min = Op.MIN
Max = Op.MAX
Product = Op.PRODUCT


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: AnyCompressor = Compression.none,
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
        Matches the operation with that of other ranks, whatever else they do before.
    compression : default Compression.none
        How it travels.
    op : default Average
        Average, Sum, Min, Max, Product or Adasum. The average of integers is cut off towards zero.
        Gradients exist for Average and Sum.
    prescale_factor, postscale_factor : float, default 1.0
        Factors before and after the reduction, the same on all ranks. Integers are multiplied in
        float64, and cut off.
    process_set : ProcessSet, optional
        The ranks that take part; by default all.

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
    compression: AnyCompressor = Compression.none,
    op: Op | GradientOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> list[torch.Tensor]:
    """Reduce several tensors in as few operations as possible; otherwise as :func:`allreduce`."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = autograd.allreduce(
        group_of(process_set),
        [compressed for compressed, _ in pairs],
        _op(op, average),
        prescale_factor,
        postscale_factor,
        name,
    )
    return [
        compression.decompress(output, ctx) for output, (_, ctx) in zip(reduced, pairs, strict=True)
    ]


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | GradientOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> Pending[list[torch.Tensor]]:
    """Begin what :func:`grouped_allreduce` does, without gradients."""
    outputs = [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]
    reduction = operations.Allreduce(
        tensors, outputs, _op(op, average), prescale_factor, postscale_factor, name
    )
    return begin(group_of(process_set), reduction, name)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | GradientOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> Pending[list[torch.Tensor]]:
    """Begin a :func:`grouped_allreduce` in place; :func:`synchronize` stores the results."""
    reduction = operations.Allreduce(
        tensors, tensors, _op(op, average), prescale_factor, postscale_factor, name
    )
    return begin(group_of(process_set), reduction, name)


allreduce_async = single(grouped_allreduce_async)
allreduce_async_ = single(grouped_allreduce_async_)
allreduce_ = awaited(allreduce_async_)
grouped_allreduce_ = awaited(grouped_allreduce_async_)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: AnyCompressor = Compression.none,
    op: Op = Average,
    process_set: object = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce `tensor` over all ranks and return this rank's rows. Differentiable.

    Rows are dealt out evenly along the first dimension; the first ranks get one more where they do
    not divide. Parameters are those of :func:`allreduce`. The gradient of a sum is multiplied by
    the number of ranks, as in Horovod.
    """
    (rows,) = grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )
    return rows


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: AnyCompressor = Compression.none,
    op: Op = Average,
    process_set: object = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce several tensors as one operation; otherwise as :func:`reducescatter`."""
    how, group = _op_of_rows(op, tensors), group_of(process_set)
    pairs = [compression.compress(tensor) for tensor in tensors]
    sent = [compressed for compressed, _ in pairs]
    scatter = operations.Reducescatter(sent, how, prescale_factor, postscale_factor, name)

    def gradient(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if how not in (Op.AVERAGE, Op.SUM):
            raise NotImplementedError(
                f"the gradient of a reducescatter with {how} is not defined; use Average or Sum"
            )
        factor = prescale_factor * postscale_factor * (group.size if how is Op.SUM else 1)
        # Each rank's input went into the rows of all ranks, so it needs all gradients.
        gathered = begin(group, operations.Allgather(grads)).wait()
        return [each * factor for each in gathered]

    reduced = autograd.record(group, scatter, name, sent, gradient)
    return [
        compression.decompress(rows, ctx) for rows, (_, ctx) in zip(reduced, pairs, strict=True)
    ]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Op = Average,
    process_set: object = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Pending[list[torch.Tensor]]:
    """Begin what :func:`grouped_reducescatter` does, without gradients."""
    how = _op_of_rows(op, tensors)
    scatter = operations.Reducescatter(tensors, how, prescale_factor, postscale_factor, name)
    return begin(group_of(process_set), scatter, name)


reducescatter_async = single(grouped_reducescatter_async)


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op = Op.AVERAGE,
    process_set: object = None,
) -> Pending[torch.Tensor]:
    """Begin to sum or average a sparse tensor over all ranks.

    Parameters
    ----------
    tensor : Tensor
        In torch's layout ``sparse_coo``, of the same size and type on all ranks. Ranks may have
        different indices, and different numbers of them.
    name : str, optional
        Matches the operation with that of other ranks.
    op : default Average
        Average or Sum.
    process_set : ProcessSet, optional
        The ranks that take part; by default all.

    Returns
    -------
    Pending
        Call it, or pass it to ``hvd.synchronize``. The result is sparse and not coalesced.
    """
    total = operations.SparseAllreduce([tensor], op, name)
    return only(begin(group_of(process_set), total, name))


class UnsupportedOp(ValueError, NotImplementedError):
    """A reduction that an operation does not have; a RuntimeError, as in Horovod."""


def _op_of_rows(op: Op | None, tensors: Sequence[torch.Tensor]) -> Op:
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("reducescatter needs a tensor with at least one dimension")
    if op is not None and not isinstance(op, Op):  # Adasum needs whole vectors
        raise UnsupportedOp(f"op must be Average, Sum, Min, Max or Product, not {op!r}")
    return Op.AVERAGE if op is None else op


def _op(op: Op | GradientOp | None, average: bool | None) -> Op | GradientOp:
    if op is not None and average is not None:
        raise ValueError("give op or average, not both; op has more choices")
    if op is None:
        return Op.SUM if average is False else Op.AVERAGE  # Horovod averages by default, torch sums
    if not isinstance(op, Op | GradientOp):
        raise ValueError(f"op must be Average, Sum, Min, Max, Product or Adasum, not {op!r}")
    return op
