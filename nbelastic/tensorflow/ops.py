"""Operations between ranks on tensors of TensorFlow, also in a ``tf.function``.

Signatures and gradients are Horovod's. Each operation is that of :mod:`nbelastic.torch` of the same
name, whose documentation has the arguments, and its gradient one of this module. `device_dense`,
`device_sparse`, `ignore_name_scope`, `inplace` and names of variables and numbers are ignored.

Where ranks differ, the error is TensorFlow's FailedPreconditionError as well, and a value that
cannot be is an InvalidArgumentError. From a ``tf.function`` TensorFlow raises an UnknownError or
InvalidArgumentError of its own.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
import torch

from nbelastic.collectives import Op
from nbelastic.elastic.ranks import context
from nbelastic.keras.backends import Operation
from nbelastic.keras.backends.tensorflow import ADAPTER, native
from nbelastic.torch import compression as compressions
from nbelastic.torch import functions as broadcasts
from nbelastic.torch.ops import functions, reductions
from nbelastic.torch.ops.coordination import joined_rank, process_sets
from nbelastic.torch.ops.operation import GradientOp
from nbelastic.torch.ops.reductions import Average, Sum

call_back = ADAPTER.call_back


class _Compressor(compressions.Compressor):
    """Compression of tensors of TensorFlow, and for gradients of PyTorch's."""

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        if isinstance(tensor, torch.Tensor):
            return super().compress(tensor)
        if not tensor.dtype.is_floating:
            return tensor, tensor.dtype
        wire = cls.wire_dtype(getattr(torch, tensor.dtype.name))
        return tf.cast(tensor, str(wire).removeprefix("torch.")), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        if isinstance(tensor, torch.Tensor):
            return super().decompress(tensor, ctx)
        return tf.cast(tensor, ctx)


Compression = types.SimpleNamespace(
    none=type("NoneCompressor", (_Compressor, compressions.NoneCompressor), {}),
    fp16=type("FP16Compressor", (_Compressor, compressions.FP16Compressor), {}),
    bf16=type("BF16Compressor", (_Compressor, compressions.BF16Compressor), {}),
)
"""The compressions there are."""


def _apply(
    tensors: Sequence[Any],
    operation: Operation,
    gradient: Callable[[list[Any], list[Any]], Sequence[Any]],
    *,
    compression: Any = Compression.none,
    rows: bool = False,
    more: Sequence[Any] = (),
    results: Sequence[tuple[Any, Any]] = (),
) -> list[Any]:
    """Call an operation that has a gradient.

    It gets `tensors` and `more`, and returns tensors like the former, if `rows` with other numbers
    of them, and `results`. The gradient gets what it returned, and gradients of the former.
    """
    pairs = [compression.compress(tf.convert_to_tensor(each)) for each in tensors]
    shapes = [each.shape for each, _ in pairs]
    if rows:
        shapes = [tf.TensorShape([None]).concatenate(each[1:]) for each in shapes]
    kinds = [(each.dtype, shape) for (each, _), shape in zip(pairs, shapes, strict=True)]

    def call(*given: Any) -> Any:
        found = call_back([*given, *more], operation, [*kinds, *results])
        return found, lambda *grads: gradient(found, list(grads[: len(given)]))

    call = tf.custom_gradient(call)
    found = list(call(*(each for each, _ in pairs))) if pairs else []
    for number, (_, ctx) in enumerate(pairs):
        found[number] = compression.decompress(found[number], ctx)
    return found


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Op | GradientOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: object = None,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce a tensor over all ranks. Differentiable: the gradient is reduced likewise.

    ``tf.IndexedSlices`` are gathered instead; with factors, or an `op` that is neither Average nor
    Sum, they raise a NotImplementedError. `compression` is one of this module, or a class of your
    own with ``compress`` and ``decompress``.
    """
    options = (device_dense, device_sparse, compression, op, prescale_factor, postscale_factor)
    return grouped_allreduce([tensor], average, *options, process_set, ignore_name_scope, name)[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Op | GradientOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduce several tensors in as few operations as possible; as :func:`allreduce`."""
    if op is None:
        op, average = Sum if average is False else Average, None
    factors, linear = (prescale_factor, postscale_factor), op in (Average, Sum)
    dense = [each for each in tensors if not isinstance(each, tf.IndexedSlices)]
    if len(dense) < len(tensors) and (factors != (1.0, 1.0) or not linear):
        raise NotImplementedError(
            "tf.IndexedSlices are gathered, so they have no factors, and no reductions but Average "
            "and Sum; pass tf.convert_to_tensor(slices)"
        )
    none = compressions.Compression.none

    def operation(given: list[torch.Tensor]) -> list[torch.Tensor]:
        return reductions.grouped_allreduce(given, average, name, none, op, *factors, process_set)

    def gradient(_: list[Any], grads: list[Any]) -> list[Any]:
        if not linear:
            raise NotImplementedError(f"an allreduce with {op} has no gradient; use Average or Sum")
        return grouped_allreduce(grads, None, "", "", Compression.none, op, *factors, process_set)

    reduced = iter(_apply(dense, operation, gradient, compression=compression))
    return [
        _gathered(each, op, process_set) if isinstance(each, tf.IndexedSlices) else next(reduced)
        for each in tensors
    ]


