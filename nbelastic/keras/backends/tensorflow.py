"""Back end TensorFlow, whose gradients are reduced in a ``py_function``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
import torch
from torch._C import _to_dlpack as to_dlpack

from nbelastic.keras.backends import Backend
from nbelastic.keras.backends.callback import CallbackReduction, CalledBack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.keras.backends.callback import Gradients
    from nbelastic.keras.options import KerasOptions

_UNSIGNED = (tf.uint16, tf.uint32, tf.uint64)

NO_XLA = (
    "jit_compile was turned off\n"
    "XLA compiles functions that cannot call back into Python, where gradients are reduced.\n"
    "Pass jit_compile=False to compile()."
)

called_back = CalledBack()


def to_torch(value: Any) -> torch.Tensor:
    """Return a tensor or variable as a tensor of PyTorch, without a copy where that can be."""
    tensor = tf.convert_to_tensor(value)
    if tensor.dtype in _UNSIGNED:  # of which PyTorch knows little
        return torch.from_numpy(tensor.numpy().astype(np.int64))
    return torch.utils.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor))


def from_torch(tensor: torch.Tensor) -> Any:
    """Return a tensor of PyTorch as one of TensorFlow, without a copy where that can be."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype is torch.bool:
        return tf.constant(tensor.numpy())
    return tf.experimental.dlpack.from_dlpack(to_dlpack(tensor))


def reduce_tensors(tensors: Sequence[Any], gradients: Gradients) -> tuple[Any, list[Any]]:
    """Reduce tensors over all ranks, eagerly or in a function that TensorFlow compiles.

    Returns whether there are reduced ones, which is not so between the passes of a step, and them.
    """

    def call(*given: Any) -> list[Any]:
        def add() -> list[torch.Tensor]:
            found = gradients.add([to_torch(each) for each in given])
            if found is None:
                return [torch.tensor(False), *(torch.zeros(()) for _ in given)]
            return [torch.tensor(True), *found]

        flag, *reduced = called_back.call(gradients.context, add)
        if not flag:
            return [tf.constant(False), *(tf.zeros_like(each) for each in given)]
        return [tf.constant(True), *(from_torch(each) for each in reduced)]

    if tf.executing_eagerly():
        ready, *reduced = call(*tensors)
        return bool(ready), reduced
    types = [tf.bool, *(each.dtype for each in tensors)]
    ready, *reduced = tf.py_function(call, list(tensors), types)
    ready.set_shape(())
    for one, other in zip(reduced, tensors, strict=True):
        one.set_shape(other.shape)
    return ready, reduced


def densified(gradients: Sequence[Any], *, sparse_as_dense: bool) -> list[Any]:
    """Return gradients as dense tensors; refuse sparse ones, unless they may be made dense."""
    found = []
    for each in gradients:
        if isinstance(each, tf.IndexedSlices):
            if not sparse_as_dense:
                raise ValueError(
                    "a gradient is sparse (IndexedSlices, as of an Embedding); pass "
                    "sparse_as_dense=True"
                )
            each = tf.convert_to_tensor(each)  # noqa: PLW2901 - the dense one in its place
        found.append(each)
    return found


class TensorFlowReduction(CallbackReduction):
    """Reduction by a ``py_function``."""

    def _reduce(
        self, gradients: Sequence[Any], trained: Sequence[Any] | None
    ) -> tuple[Any, list[Any]]:
        dense = densified(gradients, sparse_as_dense=self.options.sparse_as_dense)
        return super()._reduce(dense, trained)

    def _call(self, tensors: Sequence[Any], gradients: Gradients) -> tuple[Any, Sequence[Any]]:
        return reduce_tensors(tensors, gradients)

    def _apply_if(self, ready: Any, update: Callable[[], None], changed: Sequence[Any]) -> None:
        if isinstance(ready, bool):
            if ready:
                update()
            return

        def branch() -> Any:
            update()
            return tf.constant(0)

        tf.cond(ready, branch, lambda: tf.constant(0))


class TensorFlowBackend(Backend):
    """Adapter of the back end TensorFlow."""

    name = "tensorflow"
    in_place = False

    def read(self, variables: Sequence[Any]) -> list[torch.Tensor]:
        """Return the variables' values, which share memory with them until they change."""
        return [to_torch(_native(each)) for each in variables]

    def write(self, variables: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
        """Copy values into variables."""
        for variable, value in zip(variables, values, strict=True):
            native = _native(variable)
            native.assign(tf.cast(from_torch(value.clone()), native.dtype))

    def prepare(self, model: Any) -> str:
        """Turn off XLA, whose code cannot call back into Python."""
        if not getattr(model, "compiled", False) or not model.jit_compile:
            return ""
        model.jit_compile = False
        return NO_XLA

    def reduction(self, options: KerasOptions) -> TensorFlowReduction:
        """Return a new reduction of gradients."""
        return TensorFlowReduction(options)

    def to_torch(self, value: Any) -> torch.Tensor:
        """Return a tensor, an array or a variable as a tensor of PyTorch."""
        return to_torch(_native(value))

    def from_torch(self, tensor: torch.Tensor) -> Any:
        """Return a tensor of PyTorch as one of TensorFlow."""
        return from_torch(tensor)

    def raised(self) -> BaseException | None:
        """Return the error of the last operation between ranks, once."""
        return called_back.raised()


def _native(variable: Any) -> Any:
    """Return TensorFlow's own variable of one of Keras."""
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable
