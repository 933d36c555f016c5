"""Gradients of several parameters in one buffer, reduced by one operation.

A :class:`Bucket` knows nothing of steps, hooks or optimizers: it is filled, launched, waited for
and read, and its buffer is used again for the next step. The buffer is the communicator's, so that
it can be reduced where it is, and where gradients travel as they are, a parameter's ``grad`` is a
*view* of it: what is reduced need not be copied back. Beside the gradients a bucket carries one
element per parameter that counts on how many ranks it had a gradient, so that a parameter which
nobody used keeps none, as it would in training without other ranks; and *riders*, numbers that are
summed over the ranks on the way.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from nbelastic.collectives import Op
from nbelastic.torch.adasum import adasum_async
from nbelastic.torch.staging import Staging, is_staged

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbelastic.collectives import Communicator, Handle
    from nbelastic.torch.adasum import GradientOp

__all__ = ["Bucket", "Scaling"]


class Scaling(NamedTuple):
    """What a bucket's gradients are divided by, and how they are reduced in between."""

    before: float = 1.0
    op: Op | GradientOp = Op.SUM
    after: float = 1.0


class Bucket:
    """Room for the gradients of some parameters, and their reduction.

    In each step: :meth:`begin`, :meth:`put` for each gradient there is, :meth:`launch`,
    :meth:`wait`, :meth:`deliver`. :meth:`drop` is legal at any time, and the only thing to do after
    a failure: the buffer then belongs to the communicator that failed.

    Parameters
    ----------
    parameters : sequence of Tensor
        On one device. There may be none, where there are riders.
    dtype : torch.dtype
        Type of the elements on the wire.
    riders : int, default 0
        How many numbers to sum over the ranks beside the gradients.

    Attributes
    ----------
    device : torch.device
        Where the parameters are.
    expected : int
        How many gradients have not arrived yet; for whoever fills it.
    pending : dict of int to Tensor
        What has arrived but is not in it yet, of so many `pending_bytes`; for whoever fills it.
    plain : bool
        Whether gradients travel as what they are.
    staged : bool
        Whether they are on an accelerator, and have to be brought to the host first.
    views : list of Tensor or None
        For each parameter the tensor that its gradient is to be: part of the buffer. None where
        gradients are copied to the buffer and back: those of another type, and those of parameters
        that are not contiguous, since another rank's may be.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], dtype: torch.dtype, riders: int = 0
    ) -> None:
        self.parameters = parameters
        self.dtype = dtype
        self.plain = all(parameter.dtype == dtype for parameter in parameters)
        self.views: list[torch.Tensor | None] = []
        self._counts = [parameter.numel() for parameter in parameters]
        self._starts = list(itertools.accumulate(self._counts, initial=0))
        self._tail_length = len(parameters) + riders
        self.device = parameters[0].device if parameters else torch.device("cpu")
        self.staged = is_staged(self.device)
        self._maker: weakref.ref[Communicator] | None = None
        self._wire: torch.Tensor | None = None
        self._flat: torch.Tensor | None = None
        self._staging: Staging | None = None
        self._parts: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._tail: torch.Tensor | None = None
        self._scaling = Scaling()
        self._factor: torch.Tensor | None = None
        self._handle: Handle | None = None
        self._filled: list[bool] = []
        self._sealed = False
        self.expected = self._left = self.pending_bytes = 0
        self.pending: dict[int, torch.Tensor] = {}
        self._sums: list[complex] = []

    def begin(self, communicator: Communicator, scaling: Scaling | None = None) -> None:
        """Be empty, for a new step with `communicator`, in memory of its own."""
        if self._maker is None or self._maker() is not communicator:
            self._forget()
            self._maker = weakref.ref(communicator)
            self._allocate(communicator)
        scaling = scaling or Scaling()
        if scaling != self._scaling:
            # A tensor without dimensions is a number that need not be made into one each time.
            before = scaling.before
            self._factor = None if before == 1.0 else torch.tensor(1 / before, dtype=torch.float64)
            self._scaling = scaling
        self._filled = [False] * len(self.parameters)
        self._sealed = False
        self.expected = self._left = len(self.parameters)
        self.pending, self.pending_bytes = {}, 0
        self._sums = []

    def put(self, position: int, gradient: torch.Tensor) -> None:
        """Take the gradient of the parameter at `position`, once per step.

        It is copied unless it is in its place already.
        """
        self._filled[position] = True
        self._left -= 1
        part = self._parts[position]
        factor = self._factor
        if gradient is part and part.data_ptr() == self._addresses[position]:
            if factor is not None:
                part.mul_(factor)
        else:
            source = gradient.detach() if gradient.requires_grad else gradient
            if gradient is part:  # somebody has set its `data`
                part = self._put_up(position)
            if factor is None:
                part.copy_(source)
            elif source.dtype == part.dtype and source.device == part.device:
                torch.mul(source, factor, out=part)
            else:
                part.copy_(source).mul_(factor)

    def put_all(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Take several gradients, by the positions of their parameters."""
        parts, sources = [], []
        # One by one what is divided passes through the processor once, not twice; an accelerator
        # would rather begin few operations.
        factor = None if self.staged else self._factor
        for position, gradient in gradients.items():
            part = self._parts[position]
            if gradient is part or self.views[position] is None:
                self.put(position, gradient)
                continue
            source = gradient.detach() if gradient.requires_grad else gradient
            self._filled[position] = True
            self._left -= 1
            if factor is None:
                parts.append(part)
                sources.append(source)
            else:
                torch.mul(source, factor, out=part)
        if parts:
            torch._foreach_copy_(parts, sources)
            if self._factor is not None:
                torch._foreach_mul_(parts, 1 / self._scaling.before)

    def attach(self, position: int) -> torch.Tensor:
        """Make the view of the parameter at `position`, which has one, its gradient; return it."""
        view = self.views[position]
        assert view is not None
        parameter = self.parameters[position]
        if parameter.grad is not view:
            parameter.grad = view
        return view

    @property
    def full(self) -> bool:
        """Whether all parameters' gradients have been put."""
        return self._left == 0

    def missing(self) -> list[int]:
        """Return the positions whose gradients have not been put."""
        return [position for position, filled in enumerate(self._filled) if not filled]

    def seal(self) -> None:
        """Take in that no more gradients come; what is missing counts as zero.

        Those on an accelerator are on their way to the host from here on.
        """
        if self._sealed:
            return
        self._sealed = True
        if self._left:
            for position in self.missing():
                part = self._parts[position]
                moved = part.data_ptr() != self._addresses[position]
                (self._put_up(position) if moved else part).zero_()
        if self._staging is not None:
            self._staging.fetch()

    @property
    def op(self) -> Op | GradientOp:
        """How the gradients are reduced."""
        return self._scaling.op

    def values(self, riders: Sequence[float] = ()) -> list[torch.Tensor]:
        """Return what is to be reduced: the buffer, complete."""
        self.seal()
        assert self._wire is not None
        assert self._tail is not None
        if self._staging is not None:
            self._staging.land()
        self._tail.copy_(torch.tensor([*map(float, self._filled), *riders], dtype=self.dtype))
        return [self._wire]

    def launch(self, communicator: Communicator, riders: Sequence[float] = ()) -> None:
        """Begin the reduction.

        Where nothing would go on beside the rank's own computing, it ends in here as well.
        """
        op, (wire,) = self.op, self.values(riders)
        if isinstance(op, Op) and not communicator.overlaps:
            communicator.allreduce(wire, op)
            if self._staging is not None:
                self._staging.send_back()
        elif isinstance(op, Op):
            self._handle = communicator.allreduce_async(wire, op)
        else:
            width = wire.numel() // (self._starts[-1] + self._tail_length)
            lengths = [count * width for count in self._counts]
            self._handle = adasum_async(communicator, wire, lengths)

    def wait(self) -> None:
        """Wait until the reduced gradients are there.

        Raises
        ------
        CollectiveError
            The reduction failed; the bucket must be dropped.
        """
        assert self._tail is not None
        if self._handle is not None:
            self._handle.wait()
            if self._staging is not None:
                self._staging.send_back()
        self._handle = None
        if self._staging is not None:
            self._staging.settle()
        self._sums = self._tail.tolist()

    def used(self, position: int) -> bool:
        """Return whether the parameter at `position` had a gradient on any rank."""
        return abs(self._sums[position]) > 0

    def rider(self, index: int) -> float:
        """Return a rider's sum over all ranks, or its average where gradients are averaged."""
        return abs(self._sums[len(self.parameters) + index])

    def deliver(self) -> None:
        """Make the reduced gradient that of each parameter that any rank had one for."""
        after = self._scaling.after
        for position, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if not self.used(position):
                continue
            part = self._parts[position]
            if view is not None:
                if after != 1.0:
                    part.div_(after)
                if parameter.grad is not view:
                    parameter.grad = view
            else:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter, requires_grad=False)
                _divide(part, after, parameter.grad)

    def release(self) -> None:
        """Let go of a buffer that has not been given away; gradients in it move out."""
        for view, parameter in zip(self.views, self.parameters, strict=False):
            if view is not None and parameter.grad is view:
                parameter.grad = view.clone()
        self._forget()

    def drop(self) -> None:
        """Let go of the buffer, of gradients in it, and of an operation under way.

        The next step has a new buffer.
        """
        for view, parameter in zip(self.views, self.parameters, strict=False):
            if view is not None and parameter.grad is view:
                parameter.grad = None
        self._forget()

    def _forget(self) -> None:
        self._maker = self._wire = self._flat = self._tail = self._handle = self._staging = None
        self.views, self._parts, self._addresses, self.pending = [], [], [], {}
        self._filled, self._sums = [], []

    def _allocate(self, communicator: Communicator) -> None:
        width, dtype = (2, self.dtype.to_real()) if self.dtype.is_complex else (1, self.dtype)
        if self.staged:
            count = width * self._starts[-1]
            home = torch.empty(count, dtype=dtype, device=self.device)
            self._staging = Staging(communicator, home, width * self._tail_length)
            self._wire = self._staging.host
        else:
            home = self._wire = communicator.empty(
                width * (self._starts[-1] + self._tail_length), dtype
            )
        self._flat = self._shaped(home)
        self._tail = self._shaped(self._wire)[self._starts[-1] :]
        self._parts = list(self.parameters)
        self.views = [None] * len(self.parameters)
        self._addresses = [0] * len(self.parameters)
        for position in range(len(self.parameters)):
            self._put_up(position)

    def _shaped(self, memory: torch.Tensor) -> torch.Tensor:
        """Return memory as elements of the type on the wire."""
        return torch.view_as_complex(memory.view(-1, 2)) if self.dtype.is_complex else memory

    def _put_up(self, position: int) -> torch.Tensor:
        """Return a new tensor for a part of the buffer."""
        assert self._flat is not None
        parameter, start = self.parameters[position], self._starts[position]
        part = self._flat[start : start + self._counts[position]].view(parameter.shape)
        fits = parameter.is_contiguous() and parameter.dtype == self.dtype == getattr(
            parameter, "grad_dtype", self.dtype
        )
        if fits:  # strides of dimensions of length 1 may be anything
            part = part.as_strided(part.shape, parameter.stride(), part.storage_offset())
        # Its `data` counts changes in place by itself, the part itself those of the whole buffer.
        self._parts[position] = part = part.data
        self._addresses[position] = part.data_ptr()
        self.views[position] = part if fits else None
        return part


def _divide(reduced: torch.Tensor, divisor: float, out: torch.Tensor) -> None:
    if divisor == 1.0:
        out.copy_(reduced)
    elif reduced.dtype == out.dtype:
        torch.div(reduced, divisor, out=out)
    else:
        out.copy_(reduced).div_(divisor)
