"""Fusion of many tensors in few buffers, for few operations.

A communicator is lent the buffers (see :mod:`nbelastic.collectives.communicator`). Those of a
:func:`plan` are private: the caller's tensors are read when such a buffer is filled and written
when its operation has succeeded, never in between. They are on the CPU, so that ranks with tensors
on different devices form the same ones. Those of :func:`lend` hold one tensor each, where it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

LIMIT_BYTES = 64 << 20


class Chunk:
    """Tensors of the same type, consecutive in a buffer."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        indices: Sequence[int],
        buffer: torch.Tensor | None = None,
    ) -> None:
        self._indices = indices  # one list can be sent, and another of the same shapes receives
        self._shapes = [tensors[index].shape for index in indices]
        self.counts = [shape.numel() for shape in self._shapes]
        if buffer is None:  # uninitialised until fill()
            dtype = tensors[indices[0]].dtype
            buffer = torch.empty(sum(self.counts), dtype=dtype, device="cpu")
        self.buffer = buffer
        self.owner: torch.Tensor | None = None  # the only tensor, if the buffer is its memory

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy this chunk's part of `tensors` into the buffer."""
        if self.owner is not tensors[self._indices[0]]:  # else its memory is the buffer
            for index, part in zip(self._indices, self._parts(), strict=True):
                part.copy_(tensors[index].detach())

    def write_back(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the buffer into this chunk's part of `tensors`; autograd does not record it."""
        if self.owner is not tensors[self._indices[0]]:
            with torch.no_grad():
                for index, part in zip(self._indices, self._parts(), strict=True):
                    tensors[index].copy_(part)

    def _parts(self) -> list[torch.Tensor]:
        parts = torch.split(self.buffer, self.counts)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


def plan(tensors: Sequence[torch.Tensor], limit_bytes: int = LIMIT_BYTES) -> list[list[int]]:
    """Distribute `tensors` over as few chunks as possible; the same on all ranks."""
    chunks: list[list[int]] = []
    open_chunks: dict[torch.dtype, tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        nbytes = tensor.numel() * tensor.element_size()
        # Empty tensors need no chunk: outputs have their shape already.
        if nbytes == 0:
            continue
        chunk, used = open_chunks.get(tensor.dtype, ([], 0))
        if not chunk or used + nbytes > limit_bytes:
            chunk, used = [], 0
            chunks.append(chunk)
        chunk.append(index)
        open_chunks[tensor.dtype] = (chunk, used + nbytes)
    return chunks


def lend(tensors: Sequence[torch.Tensor], *, private: bool) -> list[Chunk]:
    """Return a chunk for each tensor: its own memory if that is contiguous, unless `private`."""
    chunks = []
    for index, tensor in enumerate(tensors):
        memory = tensor.detach()
        lent = not private and memory.is_contiguous()  # communicators take nothing else
        if not lent:
            memory = torch.empty_like(memory, memory_format=torch.contiguous_format)
        chunk = Chunk(tensors, [index], memory.view(-1))
        chunk.owner = tensor if lent else None
        chunks.append(chunk)
    return chunks
