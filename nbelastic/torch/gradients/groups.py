"""Groups of gradients for one operation each, in a buffer or in place."""

from __future__ import annotations

import abc
import itertools
from typing import TYPE_CHECKING, NamedTuple

import torch

from nbelastic.collectives import Op
from nbelastic.torch.ops.operation.adasum import adasum_async

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from nbelastic.collectives import Communicator, Handle
    from nbelastic.torch.gradients.arrived import ArrivedGradients
    from nbelastic.torch.ops.operation.adasum import GradientOp

# So many bytes are still in the processor's cache when they are copied.
HOT_BYTES = 256 << 10


class Scaling(NamedTuple):
    """Divisors of gradients, before and after their reduction."""

    before: float = 1.0
    op: Op | GradientOp = Op.SUM
    after: float = 1.0


class GradientGroup(abc.ABC):
    """Gradients of some parameters, and their reduction by one communicator.

    In each step: :meth:`begin`, :meth:`arrive` for each gradient that backward computes,
    :meth:`launch`, :meth:`wait`, :meth:`deliver`. After a failure the group is dropped, because
    memory then belongs to the communicator that failed. Where a group moves a gradient, it corrects
    the optimizer's record, `arrived`.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        dtype: torch.dtype,
        arrived: ArrivedGradients,
        scaling: Scaling,
    ) -> None:
        self.parameters = parameters
        self.dtype = dtype
        self.scaling = scaling
        # Parts of a buffer that gradients are to be; None where they stay outside of buffers.
        self.views: list[torch.Tensor | None] = [None] * len(parameters)
        self._arrived = arrived
        self._handles: list[Handle] = []
        self.begin()

    def begin(self) -> None:
        """Prepare for a new step."""
        self.expected = len(self.parameters)  # gradients that have not arrived in this step
        # Whether this rank has a gradient, by parameter; final after complete().
        self.present = [False] * len(self.parameters)
        self._complete = False

    @abc.abstractmethod
    def arrive(self, position: int, gradient: torch.Tensor) -> bool:
        """Take the final gradient of a parameter; return whether it was the last expected."""

    def complete(self) -> None:
        """Collect the present gradients; no more arrive. Idempotent.

        A gradient that was kept from an earlier step counts; one that is missing counts as zero.
        """
        if not self._complete:
            self._complete = True
            self._collect()

    @abc.abstractmethod
    def _collect(self) -> None: ...

    @abc.abstractmethod
    def values(self, trailer: Sequence[float] = ()) -> list[torch.Tensor]:
        """Complete the group and return what is to be reduced.

        The last group of a layout takes along a `trailer`: numbers to sum over the ranks.
        """

    @abc.abstractmethod
    def launch(self, communicator: Communicator, trailer: Sequence[float] = ()) -> None:
        """Begin the reduction of :meth:`values`."""

    def wait(self) -> None:
        """Wait until the reduced gradients are there."""
        for handle in self._handles:
            handle.wait()
        self._handles = []

    @abc.abstractmethod
    def deliver(self, counts: Sequence[complex]) -> None:
        """Give each parameter with a nonzero count of `counts` its reduced gradient.

        That is, for each, the sum or average over the ranks of whether they have a gradient.
        """


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device computes by itself, in memory of its own."""
    return device.type != "cpu"


class Staging:
    """Pinned host memory for a buffer, of one dimension, of an accelerator.

    An accelerator works asynchronously: when a hook of backward runs, its gradient may not have
    been computed yet. So no hook waits. A copy to the host goes on a stream of its own, as soon as
    the gradients of a buffer are there. Python waits once for each buffer, when it has nothing left
    to launch. The copy back goes on the stream that uses the gradients next: the two directions of
    the bus do not disturb one another.

    In each step: :meth:`fetch`, :meth:`wait_fetched`, :meth:`send_back`. Both may be freed at any
    time, also during a copy. Copies of CUDA's are asynchronous; for other devices they are made at
    once.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        cuda = buffer.device.type == "cuda"
        self.host = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=cuda)
        self._stream: torch.cuda.Stream | None = None
        if cuda:
            self._stream = torch.cuda.Stream(buffer.device)  # type: ignore[no-untyped-call]

    def fetch(self) -> None:
        """Begin to copy the buffer to the host, after all that the present stream has to do."""
        if self._stream is None:
            self.host.copy_(self._buffer)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._buffer.device))
        with torch.cuda.stream(self._stream):
            self.host.copy_(self._buffer, non_blocking=True)
        # The allocator does not reuse its memory before this stream has read it.
        self._buffer.record_stream(self._stream)

    def wait_fetched(self) -> None:
        """Wait until the host has the buffer."""
        if self._stream is not None:
            self._stream.synchronize()

    def send_back(self) -> None:
        """Begin to copy the host's memory to the buffer, on the present stream."""
        self._buffer.copy_(self.host, non_blocking=True)


