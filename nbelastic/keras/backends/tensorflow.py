"""Back end TensorFlow, whose gradients are reduced in a ``py_function``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
import torch
from torch._C import _to_dlpack as to_dlpack

from nbelastic.elastic.ranks.context import current
from nbelastic.errors import RanksDisagree
from nbelastic.keras.backends.callback import CallbackBackend, CalledBack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.elastic.ranks.context import Context
    from nbelastic.keras.backends.callback import Operation
    from nbelastic.keras.options import KerasOptions

_UNSIGNED = (tf.uint16, tf.uint32, tf.uint64)

NO_XLA = (
    "jit_compile was turned off\n"
    "XLA compiles functions that cannot call back into Python, where gradients are reduced.\n"
    "Pass jit_compile=False to compile()."
)


# TensorFlow's class comes first: raised in a py_function, the other order ends the process.
class Disagree(tf.errors.FailedPreconditionError, RanksDisagree):  # type: ignore[misc]
    """Ranks called different operations; what Horovod's users of TensorFlow catch, too."""

    def __reduce__(self) -> Any:
        return RanksDisagree, self.args  # where it is read, there may be no TensorFlow


class Invalid(tf.errors.InvalidArgumentError, ValueError):  # type: ignore[misc]
    """A value that an operation cannot have."""

    def __reduce__(self) -> Any:
        return ValueError, self.args


class _CalledBack(CalledBack):
    """The same with errors that are TensorFlow's as well."""

    def call(self, context: Context, function: Callable[[], Sequence[torch.Tensor]]) -> Any:
        def translated() -> Sequence[torch.Tensor]:
            try:
                return function()
            except (RanksDisagree, ValueError) as error:
                kind = Disagree if isinstance(error, RanksDisagree) else Invalid
                if type(error) not in (RanksDisagree, ValueError):
                    raise
                made = kind(None, None, str(error))
                made.args = (str(error),)
                raise made from None

        return super().call(context, translated)


called_back = _CalledBack()


def native(variable: Any) -> Any:
    """Return TensorFlow's own variable of one of Keras."""
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable


def to_torch(value: Any) -> torch.Tensor:
    """Return a tensor or variable as a tensor of PyTorch, without a copy where that can be."""
    tensor = tf.convert_to_tensor(native(value))
    if tensor.dtype in _UNSIGNED:  # of which PyTorch knows little
        return torch.from_numpy(tensor.numpy().astype(np.int64))
    return torch.utils.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor))


def from_torch(tensor: torch.Tensor) -> Any:
    """Return a tensor of PyTorch as one of TensorFlow, without a copy where that can be."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype is torch.bool:
        return tf.constant(tensor.numpy())
    return tf.experimental.dlpack.from_dlpack(to_dlpack(tensor))


def call_back(
    tensors: Sequence[Any],
    operation: Operation,
    results: Sequence[tuple[Any, Any]],
) -> list[Any]:
    """Call a function on tensors of PyTorch, in a ``py_function`` where TensorFlow compiles.

    `results` are the types and shapes that come out.
    """
    context = current()
    types = [dtype for dtype, _ in results]

    def call(*given: Any) -> list[Any]:
        found = called_back.call(context, lambda: operation([to_torch(each) for each in given]))
        return [tf.cast(from_torch(one), dtype) for one, dtype in zip(found, types, strict=True)]

    if tf.executing_eagerly():
        return call(*tensors)
    found = tf.py_function(call, list(tensors), types)
    for one, (_, shape) in zip(found, results, strict=True):
        one.set_shape(shape)
    return list(found)


def densified(gradients: Sequence[Any]) -> list[Any]:
    """Return gradients, with dense ones in the place of sparse ones."""
    sparse = tf.IndexedSlices
    return [tf.convert_to_tensor(g) if isinstance(g, sparse) else g for g in gradients]


class TensorFlowBackend(CallbackBackend):
    """Adapter of the back end TensorFlow, whose gradients are reduced in a ``py_function``."""

    name = "tensorflow"
    called_back = called_back
    call_back = staticmethod(call_back)
    to_torch = staticmethod(to_torch)
    from_torch = staticmethod(from_torch)

    def read(self, variables: Sequence[Any]) -> list[torch.Tensor]:
        # They share memory with the variables until these change.
        return [to_torch(each) for each in variables]

    def write(self, variables: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
        for variable, value in zip(variables, values, strict=True):
            own = native(variable)
            own.assign(tf.cast(from_torch(value.clone()), own.dtype))

    def prepare(self, model: Any) -> str:
        if not getattr(model, "compiled", False) or not model.jit_compile:
            return ""
        model.jit_compile = False
        return NO_XLA

    def dense(self, gradients: Sequence[Any], options: KerasOptions) -> list[Any]:
        found = densified(gradients)
        if not options.sparse_as_dense and any(
            a is not b for a, b in zip(found, gradients, strict=True)
        ):
            raise ValueError(
                "a gradient is sparse (IndexedSlices, as of an Embedding); pass "
                "sparse_as_dense=True"
            )
        return densified(gradients)

    def apply_if(self, ready: Any, update: Callable[[], None], changed: Sequence[Any]) -> None:
        del changed

        def branch() -> Any:
            update()
            return tf.constant(0)

        if not tf.executing_eagerly():
            tf.cond(ready, branch, lambda: tf.constant(0))
        elif ready:
            update()
