"""Collectives with Horovod's names and signatures.

Unlike Horovod, operations are matched by their order, not by name: all ranks call the same ones in
the same order, and ``name`` only serves the reader. A collective between ``backward()`` and
``step()`` comes after the optimizer's buckets on all ranks if every parameter has got a gradient;
where some may not have, call ``optimizer.synchronize()`` first.
"""

# ruff: noqa: ARG001 - `name` is accepted for Horovod's signatures

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

from nbelastic.collectives import Op
from nbelastic.elastic.context import current
from nbelastic.torch import autograd, ops
from nbelastic.torch.compression import Compression, Compressor
from nbelastic.torch.world import check_process_set

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbelastic.torch.ops import Pending

__all__ = [
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "poll",
    "reducescatter",
    "synchronize",
]

T = TypeVar("T")

Average = Op.AVERAGE
Sum = Op.SUM
Min = Op.MIN
Max = Op.MAX
Product = Op.PRODUCT


def synchronize(handle: Pending[T]) -> T:
    """Wait for an operation that a function ending in ``_async`` began, and return its result.

    Raises
    ------
    CollectiveError
        The operation failed; tensors of in-place operations are unchanged.
    """
    return handle.wait()


def poll(handle: Pending[Any]) -> bool:
    """Return whether :func:`synchronize` would return at once."""
    return handle.done()


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
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
        Not used.
    compression : default Compression.none
        How it travels.
    op : default Average
        Average, Sum, Min, Max or Product. The average of integers is rounded down. Gradients
        exist for Average and Sum.
    prescale_factor, postscale_factor : float, default 1.0
        Factors before and after the reduction; floating point only.
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
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> list[torch.Tensor]:
    """Reduce several tensors in as few operations as possible; otherwise as :func:`allreduce`."""
    check_process_set(process_set)
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = autograd.Allreduce.apply(
        current(),
        _op(op, average),
        prescale_factor,
        postscale_factor,
        *(compressed for compressed, _ in pairs),
    )
    return [
        compression.decompress(output, ctx) for output, (_, ctx) in zip(reduced, pairs, strict=True)
    ]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> Pending[torch.Tensor]:
    """Begin what :func:`allreduce` does, without gradients; for :func:`synchronize`."""
    check_process_set(process_set)
    return _first(
        ops.allreduce(
            current().communicator(),
            [tensor],
            [torch.empty_like(tensor, requires_grad=False)],
            _op(op, average),
            prescale_factor,
            postscale_factor,
        )
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> Pending[torch.Tensor]:
    """Begin an :func:`allreduce_`; `tensor` changes in :func:`synchronize`, not before."""
    check_process_set(process_set)
    return _first(
        ops.allreduce(
            current().communicator(),
            [tensor],
            [tensor],
            _op(op, average),
            prescale_factor,
            postscale_factor,
        )
    )


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
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
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> list[torch.Tensor]:
    """Reduce several tensors in place, in as few operations as possible."""
    check_process_set(process_set)
    communicator = current().communicator()
    return ops.allreduce(
        communicator, tensors, tensors, _op(op, average), prescale_factor, postscale_factor
    ).wait()


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: object = None
) -> torch.Tensor:
    """Concatenate every rank's `tensor` along the first dimension, whose length may differ.

    Differentiable: the gradient is that of this rank's rows, averaged over the ranks (Horovod's
    convention).

    Raises
    ------
    CollectiveError
        A peer is gone, or the generation is over.
    ValueError
        Types, or dimensions other than the first, differ between ranks.
    """
    check_process_set(process_set)
    gathered: torch.Tensor = autograd.Allgather.apply(current(), tensor)
    return gathered


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: object = None
) -> Pending[torch.Tensor]:
    """Begin what :func:`allgather` does, without gradients. Lengths are exchanged at once."""
    check_process_set(process_set)
    pending, _ = ops.allgather(current().communicator(), tensor)
    return pending


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = None
) -> torch.Tensor:
    """Return the `tensor` of rank `root_rank`; all ranks pass one of the same shape and type.

    Differentiable: the root's gradient is the average over the ranks, that of others is zero
    (Horovod's convention).
    """
    check_process_set(process_set)
    copied: torch.Tensor = autograd.Broadcast.apply(current(), root_rank, tensor)
    return copied


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = None
) -> Pending[torch.Tensor]:
    """Begin what :func:`broadcast` does, without gradients; for :func:`synchronize`."""
    check_process_set(process_set)
    output = torch.empty_like(tensor, requires_grad=False)
    return _first(ops.broadcast(current().communicator(), [tensor], [output], root_rank))


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = None
) -> Pending[torch.Tensor]:
    """Begin a :func:`broadcast_`; `tensor` changes in :func:`synchronize`, not before."""
    check_process_set(process_set)
    return _first(ops.broadcast(current().communicator(), [tensor], [tensor], root_rank))


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = None
) -> torch.Tensor:
    """Make `tensor` that of rank `root_rank`, in place; it is left as it is if that fails."""
    return broadcast_async_(tensor, root_rank, name, process_set).wait()


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: object = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send rows of `tensor` to each rank, and concatenate what all send here. Differentiable.

    Parameters
    ----------
    tensor : Tensor, shape (rows, …)
        The same type and dimensions but the first on all ranks.
    splits : Tensor or sequence of int, optional
        How many rows go to each rank, in order; by default all get equally many.

    Returns
    -------
    output : Tensor, shape (rows received, …)
    received : Tensor of int32, shape (ranks,)
        Rows received from each rank; only where `splits` was given.

    Raises
    ------
    ValueError
        `splits` does not have an entry per rank, or does not add up to the rows there are.
    """
    check_process_set(process_set)
    context = current()
    counts = _splits(tensor, splits, context.communicator().size)
    output, received = autograd.Alltoall.apply(context, tensor, *counts)
    return output if splits is None else (output, received)


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
    compressed, ctx = compression.compress(tensor)
    rows = autograd.Reducescatter.apply(
        current(), _op(op, None), prescale_factor, postscale_factor, compressed
    )
    return compression.decompress(rows, ctx)


def barrier(process_set: object = None) -> None:
    """Wait until all ranks have arrived."""
    check_process_set(process_set)
    current().communicator().barrier()


def _op(op: Op | None, average: bool | None) -> Op:
    if op is not None and average is not None:
        raise ValueError("give op or average, not both; op says more")
    if op is None:
        return Op.SUM if average is False else Op.AVERAGE
    if not isinstance(op, Op):
        raise ValueError(f"op must be Average, Sum, Min, Max or Product, not {op!r}")
    return op


def _splits(
    tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, size: int
) -> list[int]:
    rows = tensor.shape[0] if tensor.dim() else 0
    if splits is None:
        if rows % size:
            raise ValueError(f"{rows} rows cannot be split evenly over {size} ranks; pass splits")
        return [rows // size] * size
    counts = splits.tolist() if isinstance(splits, torch.Tensor) else list(splits)
    if len(counts) != size or sum(counts) != rows or min(counts) < 0:
        raise ValueError(
            f"splits must be {size} numbers (one per rank) that add up to {rows} rows, not {counts}"
        )
    return [int(count) for count in counts]


def _first(pending: Pending[list[torch.Tensor]]) -> Pending[torch.Tensor]:
    return ops.Pending([pending], lambda: pending.wait()[0])
