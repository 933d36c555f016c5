"""Operations between ranks on tensors of TensorFlow, also in a ``tf.function``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf
import torch

from nbelastic.elastic.ranks.context import current
from nbelastic.keras import ops
from nbelastic.keras.backends.tensorflow import called_back, from_torch, to_torch
from nbelastic.torch.ops import functions, reductions
from nbelastic.torch.ops.compression import Compression, Compressor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.collectives import Op
    from nbelastic.torch.ops.operation import GradientOp

broadcast_global_variables = ops.broadcast_global_variables
broadcast_variables = ops.broadcast_variables


def _call(
    tensors: Sequence[Any],
    operation: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    *,
    keeps_shape: bool = True,
) -> list[Any]:
    """Apply an operation of PyTorch's face, in a ``py_function`` where TensorFlow compiles."""
    tensors = [tf.convert_to_tensor(each) for each in tensors]
    context = current()

    def call(*given: Any) -> list[Any]:
        results = called_back.call(context, lambda: operation([to_torch(each) for each in given]))
        return [from_torch(each) for each in results]

    if tf.executing_eagerly():
        return call(*tensors)
    results = tf.py_function(call, tensors, [each.dtype for each in tensors])
    for result, tensor in zip(results, tensors, strict=True):
        result.set_shape(tensor.shape if keeps_shape else [None, *tensor.shape[1:]])
    return list(results)


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: Op | GradientOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: object = None,
) -> Any:
    """Reduce a tensor over all ranks.

    Parameters
    ----------
    tensor : tf.Tensor or tf.Variable
        Of the same shape and type on all ranks.
    device_dense, device_sparse : str
        Ignored; for Horovod's signature.
    average, compression, op, prescale_factor, postscale_factor, name, process_set
        As for :func:`nbelastic.torch.allreduce`.

    Returns
    -------
    tf.Tensor
        The same on all ranks.
    """
    del device_dense, device_sparse
    (result,) = _call(
        [tensor],
        lambda given: [
            reductions.allreduce(
                given[0],
                average,
                name,
                compression,
                op,
                prescale_factor,
                postscale_factor,
                process_set,
            )
        ],
    )
    return result


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: Op | GradientOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> list[Any]:
    """Reduce several tensors in as few operations as possible; as :func:`allreduce`."""
    del device_dense, device_sparse
    return _call(
        tensors,
        lambda given: reductions.grouped_allreduce(
            given, average, None, compression, op, prescale_factor, postscale_factor, process_set
        ),
    )


def allgather(tensor: Any, name: str | None = None, process_set: object = None) -> Any:
    """Return the tensors of all ranks, one after the other along the first axis."""
    (result,) = _call(
        [tensor],
        lambda given: [functions.allgather(given[0], name, process_set)],
        keeps_shape=False,
    )
    return result


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: object = None
) -> Any:
    """Return the tensor of one rank."""
    (result,) = _call(
        [tensor], lambda given: [functions.broadcast(given[0], root_rank, name, process_set)]
    )
    return result


def reducescatter(
    tensor: Any, op: Op = reductions.Average, name: str | None = None, process_set: object = None
) -> Any:
    """Reduce over all ranks, and return this rank's part along the first axis."""
    (result,) = _call(
        [tensor],
        lambda given: [
            reductions.reducescatter(given[0], name=name, op=op, process_set=process_set)
        ],
        keeps_shape=False,
    )
    return result
