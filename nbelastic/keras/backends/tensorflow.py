"""Back end TensorFlow, whose gradients are reduced in a ``py_function``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import torch
from torch._C import _to_dlpack as to_dlpack

from nbelastic.elastic.ranks.context import current
from nbelastic.errors import RanksDisagree
from nbelastic.keras.backends import Backend, Operation, called_back

_UNSIGNED = (tf.uint16, tf.uint32, tf.uint64)


# TensorFlow's class comes first: raised in a py_function, the other order ends the process.
class Disagree(tf.errors.FailedPreconditionError, RanksDisagree):  # type: ignore[misc]
    """Ranks called different operations; what Horovod's users of TensorFlow catch, too."""

    def __reduce__(self) -> Any:
        return RanksDisagree, self.args  # where it is read, there may be no TensorFlow


class Invalid(tf.errors.InvalidArgumentError, ValueError):  # type: ignore[misc]
    """A value that an operation cannot have."""

    def __reduce__(self) -> Any:
        return ValueError, self.args


def _translated(operation: Operation, given: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Call an operation whose errors are TensorFlow's as well."""
    try:
        return operation(given)
    except (RanksDisagree, ValueError) as error:
        kind = {RanksDisagree: Disagree, ValueError: Invalid}.get(type(error))
        if kind is None:
            raise
        made = kind(None, None, str(error))
        made.args = (str(error),)
        raise made from None


def native(variable: Any) -> Any:
    """Return TensorFlow's own variable of one of Keras."""
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable


class TensorFlowBackend(Backend):
    """Adapter of the back end TensorFlow."""

    def to_torch(self, value: Any) -> torch.Tensor:
        # Without a copy where that can be: it shares memory with a variable until that changes.
        tensor = tf.convert_to_tensor(native(value))
        if tensor.dtype in _UNSIGNED:  # of which PyTorch knows little
            return torch.from_numpy(tensor.numpy().astype(np.int64))
        return torch.utils.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor))

    def from_torch(self, tensor: torch.Tensor, dtype: Any = None) -> Any:
        tensor = tensor.detach().contiguous()
        if tensor.dtype is torch.bool:
            made = tf.constant(tensor.numpy())
        else:
            made = tf.experimental.dlpack.from_dlpack(to_dlpack(tensor))
        return made if dtype is None else tf.cast(made, dtype)

    def settle(self, model: Any) -> None:
        if getattr(model, "compiled", False):
            model.jit_compile = False  # what XLA compiles cannot call back into Python

    def call_back(
        self, tensors: Sequence[Any], operation: Operation, results: Sequence[tuple[Any, Any]]
    ) -> list[Any]:
        context = current()
        types = [dtype for dtype, _ in results]
        tensors = [tf.convert_to_tensor(each) for each in tensors]

        def call(*given: Any) -> list[Any]:
            values = [self.to_torch(each) for each in given]
            found = called_back(context, lambda: _translated(operation, values))
            return [*map(self.from_torch, found, types)]

        if tf.executing_eagerly():
            return call(*tensors)
        found = tf.py_function(call, tensors, types)
        for one, (_, shape) in zip(found, results, strict=True):
            one.set_shape(shape)
        return list(found)

    def apply_if(self, ready: Any, update: Callable[[], None], changed: Sequence[Any]) -> None:
        keras.ops.cond(ready, update, lambda: None)


ADAPTER = TensorFlowBackend()