def _gathered(slices: Any, op: Any, process_set: object) -> Any:
    """Return the slices of all ranks, which add up to the sum or the average."""
    values = allgather(slices.values, process_set=process_set)
    indices = allgather(slices.indices, process_set=process_set)
    if op is Average:
        values = values / tf.cast(_size(process_set), values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: object = None,
) -> Any:
    """Return the tensors of all ranks, one after the other along the first axis. Differentiable."""
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: object = None,
) -> list[Any]:
    """Gather several tensors as one operation; as :func:`allgather`."""
    tensors = [tf.convert_to_tensor(each) for each in tensors]
    tensors = [tf.reshape(each, [1]) if each.shape.rank == 0 else each for each in tensors]

    def place() -> int:
        group = process_sets.group_of(process_set)
        return group.ranks.index(group.context.rank)

    def gradient(_: list[Any], grads: list[Any]) -> list[Any]:
        means = grouped_allreduce(grads, op=Average, process_set=process_set)
        lengths = tf.stack([tf.shape(each)[0] for each in tensors])
        before = allgather(lengths[None], process_set=process_set)[: _number(place)]
        first = tf.reduce_sum(before, 0)  # this rank's rows begin here
        last = first + lengths
        return [mean[first[number] : last[number]] for number, mean in enumerate(means)]

    return _apply(
        tensors,
        lambda given: functions.grouped_allgather(given, name, process_set),
        gradient,
        rows=True,
    )


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: object = None,
) -> Any:
    """Return the tensor of one rank. Differentiable: the root has the mean of all gradients."""

    def gradient(_: list[Any], grads: list[Any]) -> list[Any]:
        mean = allreduce(grads[0], op=Average, process_set=process_set)
        return [tf.where(rank_op() == root_rank, mean, tf.zeros_like(mean))]

    return _apply(
        [tensor],
        lambda given: [functions.broadcast(given[0], root_rank, name, process_set)],
        gradient,
    )[0]


def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: object = None
) -> list[Any]:
    """Broadcast the values of variables from `root_rank`, and return the values.

    All ranks pass the same variables, of TensorFlow or Keras, which travel in few large broadcasts.
    """
    own = [native(each) for each in variables]

    def operation(given: list[torch.Tensor]) -> list[torch.Tensor]:
        values = [each.clone() for each in given]
        named = [(f"variable {number}", each) for number, each in enumerate(values)]
        broadcasts.broadcast_parameters(named, root_rank, process_set)
        return values

    kinds = [(each.dtype, each.shape) for each in own]
    values = call_back([tf.convert_to_tensor(each) for each in own], operation, kinds)
    for variable, value in zip(own, values, strict=True):
        variable.assign(value)
    return [each.read_value() for each in own]


