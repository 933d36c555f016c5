"""Back end JAX: gradients are reduced in an ``io_callback`` of the compiled step."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import torch
from jax.experimental import io_callback

from nbelastic.keras.backends import Backend
from nbelastic.keras.backends.callback import CallbackReduction, CalledBack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.keras.backends.callback import Gradients
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


class JaxReduction(CallbackReduction):
    """Reduction by an ``io_callback``."""

    def _apply_if(self, ready: Any, update: Callable[[], None], changed: Sequence[Any]) -> None:
        # A choice between values, because Keras' scope does not see into the branches of a cond.
        before = [each.value for each in changed]
        update()
        for variable, value in zip(changed, before, strict=True):
            variable.assign(jax.numpy.where(ready, variable.value, value))

    def stateless(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Return reduced gradients, where Keras has no variables at hand."""
        if self.options.passes > 1 or self.options.local:
            raise ValueError(
                "backward_passes_per_step and local layers cannot be used with a "
                "LossScaleOptimizer on the JAX back end"
            )
        return self._reduce(gradients, None)[1]

    def _call(self, tensors: Sequence[Any], gradients: Gradients) -> tuple[Any, Sequence[Any]]:
        def call(*given: Any) -> tuple[np.ndarray[Any, Any], ...]:
            def add() -> list[torch.Tensor]:
                mine = [to_torch(each) for each in given]
                reduced = gradients.add(mine)
                return [torch.tensor(reduced is not None), *(reduced or mine)]

            return tuple(map(to_numpy, called_back.call(gradients.context, add)))

        shapes = [jax.ShapeDtypeStruct((), np.bool_)]
        shapes += [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in tensors]
        ready, *reduced = io_callback(call, tuple(shapes), *tensors, ordered=True)
        return ready, reduced


class JaxBackend(Backend):
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
