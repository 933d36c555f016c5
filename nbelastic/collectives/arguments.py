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


_REDUCIBLE = {
    "torch.float32",
    "torch.float64",
    "torch.float16",
    "torch.bfloat16",
    "torch.int8",
    "torch.int32",
    "torch.int64",
    "torch.uint8",
    "torch.bool",
}
_NAMES = ", ".join(sorted(name.removeprefix("torch.") for name in _REDUCIBLE))


def check_contiguous(*tensors: torch.Tensor) -> None:
    """Refuse tensors that are not contiguous."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(
                f"tensor of shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())} "
                "is not contiguous; pass tensor.contiguous()"
            )


def check_op(tensor: torch.Tensor, op: Op) -> None:
    """Refuse an `op` that the type of `tensor` does not support."""
    if str(tensor.dtype) not in _REDUCIBLE:
        raise ValueError(f"{tensor.dtype} cannot be reduced; convert it to one of {_NAMES}")
    if op is Op.AVERAGE and not tensor.dtype.is_floating_point:
        raise ValueError(
            f"Op.AVERAGE is for floating point, not {tensor.dtype}; use Op.SUM and divide"
        )


def check_together(tensors: Tensors, op: Op) -> None:
    """Refuse tensors that cannot be reduced together: none, or of several types."""
    _check_same_kind(tensors, "tensors")
    check_op(tensors[0], op)
    check_contiguous(*tensors)


def check_rank(rank: int, size: int, name: str) -> None:
    """Refuse a `rank` out of range; `name` is the name of the argument."""
    if not 0 <= rank < size:
        raise ValueError(f"{name} must be a rank from 0 to {size - 1}, not {rank}")


def check_peer(rank: int, own: int, size: int, name: str) -> None:
    """Refuse a `rank` out of range, or the caller's own."""
    check_rank(rank, size, name)
    if rank == own:
        raise ValueError(f"{name} is this rank itself ({rank}); a rank cannot message itself")


def check_per_rank(tensors: Tensors, size: int, name: str) -> None:
    """Refuse a sequence other than a contiguous tensor per rank, all of a type."""
    if len(tensors) != size:
        raise ValueError(f"{name} must hold one tensor per rank, {size}; it holds {len(tensors)}")
    check_contiguous(*tensors)
    _check_same_kind(tensors, name)


def check_gather(outputs: Tensors, tensor: torch.Tensor, size: int) -> None:
    """Refuse arguments of an allgather that do not fit together."""
    check_per_rank(outputs, size, "outputs")
    check_contiguous(tensor)
    for output in outputs:
        _check_alike(output, tensor, "every output", "the tensor gathered")


def check_reduce_scatter(
    output: torch.Tensor, inputs: Tensors, rank: int, size: int, op: Op
) -> None:
    """Refuse arguments of a reduce-scatter that do not fit together."""
    check_per_rank(inputs, size, "inputs")
    check_contiguous(output)
    check_op(output, op)
    _check_alike(output, inputs[rank], "output", f"inputs[{rank}], this rank's own part")


def check_exchange(outputs: Tensors, inputs: Tensors, rank: int, size: int) -> None:
    """Refuse arguments of an all-to-all that do not fit together."""
    check_per_rank(outputs, size, "outputs")
    check_per_rank(inputs, size, "inputs")
    _check_alike(outputs[rank], inputs[rank], f"outputs[{rank}]", f"inputs[{rank}]")


def _check_same_kind(tensors: Tensors, name: str) -> None:
    # Reading a device costs more than all the rest.
    if len({(tensor.dtype, tensor.is_cpu or tensor.device) for tensor in tensors}) != 1:
        kinds = {f"{tensor.dtype} on {tensor.device}" for tensor in tensors}
        raise ValueError(f"{name} must be of one dtype and device, not {', '.join(sorted(kinds))}")


def _check_alike(one: torch.Tensor, other: torch.Tensor, its_name: str, other_name: str) -> None:
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        raise ValueError(
            f"{its_name} must be like {other_name}: {_describe(one)} is not {_describe(other)}"
        )


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)} on {tensor.device}"
