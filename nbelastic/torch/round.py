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


class Arrival(NamedTuple):
    """A gradient as it was when backward had computed it.

    ``version`` counts changes in place. Since not everything counts there (``GradScaler`` does
    not), the first gradient of a round also has a ``sample`` of its values.
    """

    parameter: torch.Tensor
    gradient: torch.Tensor
    version: int
    sample: torch.Tensor | None

    def untouched(self) -> bool:
        """Return whether the parameter has the same gradient with the same values."""
        if self.parameter.grad is not self.gradient or self.gradient._version != self.version:
            return False
        return self.sample is None or _alike(self.sample, _sample(self.gradient))


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
        self._passes_left = {id(parameter): options.passes for parameter in parameters}

    def arrive(self, parameter: torch.Tensor) -> None:
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
        gradient = self._gradient(parameter)
        assert gradient is not None
        sample = None if self.arrived else _sample(gradient)
        self.arrived[key] = Arrival(parameter, gradient, gradient._version, sample)
        if self._layout is not None:
            number, position = self._layout.places[key]
            buckets = self._layout.buckets
            buckets[number].put(position, gradient, self._options.predivide)
            while self.launched < len(buckets) and buckets[self.launched].full:
                self._launch(self._layout)

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
        for arrival in self.arrived.values():
            if not arrival.untouched():
                raise RuntimeError(
                    f"the gradient of {self._name(arrival.parameter)} was changed between "
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
                gradient = self._gradient(bucket.parameters[position])
                if gradient is not None:
                    bucket.put(position, gradient, self._options.predivide)
            self._launch(layout)
        divisor = self._options.divisor(self.communicator.size)
        for bucket in layout.buckets:
            bucket.wait()
            for position, parameter in enumerate(bucket.parameters):
                if bucket.used(position):
                    if parameter.grad is None:
                        parameter.grad = torch.empty_like(parameter, requires_grad=False)
                    bucket.take(position, parameter.grad, divisor)
        if layout.buckets:
            self.context.agree(layout.buckets[-1].rider(0) > 0)

    def _launch(self, layout: Layout) -> None:
        bucket = layout.buckets[self.launched]
        riders = [float(self.context.change_flag())] if bucket is layout.buckets[-1] else []
        self.launched += 1
        bucket.launch(self.communicator, riders)

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        gradient = parameter.grad
        if gradient is None or gradient.layout is torch.strided:
            return gradient
        if not self._options.sparse_as_dense:
            raise ValueError(
                f"the gradient of {self._name(parameter)} is sparse; pass sparse_as_dense=True, or "
                "make it dense (Embedding(sparse=False))"
            )
        parameter.grad = gradient.to_dense()
        return parameter.grad

    def _name(self, parameter: torch.Tensor) -> str:
        return f"parameter {self._names.get(id(parameter), '(unnamed)')!r}"


def _sample(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.detach().flatten()[:16].clone()


def _alike(some: torch.Tensor, others: torch.Tensor) -> bool:
    """Equal, NaN being equal to NaN."""
    return bool(((some == others) | others.isnan()).all())
