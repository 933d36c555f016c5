"""Gradients that are reduced where backward has left them.

What :class:`~nbelastic.torch.buckets.Bucket` is for gradients that are copied together, this is for
others: it has no buffer, so nothing is copied before or after. It says nothing of itself on the
way: which of its gradients any rank had travels with the layout's last bucket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nbelastic.collectives import Op
from nbelastic.torch.buckets import Scaling

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbelastic.collectives import Communicator, Handle
    from nbelastic.torch.adasum import GradientOp

__all__ = ["InPlaceBucket"]


class InPlaceBucket:
    """The gradients of some parameters on the CPU, and their reduction; used as a ``Bucket`` is.

    Parameters
    ----------
    parameters : sequence of Tensor
        Of one type, whose gradients travel as what they are. More than one only where the
        communicator coalesces.

    Attributes
    ----------
    expected : int
        How many gradients have not arrived yet; for whoever fills it.
    used : list of bool
        Of which parameters any rank had a gradient; to be set before :meth:`deliver`.
    """

    plain = True

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = parameters
        self.dtype = parameters[0].dtype
        self.views: list[torch.Tensor | None] = [None] * len(parameters)
        self.used = [False] * len(parameters)
        self.expected = len(parameters)
        self._scaling = Scaling()
        self._filled = [False] * len(parameters)
        self._gradients: dict[int, torch.Tensor] = {}
        self._handle: Handle | None = None

    def begin(self, _communicator: Communicator, scaling: Scaling | None = None) -> None:
        """Be empty, for a new step."""
        self._scaling = scaling or Scaling()
        self.used = [False] * len(self.parameters)
        self._filled = [False] * len(self.parameters)
        self.expected = len(self.parameters)
        self.drop()

    def filled(self) -> list[bool]:
        """Return of which parameters the gradients have been put."""
        return list(self._filled)

    def missing(self) -> list[int]:
        """Return the positions whose gradients have not been put."""
        return [position for position, filled in enumerate(self._filled) if not filled]

    def put_all(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Take gradients, each once per step; what cannot be reduced in place is copied."""
        for position, gradient in gradients.items():
            mine = gradient
            if (
                gradient.requires_grad
                or not gradient.is_contiguous()
                or gradient.dtype != self.dtype
            ):
                like = torch.empty(gradient.shape, dtype=self.dtype)
                mine = like.copy_(gradient.detach())
            if self._scaling.before != 1.0:
                mine.mul_(1 / self._scaling.before)
            self._gradients[position] = mine
            self._filled[position] = True

    @property
    def op(self) -> Op | GradientOp:
        """How the gradients are reduced."""
        return self._scaling.op

    def values(self, _riders: Sequence[float] = ()) -> list[torch.Tensor]:
        """Return what is to be reduced; a gradient that is missing counts as zero."""
        for position in self.missing():
            shape = self.parameters[position].shape
            self._gradients[position] = torch.zeros(shape, dtype=self.dtype)
        # In an order that is the same on all ranks; `data` counts changes in place by itself.
        return [self._gradients[position].data for position in range(len(self.parameters))]

    def launch(self, communicator: Communicator, _riders: Sequence[float] = ()) -> None:
        """Begin the reduction."""
        op, values = self.op, self.values()
        assert isinstance(op, Op)
        if communicator.overlaps:
            self._handle = communicator.allreduce_coalesced_async(values, op)
        else:
            communicator.allreduce_coalesced(values, op)

    def wait(self) -> None:
        """Wait until the reduced gradients are there.

        Raises
        ------
        CollectiveError
            The reduction failed; the bucket must be dropped.
        """
        if self._handle is not None:
            self._handle.wait()
            self._handle = None

    def deliver(self) -> None:
        """Make the reduced gradient that of each parameter that any rank had one for."""
        gradients, self._gradients = self._gradients, {}
        for position, gradient in gradients.items():
            if not self.used[position]:
                continue
            if self._scaling.after != 1.0:
                gradient.div_(self._scaling.after)
            parameter = self.parameters[position]
            if parameter.grad is gradient:
                continue
            if parameter.is_contiguous():
                parameter.grad = gradient
            else:
                parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)

    def release(self) -> None:
        """Let go of the gradients, which stay their parameters'."""
        self._gradients, self._handle = {}, None

    def drop(self) -> None:
        """Let go of the gradients, and of an operation under way that has them."""
        self.release()
