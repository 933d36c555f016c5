"""Back end TensorFlow, whose gradients are reduced in a ``py_function``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
import torch
from torch._C import _to_dlpack as to_dlpack

from nbelastic.elastic.ranks.context import current
from nbelastic.errors import RanksDisagree
from nbelastic.keras.backends import Backend
from nbelastic.keras.backends.callback import CallbackReduction, CalledBack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.elastic.ranks.context import Context
    from nbelastic.keras.backends.callback import Gradients
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


def call_back(
    tensors: Sequence[Any],
    operation: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
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


def reduce_tensors(tensors: Sequence[Any], gradients: Gradients) -> tuple[Any, list[Any]]:
    """Reduce tensors over all ranks, eagerly or in a function that TensorFlow compiles.

    Returns whether there are reduced ones, which is not so between the passes of a step, and them.
    """

    def add(given: list[torch.Tensor]) -> list[torch.Tensor]:
        found = gradients.add(given)
        return [torch.tensor(found is not None), *(found or given)]

    results = [(tf.bool, ()), *((each.dtype, each.shape) for each in tensors)]
    ready, *reduced = call_back(tensors, add, results)
    return (bool(ready) if tf.executing_eagerly() else ready), reduced


def densified(gradients: Sequence[Any]) -> list[Any]:
    """Return gradients, with dense ones in the place of sparse ones."""
    sparse = tf.IndexedSlices
    return [tf.convert_to_tensor(g) if isinstance(g, sparse) else g for g in gradients]


class TensorFlowReduction(CallbackReduction):
    """Reduction by a ``py_function``."""

    def _reduce(
        self, gradients: Sequence[Any], trained: Sequence[Any] | None
    ) -> tuple[Any, list[Any]]:
        if not self.options.sparse_as_dense and any(
            isinstance(each, tf.IndexedSlices) for each in gradients
        ):
            raise ValueError(
                "a gradient is sparse (IndexedSlices, as of an Embedding); pass "
                "sparse_as_dense=True"
            )
        return super()._reduce(densified(gradients), trained)

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
        return [to_torch(native(each)) for each in variables]

    def write(self, variables: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
        """Copy values into variables."""
        for variable, value in zip(variables, values, strict=True):
            own = native(variable)
            own.assign(tf.cast(from_torch(value.clone()), own.dtype))

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
        return to_torch(native(value))

    def from_torch(self, tensor: torch.Tensor) -> Any:
        """Return a tensor of PyTorch as one of TensorFlow."""
        return from_torch(tensor)

    def raised(self) -> BaseException | None:
        """Return the error of the last operation between ranks, once."""
        return called_back.raised()
