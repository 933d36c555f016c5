"""Collectives with Horovod's names and signatures, except reductions.

Unlike Horovod, operations are matched by their order, not by name: all ranks call the same ones in
the same order. Where they differ in operation, name, type, shape or root, all raise
:class:`~nbelastic.errors.RanksDisagree`, and nothing has been sent. A collective between
``backward()`` and ``step()`` follows the optimizer's reductions on all ranks if every parameter has
a gradient. If some may have none, call ``optimizer.synchronize()`` first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

from nbelastic.elastic.context import current
from nbelastic.torch.ops import autograd
from nbelastic.torch.ops import collectives as ops
from nbelastic.torch.ops.world import check_process_set

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbelastic.torch.ops.collectives import Pending

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "poll",
    "synchronize",
]

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

    Raises
    ------
    CollectiveError
        A peer is gone, or the generation is over.
    RanksDisagree
        Ranks called different operations, or types or dimensions other than the first differ.
    """
    check_process_set(process_set)
    gathered: torch.Tensor = autograd.apply(autograd.Allgather, current(), name, tensor)
    return gathered


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: object = None
) -> Pending[torch.Tensor]:
    """Begin what :func:`allgather` does, without gradients. Lengths are exchanged at once."""
    check_process_set(process_set)
    pending, _ = ops.allgather(current().communicator(), tensor, name)
    return pending


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = None
) -> torch.Tensor:
    """Return the `tensor` of rank `root_rank`; all ranks pass one of the same shape and type.

    Differentiable: the root's gradient is the average over the ranks, that of others is zero
    (Horovod's convention).
    """
    check_process_set(process_set)
    copied: torch.Tensor = autograd.apply(autograd.Broadcast, current(), root_rank, name, tensor)
    return copied


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = None
) -> Pending[torch.Tensor]:
    """Begin what :func:`broadcast` does, without gradients; for :func:`synchronize`."""
    check_process_set(process_set)
    output = torch.empty_like(tensor, requires_grad=False)
    return ops.only(ops.broadcast(current().communicator(), [tensor], [output], root_rank, name))


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = None
) -> Pending[torch.Tensor]:
    """Begin a :func:`broadcast_`; `tensor` changes in :func:`synchronize`, not before."""
    check_process_set(process_set)
    return ops.only(ops.broadcast(current().communicator(), [tensor], [tensor], root_rank, name))


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
    output, received = autograd.apply(autograd.Alltoall, context, name, tensor, *counts)
    return output if splits is None else (output, received)


def barrier(process_set: object = None) -> None:
    """Wait until all ranks have arrived."""
    check_process_set(process_set)
    current().communicator().agree("barrier")


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
