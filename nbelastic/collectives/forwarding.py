"""A communicator of which another does what there is to do."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

from nbelastic.collectives.communicator import Communicator, Handle, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["ForwardingCommunicator"]


class ForwardingCommunicator(Communicator):
    """All operations are another's; a subclass may keep some for itself."""

    @abc.abstractmethod
    def _target(self) -> Communicator:
        """Return whose they are."""

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new vector that is reduced without being copied."""
        return self._target().empty(count, dtype)

    def allreduce_async(self, tensor: torch.Tensor, op: Op = Op.SUM) -> Handle:
        """Reduce `tensor` over all ranks, in place."""
        return self._target().allreduce_async(tensor, op)

    def allreduce_coalesced_async(self, tensors: Sequence[torch.Tensor], op: Op = Op.SUM) -> Handle:
        """Reduce `tensors` over all ranks, in place, as one operation."""
        return self._target().allreduce_coalesced_async(tensors, op)

    def broadcast_async(self, tensor: torch.Tensor, root: int = 0) -> Handle:
        """Copy the `tensor` of rank `root` into that of all others."""
        return self._target().broadcast_async(tensor, root)

    def allgather_async(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Handle:
        """Collect every rank's `tensor` into `outputs`."""
        return self._target().allgather_async(outputs, tensor)

    def reduce_scatter_async(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Op = Op.SUM
    ) -> Handle:
        """Reduce ``inputs[i]`` of all ranks into `output` of rank ``i``."""
        return self._target().reduce_scatter_async(output, inputs, op)

    def all_to_all_async(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Handle:
        """Send ``inputs[i]`` to rank ``i``, receive ``outputs[i]`` from it."""
        return self._target().all_to_all_async(outputs, inputs)

    def barrier_async(self) -> Handle:
        """Complete when all ranks have arrived."""
        return self._target().barrier_async()

    def send_async(self, tensor: torch.Tensor, to: int) -> Handle:
        """Send `tensor` to rank `to`."""
        return self._target().send_async(tensor, to)

    def receive_async(self, tensor: torch.Tensor, source: int) -> Handle:
        """Fill `tensor` with what rank `source` sends."""
        return self._target().receive_async(tensor, source)
