"""Buckets of gradients, for one operation each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from nbelastic.collectives import Communicator, Handle, Op
from nbelastic.torch.gradients.arrived import ArrivedGradients
from nbelastic.torch.gradients.options import ReduceOptions

# Bytes of a bucket in the communicator's memory, of which each generation gets new pages: those of
# large buckets would make a reset longer. They are summed in parts, from memory of the rank.
MOST_SHARED_BYTES = 12 << 20

# Presence of a sparse gradient, which no number of dense ones makes up for.
SPARSE = -1000.0


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device computes by itself, in memory of its own."""
    return device.type != "cpu"


class Staging:
    """Pinned host memory for an accelerator's buffer; it may be freed at any time.

    When a hook of backward runs, the accelerator may not have computed its gradient yet. So no hook
    waits. The copy to the host goes on a stream of its own, and Python waits once for each buffer.
    The copy back goes on the stream that uses the gradients next. In each step: :meth:`fetch`,
    :meth:`wait_fetched`, :meth:`send_back`. Without CUDA, copies are made at once.
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


class Bucket:
    """Gradients of some parameters, reduced together in a buffer, with a trailer of some length.

    The buffer is the communicator's, and serves all steps. Where gradients travel as they are,
    ``parameter.grad`` becomes a *view* of it. Others are copied to it and back: those of another
    type, and those of parameters that are not contiguous, since another rank's may be. A large
    bucket on the host has no buffer where the communicator reduces many tensors at once: its
    gradients are reduced where they are. Of an accelerator's bucket the trailer, which the rank's
    thread reads, is reduced on the host by itself.

    In each step: :meth:`begin`, :meth:`arrive` for each gradient that backward computes,
    :meth:`launch`, :meth:`wait`, :meth:`deliver`. After a failure the bucket is dropped, because
    its memory then belongs to the communicator that failed.
    """

    def __init__(
        self,
        communicator: Communicator,
        parameters: Sequence[torch.Tensor],
        options: ReduceOptions,
        arrived: ArrivedGradients,
        trailer: int,
    ) -> None:
        self.parameters = parameters
        self.dtype = dtype = (
            options.wire_dtype(parameters[0].dtype) if parameters else torch.float32
        )
        self._arrived = arrived
        # With Adasum there is nothing but a trailer.
        self._op = options.op if isinstance(options.op, Op) else Op.SUM
        self._before, self._after = options.predivide, 1.0
        if options.predivide != 1.0:
            self._op, self._after = Op.SUM, communicator.size / options.predivide
        starts = [*itertools.accumulate((each.numel() for each in parameters), initial=0)]
        self.device = parameters[0].device if parameters else torch.device("cpu")
        width, real = (2, dtype.to_real()) if dtype.is_complex else (1, dtype)
        # No transport is asked to reduce nothing.
        tail = width * (trailer or int(starts[-1] == 0))
        count = width * starts[-1]
        self.staging: Staging | None = None  # of gradients that come to the host
        self._in_place = False
        if is_accelerator(self.device):
            wire = torch.empty(count, dtype=real, device=self.device)
            self._wires = [wire, communicator.empty(tail, real)] if tail else [wire]
            if self.device.type not in communicator.capabilities.devices:
                self.staging = Staging(wire)
                self._wires[0] = self.staging.host
            self._tail = self._shaped(self._wires[-1])[: tail // width]
        else:
            is_small = count * real.itemsize <= MOST_SHARED_BYTES
            empty = communicator.empty if is_small else torch.empty
            self._in_place = (
                not is_small
                and communicator.capabilities.coalesces
                and not dtype.is_complex
                and all(map(self._fits, parameters))
            )
            wire = empty(tail if self._in_place else count + tail, dtype=real)
            self._wires = [wire]
            self._tail = self._shaped(wire)[0 if self._in_place else starts[-1] :]
        self._handles: list[Handle] = []
        # Each parameter, its part of the buffer, and whether its gradient is to be that part.
        self._places: list[tuple[torch.Tensor, torch.Tensor, bool]] = []
        for parameter, (start, end) in zip(parameters, itertools.pairwise(starts), strict=True):
            if self._in_place:
                break  # each step has its own
            part = self._shaped(wire)[start:end].view(parameter.shape)
            fits = self._fits(parameter)
            if fits:  # strides of dimensions of length 1 may be anything
                part = part.as_strided(part.shape, parameter.stride(), part.storage_offset())
            self._places.append((parameter, part, fits))
        self.begin()

    def begin(self) -> None:
        """Prepare for a new step."""
        self.expected = len(self.parameters)  # gradients that have not arrived in this step
        # For each parameter 1 if this rank has a gradient, else 0 or SPARSE; from complete() on.
        self.present = [1.0] * len(self.parameters)
        self._complete = False
        if self._in_place:  # else the last step's gradients would live on in this one
            self._places = [(parameter, self._tail[:0], True) for parameter in self.parameters]

    def arrive(self) -> bool:
        """Count the final gradient of a parameter; return whether it was the last expected."""
        self.expected -= 1
        if self.expected == 0:
            self.complete()
        return self.expected == 0

    def complete(self) -> None:
        """Copy the gradients, those kept from an earlier step too; a missing one counts as zero."""
        if self._complete:
            return
        self._complete = True
        noted = self._arrived.noted
        parts, sources, own = [], [], []
        for position, (parameter, part, _) in enumerate(self._places):
            arrival = noted.get(id(parameter))
            gradient = self._arrived.present(parameter) if arrival is None else arrival[1]
            if self._in_place:
                part = self._own_place(parameter, gradient)  # noqa: PLW2901
                self._places[position] = parameter, part, True
            if gradient is None:
                part.zero_()
                self.present[position] = 0.0 if parameter.grad is None else SPARSE
            elif gradient.data_ptr() == part.data_ptr():
                own.append(part)  # backward has added to it there
            else:
                parts.append(part)
                sources.append(gradient.detach() if gradient.requires_grad else gradient)
        self._arrived.streams.join(self.device, [*sources, *own])
        if parts:
            torch._foreach_copy_(parts, sources)
        if self._before != 1.0 and (parts or own):
            torch._foreach_mul_([*parts, *own], 1 / self._before)
        for parameter, part, fits in self._places:
            if fits and id(parameter) in noted:
                self._arrived.replace(parameter, part.data)  # views would share one version
        if self.staging is not None:
            self.staging.fetch()

    def launch(self, communicator: Communicator, trailer: Sequence[float] = ()) -> None:
        """Complete the bucket, and begin the reduction of gradients and `trailer`."""
        self.complete()
        if self.staging is not None:
            self.staging.wait_fetched()
        if trailer:
            self._tail.copy_(torch.tensor([*map(float, trailer)], dtype=self.dtype))
        if self._in_place:
            values = [*(part for _, part, _ in self._places), self._tail]
            self._handles = [communicator.allreduce_coalesced_async(values, self._op)]
        else:
            self._handles = [communicator.allreduce_async(wire, self._op) for wire in self._wires]

    def wait(self) -> None:
        """Wait until the reduced gradients are there."""
        for handle in self._handles:
            handle.wait()
        self._handles = []
        if self.staging is not None:
            self.staging.send_back()

    @property
    def sums(self) -> list[complex]:
        """The sums or averages of the trailer's numbers."""
        return self._tail.tolist()

    def deliver(self, counts: Sequence[float]) -> None:
        """Give parameters their reduced gradients, where by `counts` any rank has one."""
        delivered = []
        for count, (parameter, part, fits) in zip(counts, self._places, strict=True):
            if count <= 0:
                continue
            if fits:
                if not _is_part(parameter.grad, part):
                    parameter.grad = part.data
                delivered.append(part)
            else:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter, requires_grad=False)
                delivered.append(parameter.grad.copy_(part))
        if self._after != 1.0 and delivered:
            torch._foreach_div_(delivered, self._after)

    def leave(self, *, lost: bool) -> None:
        """Move gradients out of the buffer, or drop lost gradients."""
        for parameter, part, _ in self._places:
            if _is_part(parameter.grad, part) and (lost or not self._in_place):
                parameter.grad = None if lost else part.clone()

    def _fits(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter's gradient can be what travels."""
        kinds = parameter.dtype, getattr(parameter, "grad_dtype", self.dtype)
        return parameter.is_contiguous() and kinds == (self.dtype, self.dtype)

    def _own_place(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
        """Return where to reduce a gradient of a bucket without a buffer: its own if possible."""
        if (
            gradient is None
            or gradient.requires_grad
            or gradient.dtype != self.dtype
            or not gradient.is_contiguous()
            or parameter is self._arrived.sampled  # it is compared with what it was
        ):
            return torch.empty_like(parameter, requires_grad=False)
        return gradient.data  # has a version of its own: the sum is no change by the user

    def _shaped(self, memory: torch.Tensor) -> torch.Tensor:
        """Return memory as elements of the type on the wire."""
        return torch.view_as_complex(memory.view(-1, 2)) if self.dtype.is_complex else memory


def _is_part(gradient: torch.Tensor | None, part: torch.Tensor) -> bool:
    """Return whether a gradient is a part of the buffer."""
    if gradient is None or gradient.layout is not torch.strided:
        return False
    return gradient.data_ptr() == part.data_ptr()
