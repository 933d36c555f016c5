"""Back end JAX: gradients are reduced in an ``io_callback`` of the compiled step."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import torch
from jax.experimental import io_callback

from nbelastic.keras.backends.callback import CalledBack, Gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.keras.options import KerasOptions

called_back = CalledBack()


def to_torch(value: Any) -> torch.Tensor:
    """Return a copy of an array as a tensor of PyTorch.

    A copy, because JAX gives the memory of arrays to the step that they are passed to.
    """
    array = np.array(value)
    if array.dtype.name == "bfloat16":  # which NumPy does not have by itself
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    if array.dtype.kind == "u":  # of which PyTorch knows little
        array = array.astype(np.int64)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor of PyTorch as an array that JAX takes; both share memory."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(jax.numpy.bfloat16)
    return tensor.numpy()


class JaxReduction:
    """Reduction of an optimizer's gradients in its ``apply()``, compiled or not."""

    def __init__(self, options: KerasOptions) -> None:
        self.options = options
        self.defers = False
        self.keeps_final = self.dry = False
        self._gradients: dict[tuple[int, ...], Gradients] = {}

    @property
    def accumulates(self) -> bool:
        """Whether some of the passes of a step are done, and not all."""
        return any(each.passes for each in self._gradients.values())

    def built(self, optimizer: Any) -> None:
        """Do nothing: gradients are reduced when they are applied."""

    def before_backward(self) -> None:
        """Do nothing."""

    def apply(
        self,
        optimizer: Any,
        gradients: Sequence[Any],
        variables: Sequence[Any] | None,
        apply: Callable[..., None],
    ) -> None:
        """Reduce gradients and apply them; between the passes of a step, nothing changes."""
        if not gradients:
            return
        if not optimizer.built:
            optimizer.build(list(variables or ()))
        trained = list(optimizer._trainable_variables if variables is None else variables)
        ready, reduced = self._reduce(gradients, trained)
        if self.options.passes == 1:
            apply(reduced, variables)
            return
        # A choice between values, because Keras' scope does not see into the branches of a cond.
        changed = [*trained, *optimizer.variables]
        before = [each.value for each in changed]
        apply(reduced, variables)
        for variable, value in zip(changed, before, strict=True):
            variable.assign(jax.numpy.where(ready, variable.value, value))

    def stateless(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Return reduced gradients, where Keras has no variables at hand.

        Raises
        ------
        ValueError
            An option cannot be used with a ``LossScaleOptimizer`` on this back end.
        """
        if self.options.passes > 1 or self.options.local:
            raise ValueError(
                "backward_passes_per_step and local layers cannot be used with a "
                "LossScaleOptimizer on the JAX back end"
            )
        return self._reduce(gradients, None)[1]

    def _reduce(
        self, gradients: Sequence[Any], trained: Sequence[Any] | None
    ) -> tuple[Any, list[Any]]:
        there = [n for n, each in enumerate(gradients) if each is not None]
        stays = self.options.is_local()
        key = tuple(id(trained[n]) for n in there) if trained is not None else (len(there),)
        if key not in self._gradients:
            local = [trained is not None and id(trained[n]) in stays for n in there]
            self._gradients[key] = Gradients(self.options, local, self)
        found = self._gradients[key]

        def call(*given: Any) -> tuple[np.ndarray[Any, Any], ...]:
            def add() -> list[torch.Tensor]:
                tensors = [to_torch(each) for each in given]
                reduced = found.add(tensors)
                return [torch.tensor(reduced is not None), *(reduced or tensors)]

            return tuple(map(to_numpy, called_back.call(found.context, add)))

        shapes = [jax.ShapeDtypeStruct((), np.bool_)]
        shapes += [jax.ShapeDtypeStruct(gradients[n].shape, gradients[n].dtype) for n in there]
        inputs = [gradients[n] for n in there]
        ready, *reduced = io_callback(call, tuple(shapes), *inputs, ordered=True)
        whole = list(gradients)
        for number, each in zip(there, reduced, strict=True):
            whole[number] = each
        return ready, whole

    def synchronize(self, optimizer: Any) -> None:
        """Do nothing: gradients are reduced in ``apply()``."""

    def complete(self) -> None:
        """Do nothing: no update waits."""

    def forget(self) -> None:
        """Drop gradients of passes, and what JAX remembers of a step that failed."""
        for each in self._gradients.values():
            each.forget()


class JaxBackend:
    """Adapter of the back end JAX."""

    name = "jax"
    in_place = False

    def read(self, variables: Sequence[Any]) -> list[torch.Tensor]:
        """Return copies of the variables' values."""
        return [to_torch(each.value if hasattr(each, "value") else each) for each in variables]

    def write(self, variables: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
        """Copy values into variables."""
        for variable, value in zip(variables, values, strict=True):
            array = jax.numpy.array(to_numpy(value), dtype=variable.dtype, copy=True)
            variable.assign(array)

    def prepare(self, model: Any) -> str:
        """Do nothing."""
        return ""

    def settle(self, model: Any) -> None:
        """Wait for the step under way, and have the model's variables hold its results."""
        with contextlib.suppress(AttributeError):
            model.jax_state_sync()

    def reduction(self, options: KerasOptions) -> JaxReduction:
        """Return a new reduction of gradients."""
        return JaxReduction(options)

    def to_torch(self, value: Any) -> torch.Tensor:
        """Return a copy of an array or variable as a tensor of PyTorch."""
        return to_torch(value.value if hasattr(value, "value") else value)

    def from_torch(self, tensor: torch.Tensor) -> Any:
        """Return a copy of a tensor of PyTorch as an array of JAX."""
        return jax.numpy.array(to_numpy(tensor), copy=True)

    def raised(self) -> BaseException | None:
        """Return the error of the last operation between ranks, once."""
        return called_back.raised()
