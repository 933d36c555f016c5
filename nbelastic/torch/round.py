"""One passage of gradients from those of this rank to those of all.

See :mod:`nbelastic.torch.reducer` for when rounds begin and end, and what happens to failed ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nbelastic.errors import CollectiveError
from nbelastic.torch.buckets import Bucket
from nbelastic.torch.identity import same
from nbelastic.torch.in_place import InPlaceBucket
from nbelastic.torch.layout import HOT_BYTES
from nbelastic.torch.witness import Witness

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nbelastic.collectives import Communicator
    from nbelastic.elastic.context import Context
    from nbelastic.torch.layout import Layout, ReduceOptions
    from nbelastic.torch.staging import Streams

__all__ = ["Round"]

# Gradients of so many elements are cheap to look at.
_SMALL = 1 << 16

Arrival = tuple[torch.Tensor, torch.Tensor, int, int]
"""A parameter, and its gradient when backward had computed it: its version, and where it lay."""


class Round:
    """What is known between a first gradient and the end of ``synchronize()``.

    Parameters
    ----------
    context : Context
        Whose flag rides on the last bucket, and who is told what came out.
    communicator : Communicator
        Of the generation in which the round begins.
    parameters : list of Tensor
        What is trained.
    layout : Layout or None
        Their buckets, ready to be filled; None until :meth:`meet`, and in a world of one.
    options : ReduceOptions
        How gradients are reduced.
    names : mapping of int to str
        Names of parameters by their ids, for messages.
    streams : Streams
        On which gradients of accelerators have been computed.
    unmet : bool, default False
        Whether a layout will be there when backward has ended.

    Attributes
    ----------
    arrived : dict
        By the id of each parameter whose last pass has been, in that order: its gradient then.
    launched : int
        How many buckets have been launched.
    """

    def __init__(
        self,
        context: Context,
        communicator: Communicator,
        parameters: list[torch.Tensor],
        layout: Layout | None,
        options: ReduceOptions,
        names: Mapping[int, str],
        streams: Streams,
        *,
        unmet: bool = False,
    ) -> None:
        self.context = context
        self.communicator = communicator
        self.generation = context.generation
        self.parameters = parameters
        self.arrived: dict[int, Arrival] = {}
        self.launched = 0
        self.unmet = unmet
        self._layout = layout
        # What is on its way from an accelerator is not waited for while backward runs.
        self._eager = (
            layout is not None and communicator.overlaps and not (layout.staged or layout.together)
        )
        self._options = options
        self._names = names
        self._streams = streams
        self._passes_left = dict.fromkeys(map(id, parameters), options.passes)
        # A gradient that is kept out of the buffers: the first that is small, or is out.
        self._witness: Witness | None = None

    def arrive(self, parameters: Iterable[torch.Tensor]) -> None:
        """Count a backward pass of each; after the last, note the gradient; launch what is full.

        Raises
        ------
        CollectiveError
            A gradient is gone, or a bucket cannot be launched.
        RuntimeError
            There have been more passes than announced.
        """
        layout, arrived, passes_left = self._layout, self.arrived, self._passes_left
        idle = layout is None or layout.idle
        for parameter in parameters:
            key = id(parameter)
            left = passes_left.get(key)
            if left is None:
                continue  # not this optimizer's any more; or check_untouched() finds out
            gradient = parameter.grad
            if gradient is None or left == 0:
                raise self._unexpected(parameter)
            passes_left[key] = left - 1
            if left > 1:
                continue
            if gradient.layout is not torch.strided:
                self._streams.join(gradient.device, [])
                gradient = self._dense(parameter, gradient)
            if self._witness is None and self._is_witness(parameter, gradient):
                gradient = self._call_witness(parameter, gradient)
            arrived[key] = (parameter, gradient, gradient._version, gradient.data_ptr())
            if idle or layout is None:
                continue
            bucket, position = layout.places[key]
            bucket.expected = expected = bucket.expected - 1
            if isinstance(bucket, Bucket):
                bucket.pending[position] = gradient
                bucket.pending_bytes += parameter.nbytes
                if expected == 0 or (bucket.pending_bytes >= HOT_BYTES and not bucket.staged):
                    self._take_pending(bucket)
                if expected == 0 and bucket.staged:
                    bucket.seal()
            if expected == 0 and self._eager:
                self._launch_full(layout)

    def _unexpected(self, parameter: torch.Tensor) -> Exception:
        if parameter.grad is None:
            return CollectiveError(
                "a gradient was added to that of a step which an earlier generation left half-way; "
                "call optimizer.zero_grad() before backward()"
            )
        return RuntimeError(
            f"a gradient of {self._name(parameter)} was computed more than "
            f"backward_passes_per_step={self._options.passes} times before step(); increase "
            "it to accumulate gradients over several backward passes"
        )

    def _call_witness(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Keep some values of a gradient, which is to stay out of the buffers; return it."""
        self._streams.join(gradient.device, [gradient])
        if self._layout is not None and gradient is self._layout.view_of(parameter):
            parameter.grad = gradient = gradient.clone()
        self._witness = Witness(parameter, gradient)
        return gradient

    def _is_witness(self, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
        if self._layout is None and not gradient.is_cpu:
            return False
        return gradient.numel() <= _SMALL or self._stays(parameter)

    def _stays(self, parameter: torch.Tensor) -> bool:
        """Whether a gradient is what backward has made it until all are delivered."""
        if self._layout is None:
            return True
        bucket, position = self._layout.places[id(parameter)]
        if isinstance(bucket, Bucket):
            return bucket.views[position] is None
        return not self._eager

    def _take_pending(self, bucket: Bucket) -> None:
        """Copy what has arrived, and have it be there at once, so that it takes no memory twice."""
        witness = None if self._witness is None else self._witness.parameter
        gradients, bucket.pending, bucket.pending_bytes = bucket.pending, {}, 0
        if bucket.staged:
            self._streams.join(bucket.device, gradients.values())
        bucket.put_all(gradients)
        for position, gradient in gradients.items():
            parameter = bucket.parameters[position]
            stays = bucket.views[position] is None or gradient.requires_grad
            if not stays and parameter is not witness and parameter.grad is gradient:
                view = bucket.attach(position)
                self.arrived[id(parameter)] = (parameter, view, view._version, view.data_ptr())

    def _launch_full(self, layout: Layout) -> None:
        for bucket in layout.buckets[self.launched :]:
            if bucket.expected:
                break
            self._fill(bucket)
            self._launch(layout)

    def _fill(self, bucket: Bucket | InPlaceBucket) -> None:
        """Put in all gradients that there are: those that have arrived, and those of before."""
        if isinstance(bucket, InPlaceBucket):
            self._fill_in_place(bucket)
            return
        gradients = {}
        for position in bucket.missing():
            gradient = self._gradient_of(bucket.parameters[position])
            if gradient is not None:
                gradients[position] = gradient
        if gradients and bucket.staged:
            self._streams.join(bucket.device, gradients.values())
        bucket.put_all(gradients)

    def _fill_in_place(self, bucket: InPlaceBucket) -> None:
        arrived, gradients = self.arrived, []
        for parameter in bucket.parameters:
            noted = arrived.get(id(parameter))
            gradients.append(self._gradient_of(parameter) if noted is None else noted[1])
        bucket.put_all(gradients)
        if self._eager and bucket.divides:
            for parameter, gradient in zip(bucket.parameters, gradients, strict=True):
                if gradient is not None and id(parameter) in arrived:
                    noted = (parameter, gradient, gradient._version, gradient.data_ptr())
                    arrived[id(parameter)] = noted

    def _gradient_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        gradient = parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            return self._dense(parameter, gradient)
        return gradient

    def check_untouched(self, trained: list[torch.Tensor]) -> None:
        """Refuse to reduce gradients that somebody has worked on since backward.

        Parameters
        ----------
        trained : list of Tensor
            What the optimizer is about to step.

        Raises
        ------
        RuntimeError
            A gradient or the set of parameters has changed.
        """
        touched = [
            parameter
            for parameter, gradient, version, address in self.arrived.values()
            if parameter.grad is not gradient
            or gradient._version != version
            or gradient.data_ptr() != address
        ]
        if touched:
            raise self._touched(touched[0])
        witness = self._witness
        if witness is not None and witness.compare(self.arrived[id(witness.parameter)][1]):
            self._judge()
        if same(trained, self.parameters):
            return
        for parameter in trained:
            if id(parameter) not in self._passes_left and parameter.grad is not None:
                raise RuntimeError(
                    f"{self._name(parameter)} was added or unfrozen between a backward() and its "
                    "step(); do it after step()"
                )

    def _judge(self) -> None:
        """Hear the witness: on an accelerator late, as that waits for it."""
        if self._witness is not None and self._witness.contradicts():
            raise self._touched(self._witness.parameter)

    def _touched(self, parameter: torch.Tensor) -> RuntimeError:
        return RuntimeError(
            f"the gradient of {self._name(parameter)} was changed between backward() and step(), "
            "when it was being reduced; to clip or unscale gradients, call "
            "optimizer.synchronize() first and step in `with optimizer.skip_synchronize():`"
        )

    def meet(self, layout: Layout) -> None:
        """Have a layout, which all ranks have come to share meanwhile."""
        self._layout, self.unmet = layout, False

    def finish(self) -> None:
        """Launch what has not been launched, wait, and write the reduced gradients.

        Raises
        ------
        CollectiveError
            A peer is gone, or the generation is over.
        RuntimeError
            Gradients are not those that backward has left.
        """
        layout = self._layout
        if layout is None:
            self.context.agree(self.context.change_flag())
            return
        if layout.together:
            self._reduce_together(layout)
        elif layout.staged:
            self._send_off(layout)
        while self.launched < len(layout.buckets):
            bucket = layout.buckets[self.launched]
            if bucket is layout.buckets[-1]:
                self._judge()
            self._fill(bucket)
            self._launch(layout)
        for bucket in layout.buckets:
            bucket.wait()
        self.context.agree(layout.deliver())

    def _reduce_together(self, layout: Layout) -> None:
        self._judge()
        for bucket in layout.buckets:
            self._fill(bucket)
        self.launched = len(layout.buckets)
        layout.reduce(self.communicator, self.context.change_flag())

    def _send_off(self, layout: Layout) -> None:
        """Have all gradients on accelerators be on their way before the first is waited for."""
        for bucket in layout.buckets[self.launched :]:
            self._fill(bucket)
            if isinstance(bucket, Bucket):
                bucket.seal()

    @property
    def awaited(self) -> bool:
        """Whether other ranks may be waiting for what this one has begun."""
        late = self.unmet or (self._layout is not None and not self._eager)
        return self.launched > 0 or (late and bool(self.arrived))

    def discard(self) -> None:
        """Drop the gradients that have arrived, unless there are others in their place."""
        for parameter, gradient, _, _ in self.arrived.values():
            if parameter.grad is gradient:
                parameter.grad = None

    def _launch(self, layout: Layout) -> None:
        bucket = layout.buckets[self.launched]
        closing = bucket is layout.buckets[-1]
        riders = layout.riders(self.context.change_flag()) if closing else []
        self.launched += 1
        bucket.launch(self.communicator, riders)

    def _dense(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        if not self._options.sparse_as_dense:
            raise ValueError(
                f"the gradient of {self._name(parameter)} is sparse; pass sparse_as_dense=True, or "
                "make it dense (Embedding(sparse=False))"
            )
        parameter.grad = dense = gradient.to_dense()
        return dense

    def _name(self, parameter: torch.Tensor) -> str:
        return f"parameter {self._names.get(id(parameter), '(unnamed)')!r}"
