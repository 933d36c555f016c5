"""Staging of tensors in the host memory that transports read and write.

A tensor on another device is copied to pinned memory before an operation, and back on completion,
in the order of the current stream. The memory is new for each operation and never reused, because
an operation that has failed may still write to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nbelastic.collectives.transport import Op

if TYPE_CHECKING:
    import torch

    from nbelastic.collectives.transport import Handle, Tensors


def on_host(tensor: torch.Tensor, *, load: bool = True) -> torch.Tensor:
    """Return `tensor` itself if in host memory, else a staging buffer for it.

    To `load` its values waits for an accelerator's kernels that compute them.
    """
    plain = tensor.detach()
    if is_on_host(plain):
        return plain
    import torch

    pinned = plain.device.type == "cuda"  # from other memory the copy back would wait
    staged = torch.empty(plain.shape, dtype=plain.dtype, device="cpu", pin_memory=pinned)
    if load:
        staged.copy_(plain)
    return staged


def delivered(handle: Handle, tensors: Tensors, buffers: Tensors) -> Handle:
    """Return a handle that copies `buffers` back to their tensors, where they are not the same."""
    for tensor, buffer in zip(tensors, buffers, strict=True):
        if tensor.data_ptr() != buffer.data_ptr():
            return Delivered(handle, lambda: copy_back(buffers, tensors))
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
            self._deliver = None  # a second wait must not overwrite the tensors


def copy_back(buffers: torch.Tensor | Tensors, tensors: Tensors) -> None:
    """Copy buffers, or one vector for all, to `tensors`, but for those whose memory it is."""
    import torch

    if isinstance(buffers, torch.Tensor):
        buffers = torch.split(buffers, [tensor.numel() for tensor in tensors])
    for buffer, tensor in zip(buffers, tensors, strict=True):
        if tensor.data_ptr() != buffer.data_ptr():
            # The allocator of pinned memory keeps it until the stream has passed the copy.
            tensor.detach().view(-1).copy_(buffer.view(-1), non_blocking=True)


def slice_bounds(count: int, slices: int, line: int) -> list[int]:
    """Return the begin of each slice of `count` elements, at multiples of `line`, and the end."""
    lines = -(-count // line)
    return [min(lines * each // slices * line, count) for each in range(slices + 1)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a contiguous `tensor` as bytes."""
    import torch

    return tensor.detach().view(-1).view(torch.uint8)


def as_number(dtype: torch.dtype, op: Op) -> tuple[torch.dtype, Op]:
    """Return the type and the operator that reduce values of `dtype`.

    A sum of booleans is whether any is true, a product whether all are; bytes would overflow.
    """
    import torch

    if dtype is not torch.bool:
        return dtype, op
    return torch.uint8, Op.MAX if op in (Op.SUM, Op.MAX) else Op.MIN


def copy_parts(tensors: Tensors, vector: torch.Tensor) -> None:
    """Copy `tensors` to a vector, one after the other."""
    import torch

    torch.cat([tensor.detach().view(-1) for tensor in tensors], out=vector)


def concatenate(tensors: Tensors) -> torch.Tensor:
    """Return a flat copy of all `tensors`, one after the other, in host memory."""
    import torch

    return on_host(torch.cat([tensor.detach().view(-1) for tensor in tensors]))


def is_on_host(tensor: torch.Tensor) -> bool:
    """Return whether a tensor needs no staging."""
    return tensor.device.type == "cpu"
