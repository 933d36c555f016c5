"""A gradient that is reduced where it is, by itself.

What :class:`~nbelastic.torch.buckets.Bucket` is for many, this is for one that is large: it has no
buffer, so nothing is copied before or after. It says nothing of itself on the way: how many ranks
had such a gradient travels with the layout's last bucket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nbelastic.collectives import Op
from nbelastic.torch.buckets import Scaling

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbelastic.collectives import Communicator, Handle

__all__ = ["LargeBucket"]


class LargeBucket:
    """The gradient of one parameter on the CPU, and its reduction; used as a ``Bucket`` is.

    Parameters
    ----------
    parameter : Tensor
        Whose gradient travels as what it is.

    Attributes
    ----------
    expected : int
        How many gradients have not arrived yet; for whoever fills it.
    full : bool
        Whether the gradient has been put.
    used : bool
        Whether any rank had a gradient; to be set before :meth:`deliver`.
    """

    plain = True

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameters = [parameter]
        self.dtype = parameter.dtype
        self.views: list[torch.Tensor | None] = [None]
        self.used = False
        self._scaling = Scaling()
        self.full = False
        self.expected = 1
        self._gradient: torch.Tensor | None = None
        self._handle: Handle | None = None

    def begin(self, _communicator: Communicator, scaling: Scaling | None = None) -> None:
        """Be empty, for a new step."""
        self._scaling = scaling or Scaling()
        self.used = self.full = False
        self.expected = 1
        self.drop()

    def put(self, _position: int, gradient: torch.Tensor) -> None:
        """Take the gradient, once per step; it is copied only if it cannot be reduced in place."""
        if gradient.requires_grad or not gradient.is_contiguous() or gradient.dtype != self.dtype:
            like = torch.empty(gradient.shape, dtype=self.dtype)
            gradient = like.copy_(gradient.detach())
        if self._scaling.before != 1.0:
            gradient.mul_(1 / self._scaling.before)
        self._gradient = gradient
        self.full = True

    def missing(self) -> list[int]:
        """Return the positions whose gradients have not been put."""
        return [] if self.full else [0]

    def put_all(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Take the gradient, if there is one."""
        for gradient in gradients.values():
            self.put(0, gradient)

    def launch(self, communicator: Communicator, _riders: Sequence[float] = ()) -> None:
        """Begin the reduction; a gradient that is missing counts as zero."""
        if self._gradient is None:
            self._gradient = torch.zeros(self.parameters[0].shape, dtype=self.dtype)
        op = self._scaling.op
        assert isinstance(op, Op)
        values = self._gradient.data  # it counts changes in place by itself
        if communicator.overlaps:
            self._handle = communicator.allreduce_async(values, op)
        else:
            communicator.allreduce(values, op)

    def wait(self) -> None:
        """Wait until the reduced gradient is there.

        Raises
        ------
        CollectiveError
            The reduction failed; the bucket must be dropped.
        """
        if self._handle is not None:
            self._handle.wait()
            self._handle = None

    def deliver(self) -> None:
        """Make the reduced gradient that of the parameter, if any rank had one."""
        gradient, self._gradient = self._gradient, None
        if not self.used or gradient is None:
            return
        if self._scaling.after != 1.0:
            gradient.div_(self._scaling.after)
        parameter = self.parameters[0]
        if parameter.grad is gradient:
            return
        if parameter.is_contiguous():
            parameter.grad = gradient
        else:
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)

    def release(self) -> None:
        """Let go of the gradient, which stays its parameter's."""
        self._gradient = self._handle = None

    def drop(self) -> None:
        """Let go of the gradient, and of an operation under way that has it."""
        self._gradient = self._handle = None
