"""Back end JAX: gradients are reduced in an ``io_callback`` of the compiled step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.experimental import io_callback

from nbelastic.elastic.ranks.context import current
from nbelastic.keras.backends import Backend, Operation, called_back


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor of PyTorch as an array that JAX takes; both share memory."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(jax.numpy.bfloat16)
    return tensor.numpy()


class JaxBackend(Backend):
    """Adapter of the back end JAX."""

    def to_torch(self, value: Any) -> torch.Tensor:
        # A copy, because JAX gives the memory of arrays to the step that they are passed to.
        array = np.array(value.value if hasattr(value, "value") else value)
        if array.dtype.name == "bfloat16":  # which NumPy does not have by itself
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        if array.dtype.kind == "u":  # of which PyTorch knows little
            array = array.astype(np.int64)
        return torch.from_numpy(array)

    def from_torch(self, tensor: torch.Tensor, dtype: Any = None) -> Any:
        return jax.numpy.array(to_numpy(tensor), dtype, copy=True)

    def settle(self, model: Any) -> None:
        with contextlib.suppress(AttributeError):
            model.jax_state_sync()

    def call_back(
        self, tensors: Sequence[Any], operation: Operation, results: Sequence[tuple[Any, Any]]
    ) -> list[Any]:
        context = current()

        def call(*given: Any) -> tuple[np.ndarray[Any, Any], ...]:
            def on_tensors() -> Sequence[torch.Tensor]:
                return operation([self.to_torch(each) for each in given])

            return tuple(map(to_numpy, called_back(context, on_tensors)))

        kinds = tuple(jax.ShapeDtypeStruct(shape, dtype) for dtype, shape in results)
        return list(io_callback(call, kinds, *tensors, ordered=True))

    def apply_if(self, ready: Any, update: Callable[[], None], changed: Sequence[Any]) -> None:
        # A choice between values, because Keras' scope does not see into the branches of a cond.
        before = [each.value for each in changed]
        update()
        for variable, value in zip(changed, before, strict=True):
            variable.assign(jax.numpy.where(ready, variable.value, value))


ADAPTER = JaxBackend()
