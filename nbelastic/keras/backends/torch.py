"""Back end torch: Keras' variables are parameters of PyTorch.

Their gradients are reduced during backward, in place, by the reducer of
:mod:`nbelastic.torch.gradients`. It wants an optimizer of PyTorch: :func:`variable_step` makes one
whose ``step()`` is the update of a Keras optimizer. A state sees the same object, so commits right
after a step copy nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch

from nbelastic.elastic.ranks.context import current
from nbelastic.keras.backends import Backend, KerasOptions, Reduction
from nbelastic.torch.gradients.optimizer import DistributedOptimizer, accumulates, is_pending

NOT_THOSE_OF_BACKWARD = (
    "optimizer.apply() was given gradients that are not those that backward() has left in the "
    "variables, while these are being reduced. To change gradients, call optimizer.synchronize() "
    "after backward() first, and change what is in `variable.value.grad` then"
)


def variable_step(
    optimizer: Any,
    stays: Collection[int] = (),
    update: Callable[[], Callable[[], None] | None] = lambda: None,
) -> torch.optim.Optimizer:
    """Return an optimizer of PyTorch for a Keras optimizer that is built, named as its class.

    Its groups are what is trained with reduced gradients, what with the rank's own ones (variables
    with the ids in `stays`), and the variables of the Keras optimizer. Its step calls what `update`
    returns.
    """
    trained = optimizer._trainable_variables
    rates = set(map(id, rates_of(optimizer)))  # callbacks change them between steps
    groups: list[dict[str, Any]] = [
        {"params": [each.value for each in trained if id(each) not in stays]},
        {"params": [each.value for each in trained if id(each) in stays], "local": True},
        {"params": [each.value for each in optimizer.variables if id(each) not in rates]},
    ]

    def step(_: Any, closure: Any = None) -> None:
        if (call := update()) is not None:
            call()

    methods = {"__module__": __name__, "step": step}
    kind = type(type(optimizer).__name__, (torch.optim.Optimizer,), methods)
    made: torch.optim.Optimizer = kind([each for each in groups if each["params"]], {})
    return made


def rates_of(optimizer: Any) -> list[Any]:
    """Return the variables of an optimizer that are learning rates."""
    own = [optimizer, getattr(optimizer, "inner_optimizer", None)]
    rates = [getattr(each, "_learning_rate", None) for each in own]
    return [each for each in rates if hasattr(each, "assign")]


class TorchReduction(Reduction):
    """Gradients reduced during backward, and an update that waits for the reduction."""

    def __init__(self, options: KerasOptions, back: Backend) -> None:
        super().__init__(options, back)
        self.step: Any = None  # the distributed step, once the optimizer is built
        # What the next step applies, to what, and which gradients if not those of backward().
        self._update: tuple[Callable[..., None], Sequence[Any], list[Any] | None] | None = None
        self._passes = 0
        self._kept: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    @property
    def accumulates(self) -> bool:
        return self._passes > 0 or super().accumulates or accumulates(self.step)

    def built(self, optimizer: Any) -> None:
        if self.step is not None:
            return
        options = self.options
        # Weak, because the class of the step lives as long as the process.
        step = variable_step(optimizer, options.is_local(), weakref.WeakMethod(self._make_update))
        every = [*optimizer._trainable_variables, *optimizer.variables]
        groups: Any = options.groups
        if not isinstance(groups, int):
            groups = [[each.value for each in group] for group in groups]
        self.step = DistributedOptimizer(
            step,
            [(f"{number}:{each.path}", each.value) for number, each in enumerate(every)],
            options.compression,
            options.passes,
            options.op,
            options.predivide,
            groups=groups,
            sparse_as_dense=options.sparse_as_dense,
            process_set=options.process_set,
        )

    def before_backward(self) -> None:
        for value, gradient in self._kept:
            value.grad = gradient
        self._kept = []

    def apply(
        self, optimizer: Any, gradients: list[Any], trained: list[Any], apply: Callable[..., None]
    ) -> None:
        """Wait for the reduced gradients and apply them."""
        share, given = current().share, None
        puts_off = share is not None and share.number is not None  # until the last micro-batch
        if not puts_off:
            if not all(g is v.value.grad for g, v in zip(gradients, trained, strict=True)):
                ready, given = self._given(gradients, trained)
                if not ready:
                    return
            elif self.options.passes > 1 and not self.step._reducer.synchronized:
                self._passes = (self._passes + 1) % self.options.passes
                if self._passes:
                    self._kept = [(each.value, each.value.grad) for each in trained]
                    return
            if self.defers and given is None:
                self.step.synchronize()
        self._update = apply, trained, given
        if not (puts_off or self.defers):
            self.complete()

    def _given(self, gradients: list[Any], trained: list[Any]) -> tuple[Any, list[Any]]:
        """Reduce gradients that autograd has not left in the variables."""
        if is_pending(self.step):
            raise RuntimeError(NOT_THOSE_OF_BACKWARD)
        local = self.options.is_local()
        if self.step._reducer.synchronized:  # after optimizer.synchronize()
            return True, self._scaled(gradients, [*map(id, trained)], local)
        return self.reduce(gradients, trained, local)

    @torch.no_grad()
    def _make_update(self) -> None:
        """Make Keras apply the reduced gradients; called by the distributed step."""
        update, self._update = self._update, None
        if update is None:
            return
        apply, variables, given = update
        if given is None:
            gradients = [each.value.grad for each in variables]
            given = self._scaled(gradients, [*map(id, variables)], self.options.is_local())
        apply(given, variables)

    def synchronize(self, optimizer: Any) -> None:
        if not optimizer.built:
            raise RuntimeError("optimizer.synchronize() was called before the optimizer was built")
        self.step.synchronize()

    def complete(self) -> None:
        if self._update is None:
            return
        if self._update[2] is not None or self.step._reducer.synchronized:
            with self.step.skip_synchronize():
                self.step.step()
        else:
            self.step.step()

    def forget(self) -> None:
        super().forget()
        self._update, self._passes, self._kept = None, 0, []


class TorchBackend(Backend):
    """Adapter of the back end torch."""

    in_place = True

    def reduction(self, options: KerasOptions) -> TorchReduction:
        return TorchReduction(options, self)

    def to_torch(self, value: Any) -> torch.Tensor:
        value = getattr(value, "value", value)  # a variable's own tensor
        return value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))

    def from_torch(self, tensor: torch.Tensor, dtype: Any = None) -> torch.Tensor:
        return tensor


ADAPTER = TorchBackend()
