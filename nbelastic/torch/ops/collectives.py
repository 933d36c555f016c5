"""Collective operations on tensors of users, on any device and in any layout.

Each function begins one operation and returns a :class:`Pending`. The communicator is lent private
buffers only, so a failed operation leaves the caller's tensors as they were. Ranks compare their
operations first; if they differ, all raise :class:`~nbelastic.errors.RanksDisagree`.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

from nbelastic.collectives import Op
from nbelastic.torch.ops import description
from nbelastic.torch.ops.adasum import GradientOp, adasum_async
from nbelastic.torch.ops.fusion import pack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.collectives import Communicator

__all__ = [
    "Pending",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "check_root",
    "only",
    "reducescatter",
]

T = TypeVar("T")


class Waitable(Protocol):
    """An operation under way: a communicator's handle, or a :class:`Pending`."""

    def done(self) -> bool:
        """Return whether the operation has finished."""

    def wait(self) -> object:
        """Wait for the operation."""


class Pending(Generic[T]):
    """An operation under way and its result: Horovod's handle.

    Pass it to ``hvd.synchronize`` or ``hvd.poll``.
    """

    def __init__(self, handles: Sequence[Waitable], finish: Callable[[], T]) -> None:
        self._handles: Sequence[Waitable] = handles
        self._finish: Callable[[], T] | None = finish
        self._result: list[T] = []

    def done(self) -> bool:
        """Return whether :meth:`wait` would return, or raise, at once."""
        return all(handle.done() for handle in self._handles)

    def wait(self) -> T:
        """Wait for the operation and return its result; every call returns the same object.

        Raises
        ------
        CollectiveError
            The operation failed. In-place operations have changed nothing.
        """
        if self._finish is not None:
            for handle in self._handles:
                handle.wait()
            self._result.append(self._finish())
            self._finish, self._handles = None, ()
        return self._result[0]


def only(pending: Pending[list[T]]) -> Pending[T]:
    """Return the first and only result in place of a list of one."""
    return Pending([pending], lambda: pending.wait()[0])


def allreduce(
    communicator: Communicator,
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    op: Op | GradientOp = Op.AVERAGE,
    prescale: float = 1.0,
    postscale: float = 1.0,
    name: str | None = None,
) -> Pending[list[torch.Tensor]]:
    """Reduce each of `tensors` over all ranks into the tensor of `outputs` with its index.

    Parameters
    ----------
    tensors, outputs : sequences of Tensor
        The same shapes and types on all ranks; `outputs` may be `tensors`.
    op : Op or GradientOp, default Op.AVERAGE
        The average of integers is rounded down. Adasum is for real floating point, and of each
        tensor by itself.
    prescale, postscale : float, default 1.0
        Factors before and after the reduction; floating point only.
    name : str, optional
        Equal on all ranks.

    Raises
    ------
    RanksDisagree
        Ranks are not about to do the same.
    ValueError
        A factor is not 1, or `op` is Adasum, and a tensor not floating point.
    """
    for tensor in tensors:
        _check_factors(tensor, prescale, postscale)
        if isinstance(op, GradientOp) and not tensor.dtype.is_floating_point:
            raise ValueError(f"Adasum needs real floating point, not {tensor.dtype}")
    what = description.reduction(
        "allreduce", op, tensors, name, prescale=prescale, postscale=postscale
    )
    communicator.agree(what)
    chunks = pack(tensors)
    handles, divisors = [], []
    for chunk in chunks:
        chunk.fill(tensors)
        if prescale != 1.0:
            chunk.buffer.mul_(prescale)
        if isinstance(op, GradientOp):
            handles.append(adasum_async(communicator, chunk.buffer, chunk.counts))
            divisors.append(1)
            continue
        wire_op, divisor = _wire_op(op, chunk.buffer.dtype, communicator.size)
        handles.append(communicator.allreduce_async(_as_real(chunk.buffer, op), wire_op))
        divisors.append(divisor)

    def finish() -> list[torch.Tensor]:
        for chunk, divisor in zip(chunks, divisors, strict=True):
            _scale(chunk.buffer, divisor, postscale)
            chunk.write_back(outputs)
        return list(outputs)

    return Pending(handles, finish)


def broadcast(
    communicator: Communicator,
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    root: int,
    name: str | None = None,
) -> Pending[list[torch.Tensor]]:
    """Copy `tensors` of rank `root` into `outputs` of all ranks.

    Raises
    ------
    RanksDisagree
        Ranks are not about to do the same.
    ValueError
        `root` is no rank.
    """
    check_root(root, communicator.size)
    communicator.agree(description.broadcast(root, tensors, name))
    chunks = pack(tensors)
    handles = []
    for chunk in chunks:
        if communicator.rank == root:
            chunk.fill(tensors)
        handles.append(communicator.broadcast_async(chunk.buffer, root))

    def finish() -> list[torch.Tensor]:
        if communicator.rank != root or outputs is not tensors:
            for chunk in chunks:
                chunk.write_back(outputs)
        return list(outputs)

    return Pending(handles, finish)


