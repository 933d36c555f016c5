"""Collectives with Horovod's names and signatures, except reductions.

Operations with a ``name=`` are matched by it, in whatever order ranks begin them. All others are
matched by their order: all ranks call the same ones in the same order. Where they differ in
operation, type, shape or root, all raise :class:`~nbelastic.errors.RanksDisagree`, and nothing has
been sent. A collective without a name between ``backward()`` and ``step()`` follows the optimizer's
reductions on all ranks if every parameter has a gradient. If some may have none, call
``optimizer.synchronize()`` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from nbelastic.collectives import Op
from nbelastic.torch.ops import autograd
from nbelastic.torch.ops.coordination.comparison import begin
from nbelastic.torch.ops.coordination.coordination import coordination_of
from nbelastic.torch.ops.coordination.process_sets import group_of
from nbelastic.torch.ops.operation import tensor_operations as operations
from nbelastic.torch.ops.operation.tensor_operations import Pending, awaited, only, single

T = TypeVar("T")


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


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: object = None
) -> torch.Tensor:
    """Concatenate every rank's `tensor` along the first dimension, whose length may differ.

    Differentiable: the gradient is that of this rank's rows, averaged over the ranks (Horovod's
    convention).

    Parameters
    ----------
    tensor : Tensor
        The same type and dimensions but the first on all ranks.
    name : str, optional
        Matches the operation with that of other ranks, whatever else they do before.
    process_set : ProcessSet, optional
        The ranks that take part; by default all.

    Raises
    ------
    CollectiveError
        A peer is gone, or the generation is over.
    RanksDisagree
        Ranks called different operations, or types or dimensions other than the first differ.
    """
    (gathered,) = grouped_allgather([tensor], name, process_set)
    return gathered


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: object = None
) -> list[torch.Tensor]:
    """Gather several tensors as one operation; otherwise as :func:`allgather`."""
    group, gather = group_of(process_set), operations.Allgather(tensors, name)
    shapes = [tensor.shape for tensor in tensors]

    def gradient(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        reduced, rank = autograd.allreduce(group, grads, Op.AVERAGE), gather.rank
        return [
            each.narrow(0, sum(lengths[:rank]), lengths[rank]).reshape(shape)
            for each, lengths, shape in zip(reduced, gather.lengths, shapes, strict=True)
        ]

    return autograd.record(group, gather, name, tensors, gradient)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: object = None
) -> Pending[list[torch.Tensor]]:
    """Begin what :func:`grouped_allgather` does, without gradients."""
    return begin(group_of(process_set), operations.Allgather(tensors, name), name)


allgather_async = single(grouped_allgather_async)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = None
) -> torch.Tensor:
    """Return the `tensor` of rank `root_rank`; all ranks pass one of the same shape and type.

    Differentiable: the root's gradient is the average over the ranks, that of others is zero
    (Horovod's convention). The root is named by its rank in the job, in a process set as well.
    """
    group, output = group_of(process_set), torch.empty_like(tensor, requires_grad=False)
    copies = operations.Broadcast([tensor], [output], root_rank, group.ranks, name)

    def gradient(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # On all ranks, because the root's gradient comes from every rank's copy.
        (reduced,) = autograd.allreduce(group, grads, Op.AVERAGE)
        return [reduced if copies.is_root else reduced * 0]  # as in Horovod, so that NaN stays NaN

    return autograd.record(group, copies, name, [tensor], gradient)[0]


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = None
) -> Pending[torch.Tensor]:
    """Begin what :func:`broadcast` does, without gradients; for :func:`synchronize`."""
    group, output = group_of(process_set), torch.empty_like(tensor, requires_grad=False)
    copies = operations.Broadcast([tensor], [output], root_rank, group.ranks, name)
    return only(begin(group, copies, name))


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = None
) -> Pending[torch.Tensor]:
    """Begin a :func:`broadcast` in place; tensors change in :func:`synchronize`, not before."""
    group, tensors = group_of(process_set), [tensor]
    copies = operations.Broadcast(tensors, tensors, root_rank, group.ranks, name)
    return only(begin(group, copies, name))


broadcast_ = awaited(broadcast_async_)


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
    group = group_of(process_set)
    counts = splits_of(tensor, splits, group.size)
    output, received = autograd.alltoall(group, tensor, counts, name)
    return output if splits is None else (output, torch.tensor(received, dtype=torch.int32))


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: object = None,
) -> Pending[tuple[torch.Tensor, torch.Tensor]]:
    """Begin what :func:`alltoall` does, without gradients.

    :func:`synchronize` returns output and rows received from each rank, with or without `splits`.
    """
    group = group_of(process_set)
    exchange = operations.Alltoall(tensor, splits_of(tensor, splits, group.size), name)
    pending = begin(group, exchange, name)

    def finish() -> tuple[torch.Tensor, torch.Tensor]:
        # In this order: a named exchange knows what it has received only from its launch on.
        return pending.wait()[0], torch.tensor(exchange.received, dtype=torch.int32)

    return operations.Pending([pending], finish)


def barrier(process_set: object = None) -> None:
    """Wait until all ranks have arrived.

    Named operations that all ranks have begun before are over then.
    """
    group = group_of(process_set)
    coordination = coordination_of(group.parent()) if group.size > 1 else None
    if coordination is not None:
        coordination.flush()  # so this rank's offers reach the matching before it arrives
    begin(group, operations.Barrier()).wait()
    if coordination is not None:
        coordination.flush()  # by now it has the offers of all ranks, and has decided


def splits_of(
    tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, size: int
) -> list[int]:
    """Return how many rows of a tensor go to each rank."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if splits is None:
        if rows % size:
            raise ValueError(f"{rows} rows cannot be split evenly over {size} ranks; pass splits")
        return [rows // size] * size
    if isinstance(splits, torch.Tensor) and splits.is_floating_point():  # int() would cut them off
        raise ValueError(f"splits must be integers, not {splits.dtype}")
    counts = splits.tolist() if isinstance(splits, torch.Tensor) else list(splits)
    if len(counts) != size or sum(counts) != rows or min(counts) < 0:
        raise ValueError(
            f"splits must be {size} numbers (one per rank) that add up to {rows} rows, not {counts}"
        )
    return [int(count) for count in counts]