class Bucket(GradientGroup):
    """Gradients that are copied to a buffer, once per step, soon after they have arrived.

    The buffer is the communicator's, so that it is reduced where it is, and serves all steps. Where
    gradients travel as they are, ``parameter.grad`` becomes a *view* of it, and nothing is copied
    back. Others are copied to the buffer and back: those of another type, and those of parameters
    that are not contiguous, since another rank's may be.

    A `trailer` of that length travels along. An accelerator's buffer is there, and its trailer,
    which the rank's thread reads, is reduced on the host by itself. So is the buffer, unless the
    accelerator is one of the `devices`, types on which the communicator reduces.
    """

    def __init__(
        self,
        communicator: Communicator,
        parameters: Sequence[torch.Tensor],
        dtype: torch.dtype,
        arrived: ArrivedGradients,
        scaling: Scaling | None = None,
        trailer: int = 0,
        devices: Collection[str] = (),
    ) -> None:
        self._lengths = [parameter.numel() for parameter in parameters]
        self._starts = list(itertools.accumulate(self._lengths, initial=0))
        self._bytes = [parameter.nbytes for parameter in parameters]
        device = parameters[0].device if parameters else torch.device("cpu")
        self.device, self.asynchronous = device, is_accelerator(device)
        super().__init__(parameters, dtype, arrived, scaling or Scaling())
        # A tensor without dimensions is a number that need not be made into one each time.
        factor = 1 / self.scaling.before
        self._factor = None if factor == 1.0 else torch.tensor(factor, dtype=torch.float64)
        self._width, real = (2, dtype.to_real()) if dtype.is_complex else (1, dtype)
        # No transport is asked to reduce nothing.
        tail = self._width * (trailer or int(self._starts[-1] == 0))
        count = self._width * self._starts[-1]
        self._staging: Staging | None = None
        if self.asynchronous:
            wire = torch.empty(count, dtype=real, device=device)
            self._wires = [wire, communicator.empty(tail, real)] if tail else [wire]
            if device.type not in devices:
                self._staging = Staging(wire)
                self._wires[0] = self._staging.host
            self._tail = self._shaped(self._wires[-1])[: tail // self._width]
        else:
            wire = communicator.empty(count + tail, real)
            self._wires = [wire]
            self._tail = self._shaped(wire)[self._starts[-1] :]
        self._flat = self._shaped(wire)
        self._parts = list(parameters)
        self._addresses = [0] * len(parameters)
        for position in range(len(parameters)):
            self._renew(position)

    def begin(self) -> None:
        super().begin()
        # What has arrived but is not in the buffer yet.
        self._pending: dict[int, torch.Tensor] = {}
        self._pending_bytes = 0

    def arrive(self, position: int, gradient: torch.Tensor) -> bool:
        self._pending[position] = gradient
        self._pending_bytes += self._bytes[position]
        self.expected -= 1
        if self.expected == 0 or (self._pending_bytes >= HOT_BYTES and not self.asynchronous):
            self._take_pending()
            if self._staging is not None:  # complete: it goes to the host at once
                self.complete()
        return self.expected == 0

    def _take_pending(self) -> None:
        """Copy the gradients into the buffer, and free their memory by using the copies instead."""
        gradients, self._pending, self._pending_bytes = self._pending, {}, 0
        self._copy(gradients)
        noted, sampled = self._arrived.noted, self._arrived.sampled
        for position, gradient in gradients.items():
            parameter, view = self.parameters[position], self.views[position]
            stays = view is None or gradient.requires_grad or parameter is sampled
            if view is None or stays or parameter.grad is not gradient:
                continue
            if gradient is not view:
                parameter.grad = view
            noted[id(parameter)] = (parameter, view, view._version, view.data_ptr())

    def _copy(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Copy gradients, by their positions, unless they are in their places already."""
        if self.asynchronous and gradients:
            self._arrived.streams.join(self.device, gradients.values())
        factor, views, present = self._factor, self.views, self.present
        # One by one what is divided passes through the processor once, not twice; an accelerator
        # would rather begin few operations.
        at_once = factor is None or self.asynchronous
        parts, sources = [], []
        for position, gradient in gradients.items():
            present[position] = True
            part = self._parts[position]
            source = gradient.detach() if gradient.requires_grad else gradient
            if gradient is part:
                if part.data_ptr() == self._addresses[position]:
                    if factor is not None:
                        part.mul_(factor)
                    continue
                part = self._renew(position)  # the user has set its `data`
            elif at_once and views[position] is not None:
                parts.append(part)
                sources.append(source)
                continue
            if factor is None:
                part.copy_(source)
            elif views[position] is not None or (
                source.dtype == part.dtype and source.device == part.device
            ):
                torch.mul(source, factor, out=part)
            else:
                part.copy_(source).mul_(factor)
        if parts:
            torch._foreach_copy_(parts, sources)
            if factor is not None:
                torch._foreach_mul_(parts, 1 / self.scaling.before)

    def _collect(self) -> None:
        self._pending = {}  # copied below, as what was kept from an earlier step
        if False in self.present:
            missing = [position for position, there in enumerate(self.present) if not there]
            found = {p: self._arrived.present(self.parameters[p]) for p in missing}
            self._copy({p: gradient for p, gradient in found.items() if gradient is not None})
            for position in [p for p, gradient in found.items() if gradient is None]:
                part = self._parts[position]
                moved = part.data_ptr() != self._addresses[position]
                (self._renew(position) if moved else part).zero_()
        if self._staging is not None:
            self._staging.fetch()

    def values(self, trailer: Sequence[float] = ()) -> list[torch.Tensor]:
        self.complete()
        if self._staging is not None:
            self._staging.wait_fetched()
        if trailer:
            self._tail.copy_(torch.tensor([*map(float, trailer)], dtype=self.dtype))
        return self._wires

    def launch(self, communicator: Communicator, trailer: Sequence[float] = ()) -> None:
        op, wires = self.scaling.op, self.values(trailer)
        if isinstance(op, Op):
            self._handles = [communicator.allreduce_async(wire, op) for wire in wires]
            return
        # The vectors are gathered, as the records of a comparison are. Over Gloo a longer one
        # than expected ends the process.
        kind, (wire, *tail) = str(self.dtype).removeprefix("torch."), wires
        communicator.agree(
            f"the reduction of gradients ({op.value}) of {wire.numel()} {kind} values"
        )
        lengths = [length * self._width for length in self._lengths]
        self._handles = [adasum_async(communicator, wire, lengths)]
        self._handles += [communicator.allreduce_async(each) for each in tail]

    def wait(self) -> None:
        super().wait()
        if self._staging is not None:
            self._staging.send_back()

    @property
    def sums(self) -> list[complex]:
        """The sums or averages of the trailer's numbers."""
        return self._tail.tolist()

    def deliver(self, counts: Sequence[complex]) -> None:
        after = self.scaling.after
        for position, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if not counts[position]:
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

    def _shaped(self, memory: torch.Tensor) -> torch.Tensor:
        """Return memory as elements of the type on the wire."""
        return torch.view_as_complex(memory.view(-1, 2)) if self.dtype.is_complex else memory

    def _renew(self, position: int) -> torch.Tensor:
        """Return a new tensor for a part of the buffer."""
        parameter, start = self.parameters[position], self._starts[position]
        part = self._flat[start : start + self._lengths[position]].view(parameter.shape)
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


class InPlaceGroup(GradientGroup):
    """Gradients on the CPU, of one type, reduced in place without a buffer."""

    def begin(self) -> None:
        super().begin()
        self._gradients: list[torch.Tensor] = []
        self._copied: list[int] = []

    def arrive(self, _position: int, _gradient: torch.Tensor) -> bool:
        self.expected -= 1
        return self.expected == 0

    def _collect(self) -> None:
        """Collect the gradients, with zeros for missing and copies of unfit gradients."""
        noted, dtype = self._arrived.noted, self.dtype
        present, gradients, copied = self.present, [], []
        for position, parameter in enumerate(self.parameters):
            arrival = noted.get(id(parameter))
            gradient = self._arrived.present(parameter) if arrival is None else arrival[1]
            if gradient is None:
                gradient = torch.zeros(parameter.shape, dtype=dtype)
                copied.append(position)
            else:
                present[position] = True
                if (
                    gradient.requires_grad
                    or gradient.dtype is not dtype
                    or not gradient.is_contiguous()
                ):
                    gradient = torch.empty(gradient.shape, dtype=dtype).copy_(gradient.detach())
                    copied.append(position)
            gradients.append(gradient)
        self._gradients, self._copied = gradients, copied
        if self.scaling.before != 1.0:
            torch._foreach_mul_(gradients, 1 / self.scaling.before)
            for parameter in self.parameters:  # the change is not the user's
                if id(parameter) in noted:
                    self._arrived.note(parameter, noted[id(parameter)][1])

    def values(self, trailer: Sequence[float] = ()) -> list[torch.Tensor]:
        assert not trailer
        self.complete()
        # Their `data` counts changes in place by itself: the sum is no change by the user.
        return [each.data for each in self._gradients]

    def launch(self, communicator: Communicator, trailer: Sequence[float] = ()) -> None:
        assert isinstance(self.scaling.op, Op)
        values = self.values(trailer)
        self._handles = [communicator.allreduce_coalesced_async(values, self.scaling.op)]

    def deliver(self, counts: Sequence[complex]) -> None:
        gradients, self._gradients = self._gradients, []
        if self.scaling.after != 1.0:
            torch._foreach_div_(gradients, self.scaling.after)
        for position in self._copied:
            if not counts[position]:
                continue
            parameter, gradient = self.parameters[position], gradients[position]
            if parameter.is_contiguous():
                parameter.grad = gradient
            else:
                parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