def allgather(
    communicator: Communicator, tensor: torch.Tensor, name: str | None = None
) -> tuple[Pending[torch.Tensor], list[int]]:
    """Concatenate every rank's `tensor` along the first dimension; lengths may differ.

    Returns
    -------
    pending : Pending
        Gives a tensor of shape (sum of first dimensions, …).
    lengths : list of int
        First dimension of each rank's tensor. Exchanged before this function returns.

    Raises
    ------
    RanksDisagree
        Types, or other dimensions, differ; or ranks are not about to do the same.
    """
    source = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    lengths = communicator.agree(description.rows("allgather", source, name), source.shape[0])
    longest = (max(lengths), *source.shape[1:])
    mine = source.new_empty(longest)
    mine[: source.shape[0]].copy_(source)
    everyone = [torch.empty_like(mine) for _ in lengths]
    handles = [communicator.allgather_async(everyone, mine)] if mine.numel() else []

    def finish() -> torch.Tensor:
        parts = [part[:length] for part, length in zip(everyone, lengths, strict=True)]
        return torch.cat(parts)

    return Pending(handles, finish), lengths


def alltoall(
    communicator: Communicator,
    tensor: torch.Tensor,
    splits: Sequence[int],
    name: str | None = None,
) -> tuple[Pending[torch.Tensor], list[int]]:
    """Send ``splits[i]`` rows of `tensor` to rank ``i``, and concatenate what all send here.

    Returns
    -------
    pending : Pending
        Gives a tensor of shape (rows received, …).
    received : list of int
        Rows received from each rank.

    Raises
    ------
    RanksDisagree
        Types, or dimensions other than the first, differ; or ranks are not about to do the same.
    """
    communicator.agree(description.rows("alltoall", tensor, name))
    size = communicator.size
    everyone = communicator.allgather_bytes(struct.pack(f"{size}q", *splits))
    received = [struct.unpack(f"{size}q", row)[communicator.rank] for row in everyone]
    inputs = [_private(part) for part in torch.split(tensor, list(splits))]
    outputs = [inputs[0].new_empty((length, *tensor.shape[1:])) for length in received]
    handles = [communicator.all_to_all_async(outputs, inputs)]

    def finish() -> torch.Tensor:
        return torch.cat(outputs)

    return Pending(handles, finish), received


def reducescatter(
    communicator: Communicator,
    tensor: torch.Tensor,
    op: Op = Op.AVERAGE,
    prescale: float = 1.0,
    postscale: float = 1.0,
    name: str | None = None,
) -> Pending[torch.Tensor]:
    """Reduce `tensor` over all ranks and keep this rank's rows of it.

    The rows are dealt out evenly; the first ranks get one more where they do not divide.
    """
    _check_factors(tensor, prescale, postscale)
    what = description.reduction(
        "reducescatter", op, [tensor], name, prescale=prescale, postscale=postscale
    )
    communicator.agree(what)
    size = communicator.size
    rows, more = divmod(tensor.shape[0], size)
    counts = [rows + (rank < more) for rank in range(size)]
    inputs = [_private(part) for part in torch.split(tensor, counts)]
    if prescale != 1.0:
        for part in inputs:
            part.mul_(prescale)
    output = torch.empty_like(inputs[communicator.rank])
    wire_op, divisor = _wire_op(op, tensor.dtype, size)
    handle = communicator.reduce_scatter_async(output, inputs, wire_op)
    return Pending([handle], lambda: _scale(output, divisor, postscale))


def _private(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _as_real(tensor: torch.Tensor, op: Op) -> torch.Tensor:
    """Return a view of complex numbers as pairs, which add up as they do."""
    pairs = tensor.dtype.is_complex and op in (Op.SUM, Op.AVERAGE)
    return torch.view_as_real(tensor) if pairs else tensor


def _wire_op(op: Op, dtype: torch.dtype, size: int) -> tuple[Op, int]:
    """Return the operation to ask for, and what to divide integers by afterwards."""
    if op is Op.AVERAGE and not (dtype.is_floating_point or dtype.is_complex):
        return Op.SUM, size
    return op, 1


def _scale(tensor: torch.Tensor, divisor: int, factor: float) -> torch.Tensor:
    if divisor != 1:
        tensor.floor_divide_(divisor)
    return tensor if factor == 1.0 else tensor.mul_(factor)


def _check_factors(tensor: torch.Tensor, *factors: float) -> None:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return
    if any(factor != 1.0 for factor in factors):
        raise ValueError(
            f"prescale_factor and postscale_factor need floating point, not {tensor.dtype}"
        )


def check_root(root: int, size: int) -> None:
    """Refuse a root that is no rank."""
    if not 0 <= root < size:
        raise ValueError(f"root_rank must be a rank from 0 to {size - 1}, not {root}")
