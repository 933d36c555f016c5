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
    from collections.abc import Sequence

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
    moved : list of int
        The positions of parameters whose gradients are not reduced where they are: they lack one,
        or it had to be copied.
    used : dict of int to bool
        Of which of those any rank had a gradient; to be set before :meth:`deliver`.
    """

    plain = True

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = parameters
        self.dtype = parameters[0].dtype
        self.views: list[torch.Tensor | None] = [None] * len(parameters)
        self.moved: list[int] = []
        self.used: dict[int, bool] = {}
        self.expected = len(parameters)
        self._scaling = Scaling()
        self._filled = [False] * len(parameters)
        self._gradients: list[torch.Tensor] = []
        self._handle: Handle | None = None

    def begin(self, _communicator: Communicator, scaling: Scaling | None = None) -> None:
        """Be empty, for a new step."""
        self._scaling = scaling or Scaling()
        self._filled = [False] * len(self.parameters)
        self.expected = len(self.parameters)
        self.drop()

    def filled(self) -> list[bool]:
        """Return of which parameters the gradients have been put."""
        return list(self._filled)

    @property
    def divides(self) -> bool:
        """Whether gradients are changed when they are put."""
        return self._scaling.before != 1.0

    def put_all(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of all parameters, once per step.

        One that is missing counts as zero; what cannot be reduced in place is copied.
        """
        dtype = self.dtype
        mine, moved = list(gradients), []
        for position, gradient in enumerate(gradients):
            if gradient is None:
                moved.append(position)
                mine[position] = torch.zeros(self.parameters[position].shape, dtype=dtype)
                continue
            if (
                gradient.requires_grad
                or gradient.dtype is not dtype
                or not gradient.is_contiguous()
            ):
                moved.append(position)
                like = torch.empty(gradient.shape, dtype=dtype)
                mine[position] = like.copy_(gradient.detach())
        self._gradients, self.moved = [each for each in mine if each is not None], moved
        if self.divides:
            torch._foreach_mul_(self._gradients, 1 / self._scaling.before)
        self._filled = [gradient is not None for gradient in gradients]

    @property
    def op(self) -> Op | GradientOp:
        """How the gradients are reduced."""
        return self._scaling.op

    def values(self, _riders: Sequence[float] = ()) -> list[torch.Tensor]:
        """Return what is to be reduced, in an order that is the same on all ranks."""
        return self._gradients

    def launch(self, communicator: Communicator, _riders: Sequence[float] = ()) -> None:
        """Begin the reduction."""
        op = self.op
        values = [each.data for each in self._gradients]  # which counts changes in place by itself
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
        gradients, self._gradients = self._gradients, []
        if self._scaling.after != 1.0:
            torch._foreach_div_(gradients, self._scaling.after)
        for position in self.moved:
            if not self.used[position]:
                continue
            parameter, gradient = self.parameters[position], gradients[position]
            if parameter.is_contiguous():
                parameter.grad = gradient
            else:
                parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)

    def release(self) -> None:
        """Let go of the gradients, which stay their parameters'."""
        self._gradients, self._handle = [], None

    def drop(self) -> None:
        """Let go of the gradients, and of an operation under way that has them."""
        self.release()
