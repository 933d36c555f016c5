"""One passage of gradients from those of this rank to those of all.

See :mod:`nbelastic.torch.reducer` for when rounds begin and end, and what happens to failed ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbelastic.collectives import Communicator
    from nbelastic.elastic.context import Context
    from nbelastic.torch.layout import Layout, ReduceOptions

__all__ = ["Round"]


# Gradients of so many elements are cheap to look at.
_SMALL = 1 << 16


class Arrival(NamedTuple):
    """A gradient as it was when backward had computed it: where, and how often it was changed."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    version: int
    address: int

    def untouched(self) -> bool:
        """Return whether the parameter has the same gradient with the same values."""
        gradient = self.gradient
        return (
            self.parameter.grad is gradient
            and gradient._version == self.version
            and gradient.data_ptr() == self.address
        )


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
        Their buckets, ready to be filled; None in a world of one, where nothing is exchanged.
    options : ReduceOptions
        How gradients are reduced.
    names : mapping of int to str
        Names of parameters by their ids, for messages.

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
    ) -> None:
        self.context = context
        self.communicator = communicator
        self.generation = context.generation
        self.parameters = parameters
        self.arrived: dict[int, Arrival] = {}
        self.launched = 0
        self._layout = layout
        self._options = options
        self._names = names
        self._passes_left = dict.fromkeys(map(id, parameters), options.passes)
        # Not everything counts as a change in place (``GradScaler`` does not). So one gradient
        # stays out of the buffers until the end, with a copy of some of its values: the first that
        # is small, or has to stay out anyway.
        self._witness: tuple[Arrival, torch.Tensor] | None = None

    def arrive(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Count a backward pass; after the last, take the gradient and launch what is full.

        Raises
        ------
        CollectiveError
            A bucket cannot be launched.
        RuntimeError
            There have been more passes than announced.
        """
        key = id(parameter)
        left = self._passes_left.get(key)
        if left is None:
            return  # not this optimizer's any more; or check_untouched() finds out
        if left == 0:
            raise RuntimeError(
                f"a gradient of {self._name(parameter)} was computed more than "
                f"backward_passes_per_step={self._options.passes} times before step(); increase "
                "it to accumulate gradients over several backward passes"
            )
        self._passes_left[key] = left - 1
        if left > 1:
            return
        if gradient.layout is not torch.strided:
            gradient = self._dense(parameter, gradient)
        layout = self._layout
        if layout is None:
            self._note(key, parameter, gradient, stays=True)
            return
        bucket, position = layout.places[key]
        view = bucket.views[position]
        stays = view is None or gradient.requires_grad
        if self._witness is None and gradient.numel() <= _SMALL:
            stays = True
            if gradient is view:
                parameter.grad = gradient = gradient.clone()
        bucket.put(position, gradient)
        if not stays:
            gradient = bucket.attach(position)
        self._note(key, parameter, gradient, stays=stays)
        if bucket.full:
            self._launch_full(layout)

    def _note(
        self, key: int, parameter: torch.Tensor, gradient: torch.Tensor, *, stays: bool
    ) -> None:
        """Remember a gradient as it is, out of the buffers until the end or not."""
        arrival = Arrival(parameter, gradient, gradient._version, gradient.data_ptr())
        self.arrived[key] = arrival
        if stays and self._witness is None:
            self._witness = (arrival, _sample(gradient))

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
        touched = [each for each in self.arrived.values() if not each.untouched()]
        if self._witness is not None and not _alike(self._witness[1], self._witness[0].gradient):
            touched.append(self._witness[0])
        if touched:
            raise RuntimeError(
                f"the gradient of {self._name(touched[0].parameter)} was changed between "
                "backward() and step(), when it was being reduced; to clip or unscale "
                "gradients, call optimizer.synchronize() first and step in "
                "`with optimizer.skip_synchronize():`"
            )
        for parameter in trained:
            if id(parameter) not in self._passes_left and parameter.grad is not None:
                raise RuntimeError(
                    f"{self._name(parameter)} was added or unfrozen between a backward() and its "
                    "step(); do it after step()"
                )

    def finish(self) -> None:
        """Launch what has not been launched, wait, and write the reduced gradients.

        Raises
        ------
        CollectiveError
            A peer is gone, or the generation is over.
        """
        layout = self._layout
        if layout is None:
            self.context.agree(self.context.change_flag())
            return
        while self.launched < len(layout.buckets):
            bucket = layout.buckets[self.launched]
            for position in bucket.missing():
                parameter = bucket.parameters[position]
                gradient = parameter.grad
                if gradient is None:
                    continue
                if gradient.layout is not torch.strided:
                    gradient = self._dense(parameter, gradient)
                bucket.put(position, gradient)
            self._launch(layout)
        for bucket in layout.buckets:
            bucket.wait()
            bucket.deliver()
        if layout.buckets:
            self.context.agree(layout.buckets[-1].rider(0) > 0)

    def discard(self) -> None:
        """Drop the gradients that have arrived, unless there are others in their place."""
        for arrival in self.arrived.values():
            if arrival.parameter.grad is arrival.gradient:
                arrival.parameter.grad = None

    def _launch_full(self, layout: Layout) -> None:
        while self.launched < len(layout.buckets) and layout.buckets[self.launched].full:
            self._launch(layout)

    def _launch(self, layout: Layout) -> None:
        bucket = layout.buckets[self.launched]
        riders = [float(self.context.change_flag())] if bucket is layout.buckets[-1] else []
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


def _sample(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.detach().flatten()[:16].clone()


def _alike(some: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether a sample equals that of other values, NaN being equal to NaN."""
    now = _sample(others)
    return torch.equal(some, now) or bool(((some == now) | now.isnan()).all())
