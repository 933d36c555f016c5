"""Record of gradients as backward left them, to detect changes by the user."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nbelastic.torch.gradients.staging import Streams
from nbelastic.torch.identity import same

if TYPE_CHECKING:
    from collections.abc import Mapping

SAMPLE_VALUES = 16

# A parameter and its gradient, with the gradient's version and address on arrival.
Arrival = tuple[torch.Tensor, torch.Tensor, int, int]


class ArrivedGradients:
    """Gradients of one step, each as it was when it arrived.

    An optimizer has one for its whole life, and clears it after each step.

    With `sparse_as_dense`, sparse gradients are made dense. Else they are reduced apart from all
    others.
    """

    def __init__(self, names: Mapping[int, str], *, sparse_as_dense: bool = False) -> None:
        self.noted: dict[int, Arrival] = {}  # by ids of parameters, in the order of arrival
        # The same for sparse ones of micro-batches, without addresses.
        self.noted_sparse: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        # Values of one gradient, which stays out of all buffers. Not every change in place raises a
        # version: GradScaler makes some that do not.
        self.sample: GradientSample | None = None
        self.any_sparse = False  # one has arrived that other ranks do not know of yet
        self.streams = Streams()  # on which gradients of accelerators were computed
        self._names = names
        self.sparse_as_dense = sparse_as_dense

    def note(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Take `gradient`, as it is now, for what backward has left."""
        if gradient.layout is not torch.strided:
            self.noted_sparse[id(parameter)] = (parameter, gradient, gradient._version)
            return
        version, address = gradient._version, gradient.data_ptr()
        self.noted[id(parameter)] = (parameter, gradient, version, address)

    def take_sample(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Keep some values of a gradient."""
        self.streams.join(gradient.device, [gradient])
        self.sample = GradientSample(parameter, gradient)

    @property
    def sampled(self) -> torch.Tensor | None:
        """The parameter of which :attr:`sample` has values."""
        return None if self.sample is None else self.sample.parameter

    def present(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return a parameter's gradient, whether it is of this step or was kept.

        None for a sparse one, unless it may be made dense.
        """
        gradient = parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            if self.sparse_as_dense:
                return self.make_dense(parameter, gradient)
            self.any_sparse = True
            return None
        return gradient

    def make_dense(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Replace a sparse gradient by a dense one and return it."""
        parameter.grad = dense = gradient.to_dense()
        return dense

    def check_untouched(self) -> None:
        """Refuse gradients that the user has changed since backward.

        A changed sample of an accelerator is reported by :meth:`check_sample`.
        """
        for parameter, gradient, version, address in self.noted.values():
            if (
                parameter.grad is not gradient
                or gradient._version != version
                or gradient.data_ptr() != address
            ):
                raise self._changed(parameter)
        for parameter, gradient, version in self.noted_sparse.values():
            if parameter.grad is not gradient or gradient._version != version:
                raise self._changed(parameter)
        if self.sample is not None:
            _, gradient, _, _ = self.noted[id(self.sample.parameter)]
            if self.sample.compare(gradient):
                self.check_sample()

    def check_trained(self, trained: list[torch.Tensor], before: list[torch.Tensor]) -> None:
        """Refuse gradients of `trained` parameters that were no such as the step began."""
        if same(trained, before):
            return
        known = {id(parameter) for parameter in before}
        for parameter in trained:
            if id(parameter) not in known and parameter.grad is not None:
                raise RuntimeError(
                    f"{self.name(parameter)} was added or unfrozen between a backward() and its "
                    "step(); do it after step()"
                )

    def check_sample(self) -> None:
        """Raise if the sampled gradient was changed; this waits for an accelerator."""
        if self.sample is not None and self.sample.changed():
            raise self._changed(self.sample.parameter)

    def discard(self) -> None:
        """Drop the gradients that have arrived, unless others have taken their places."""
        for parameter, gradient, _, _ in self.noted.values():
            if parameter.grad is gradient:
                parameter.grad = None
        for parameter, gradient, _ in self.noted_sparse.values():
            if parameter.grad is gradient:
                parameter.grad = None

    def clear(self) -> None:
        """Forget the step; gradients stay where they are."""
        self.noted.clear()
        self.noted_sparse.clear()
        self.sample = None
        self.any_sparse = False

    def name(self, parameter: torch.Tensor) -> str:
        """Return what messages call a parameter."""
        return f"parameter {self._names.get(id(parameter), '(unnamed)')!r}"

    def _changed(self, parameter: torch.Tensor) -> RuntimeError:
        return RuntimeError(
            f"the gradient of {self.name(parameter)} was changed between backward() and step(), "
            "when it was being reduced; to clip or unscale gradients, call "
            "optimizer.synchronize() first and step in `with optimizer.skip_synchronize():`"
        )


class GradientSample:
    """The first values of a parameter's gradient, as backward has made them."""

    def __init__(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        self.parameter = parameter
        self._values = gradient.detach().flatten()[:SAMPLE_VALUES].clone()
        self._equal: torch.Tensor | bool | None = None

    def compare(self, gradient: torch.Tensor) -> bool:
        """Compare with the gradient of now; return whether the outcome is known at once."""
        before, now = self._values, gradient.detach().flatten()[:SAMPLE_VALUES]
        if before.is_cpu:
            self._equal = torch.equal(before, now) or bool(((before == now) | now.isnan()).all())
        else:
            self._equal = torch.isclose(before, now, rtol=0, atol=0, equal_nan=True).all()
        return before.is_cpu

    def changed(self) -> bool:
        """Return whether the last comparison found a change; this waits for an accelerator."""
        equal, self._equal = self._equal, None
        return equal is not None and not equal
