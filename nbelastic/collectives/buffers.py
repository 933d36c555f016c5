"""Staging of tensors in the host memory that transports read and write.

A tensor on another device is copied to pinned memory before an operation, and back on completion,
in the order of the current stream. The memory is new for each operation and never reused, because
an operation that has failed may still write to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from nbelastic.collectives.transport import Handle


def on_host(tensor: torch.Tensor, *, load: bool = True) -> torch.Tensor:
    """Return `tensor` itself if in host memory, else a staging buffer for it.

    To `load` its values waits for an accelerator's kernels that compute them.
    """
    plain = tensor.detach()
    if is_on_host(plain):
        return plain
    import torch

    pinned = plain.device.type == "cuda"
    staged = torch.empty(plain.shape, dtype=plain.dtype, device="cpu", pin_memory=pinned)
    if load:
        staged.copy_(plain)
    return staged


def delivered(
    handle: Handle, tensors: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]
) -> Handle:
    """Return a handle that copies `buffers` back to their tensors, where they are not the same."""
    for tensor, buffer in zip(tensors, buffers, strict=True):
        if tensor.data_ptr() != buffer.data_ptr():
            return Delivered(handle, copying_back(tensors, buffers))
    return handle


class Delivered:
    """A handle on an operation whose outcome is then copied to the caller's tensors."""

    def __init__(self, handle: Handle, deliver: Callable[[], object]) -> None:
        self._handle = handle
        self._deliver: Callable[[], object] | None = deliver

    def done(self) -> bool:
        """Return whether the operation has ended."""
        return self._handle.done()

    def wait(self) -> None:
        """Wait for it, and copy."""
        self._handle.wait()
        if self._deliver is not None:
            self._deliver()
            self._deliver = None


def copying_back(
    tensors: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]
) -> Callable[[], None]:
    """Return a function that copies each of `buffers` back to its tensor."""

    def deliver() -> None:
        for tensor, buffer in zip(tensors, buffers, strict=True):
            if not is_on_host(tensor):
                # The allocator of pinned memory keeps it until the stream has passed the copy.
                tensor.detach().copy_(buffer, non_blocking=True)

    return deliver


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a contiguous `tensor` as bytes."""
    import torch

    return tensor.detach().view(-1).view(torch.uint8)


def concatenate(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a flat copy of all `tensors`, one after the other, in host memory."""
    import torch

    return on_host(torch.cat([tensor.detach().view(-1) for tensor in tensors]))


def is_on_host(tensor: torch.Tensor) -> bool:
    """Return whether a tensor needs no staging."""
    return tensor.device.type == "cpu"