def broadcast_variables(
    variables: Sequence[Any], root_rank: int = 0, process_set: object = None, inplace: bool = False
) -> None:
    """Broadcast the values of variables from `root_rank`, as :func:`broadcast_`."""
    broadcast_(variables, root_rank, process_set=process_set)


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: object = None,
) -> Any:
    """Send rows of a tensor to each rank, and return what all send here. Differentiable.

    With `splits`, the rows for each rank, also return the number of rows received from each.
    """

    def operation(given: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        rows, *counts = given
        how = counts[0] if counts else None
        return functions.alltoall_async(rows, how, name, process_set).wait()

    def gradient(found: list[Any], grads: list[Any]) -> list[Any]:
        return [alltoall(grads[0], found[1], process_set=process_set)[0]]

    output, received = _apply(
        [tensor],
        operation,
        gradient,
        rows=True,
        more=() if splits is None else [tf.convert_to_tensor(splits)],
        results=[(tf.int32, [None])],
    )
    return output if splits is None else (output, received)


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Op = Average,
    name: str | None = None,
    process_set: object = None,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce over all ranks, and return this rank's part along the first axis. Differentiable.

    The gradient of a sum is multiplied by the number of ranks, as in Horovod.
    """
    options = (device_dense, compression, op, process_set, prescale_factor, postscale_factor, name)
    return grouped_reducescatter([tensor], *options)[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Op = Average,
    process_set: object = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[Any]:
    """Reduce several tensors as one operation; as :func:`reducescatter`."""
    factors, none = (prescale_factor, postscale_factor), compressions.Compression.none

    def operation(given: list[torch.Tensor]) -> list[torch.Tensor]:
        return reductions.grouped_reducescatter(given, name, none, op, process_set, *factors)

    def gradient(_: list[Any], grads: list[Any]) -> list[Any]:
        if op not in (Average, Sum):
            raise NotImplementedError(f"a reducescatter with {op} has no gradient")
        factor = tf.cast(_size(process_set) if op is Sum else 1, tf.float64)
        factor *= prescale_factor * postscale_factor
        scaled = [each * tf.cast(factor, each.dtype) for each in grads]
        return grouped_allgather(scaled, process_set=process_set)

    return _apply(tensors, operation, gradient, compression=compression, rows=True)


def join() -> Any:
    """Take part in other ranks' operations until all ranks have joined; return the last rank."""
    return _number(joined_rank.join)


def _number(read: Callable[[], Any]) -> Any:
    """Return a number as of when a ``tf.function`` runs, not of when it is compiled."""
    return call_back([], lambda _: [torch.tensor(read(), dtype=torch.int32)], [(tf.int32, ())])[0]


def _size(process_set: object) -> Any:
    return _number(lambda: process_sets.group_of(process_set).size)


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of ranks in a process set, as of when a ``tf.function`` runs."""
    return _number(lambda: process_sets.set_of_id(process_set_id).size())


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return 1 if the rank is in a process set when a ``tf.function`` runs, else 0."""
    return _number(lambda: process_sets.set_of_id(process_set_id).included())


def local_size_op(name: str | None = None) -> Any:
    """Return the number of ranks on this host, as of when a ``tf.function`` runs."""
    return _number(context.local_size)


def rank_op(name: str | None = None) -> Any:
    """Return the rank, as of when a ``tf.function`` runs."""
    return _number(context.rank)


def local_rank_op(name: str | None = None) -> Any:
    """Return the rank among those of its host, as of when a ``tf.function`` runs."""
    return _number(context.local_rank)


class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Batch normalisation with mean and variance over all ranks, in training.

    Each sample counts once, however many a rank has. All ranks call the layer equally often.
    `fused` is Horovod's and must be False; other options are those of Keras' layer.
    """

    def __init__(self, fused: bool = False, **options: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True")
        super().__init__(**options)

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = super()._moments(inputs, mask)
        if mask is None:
            count = tf.size(inputs) / tf.size(mean)
        else:
            places = tf.size(inputs) / (tf.size(mask) * tf.size(mean))
            count = tf.cast(tf.math.count_nonzero(mask), places.dtype) * places
        count = tf.cast(count, mean.dtype)
        sums = tf.stack([mean * count, (variance + mean**2) * count, tf.ones_like(mean) * count])
        total, squares, count = tf.unstack(allreduce(sums, op=Sum))
        mean = total / count
        return mean, squares / count - mean**2
