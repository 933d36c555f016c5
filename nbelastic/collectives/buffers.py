"""Memory that Gloo can read and write.

Gloo works on dense memory of the host. Tensors that are elsewhere are staged: copied to pinned
memory before an operation, and back, in the order of the current stream, when it has succeeded.
Staged or composed, the memory is new for each operation and never kept: what an operation that
failed may still write to belongs to nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["as_bytes", "join", "on_host", "return_to", "returning"]


def on_host(tensor: torch.Tensor, *, load: bool = True) -> torch.Tensor:
    """Return memory of the host in place of `tensor`: its own, or new.

    Parameters
    ----------
    tensor : torch.Tensor
        A contiguous tensor on any device.
    load : bool, default True
        Whether what it holds is needed. On an accelerator that waits for the kernels that
        compute it.
    """
    plain = tensor.detach()
    if _is_on_host(plain):
        return plain
    pinned = plain.device.type == "cuda"
    staged = torch.empty(plain.shape, dtype=plain.dtype, device="cpu", pin_memory=pinned)
    if load:
        staged.copy_(plain)
    return staged


def return_to(tensor: torch.Tensor, buffer: torch.Tensor) -> None:
    """Bring what `buffer` holds to `tensor`, whose place it took."""
    if not _is_on_host(tensor):
        # The allocator of pinned memory keeps it until the stream has passed the copy.
        tensor.detach().copy_(buffer, non_blocking=True)


def returning(
    tensors: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]
) -> Callable[[], None]:
    """Return what brings each of `buffers` to the tensor whose place it took."""

    def land() -> None:
        for tensor, buffer in zip(tensors, buffers, strict=True):
            return_to(tensor, buffer)

    return land


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous `tensor` as bytes, whatever its type."""
    return tensor.detach().view(-1).view(torch.uint8)


def join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a copy of all `tensors`, flat and one after the other, on the host."""
    return on_host(torch.cat([tensor.detach().view(-1) for tensor in tensors]))


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"
