"""Checks of arguments, before anything is sent.

A wrong argument raises ``ValueError`` on its rank and leaves the communicator usable. This module
does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbelastic.collectives.transport import Op

if TYPE_CHECKING:
    import torch

    from nbelastic.collectives.transport import Tensors


_REDUCIBLE = "bfloat16, bool, float16, float32, float64, int32, int64, int8, uint8"
_TYPES = {f"torch.{name}" for name in _REDUCIBLE.split(", ")}


def check_op(tensor: torch.Tensor, op: Op) -> None:
    """Refuse an `op` that the type of `tensor` does not support."""
    if str(tensor.dtype) not in _TYPES:
        raise ValueError(f"{tensor.dtype} cannot be reduced; convert it to one of {_REDUCIBLE}")
    if op is Op.AVERAGE and not tensor.dtype.is_floating_point:
        raise ValueError(
            f"Op.AVERAGE is for floating point, not {tensor.dtype}; use Op.SUM and divide"
        )


def check_rank(rank: int, size: int, name: str, own: int = -1) -> None:
    """Refuse a `rank` out of range, or the caller's `own`; `name` is that of the argument."""
    if not 0 <= rank < size:
        raise ValueError(f"{name} must be a rank from 0 to {size - 1}, not {rank}")
    if rank == own:
        raise ValueError(f"{name} is this rank itself ({rank}); a rank cannot message itself")


def check_contiguous(*tensors: torch.Tensor) -> None:
    """Refuse tensors that are not contiguous."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(
                f"tensor of shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())} "
                "is not contiguous; pass tensor.contiguous()"
            )


def check_together(tensors: Tensors, name: str, size: int | None = None) -> None:
    """Refuse tensors not contiguous, of several types, or too few or many for the `size`."""
    if size not in (None, len(tensors)):
        raise ValueError(f"{name} must hold one tensor per rank, {size}; it holds {len(tensors)}")
    check_contiguous(*tensors)
    # Reading a device costs more than all the rest.
    if len({(tensor.dtype, tensor.is_cpu or tensor.device) for tensor in tensors}) != 1:
        kinds = {f"{tensor.dtype} on {tensor.device}" for tensor in tensors}
        raise ValueError(f"{name} must be of one dtype and device, not {', '.join(sorted(kinds))}")


def check_alike(one: torch.Tensor, other: torch.Tensor, its_name: str, other_name: str) -> None:
    """Refuse two tensors that differ in shape, type or device."""
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        first, second = (f"{t.dtype}{list(t.shape)} on {t.device}" for t in (one, other))
        raise ValueError(f"{its_name} must be like {other_name}: {first} is not {second}")
