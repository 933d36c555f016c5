"""Gradient tapes whose gradients are those of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from nbelastic.collectives import Op
from nbelastic.keras.backends import KerasOptions, Reduction
from nbelastic.keras.backends.tensorflow import ADAPTER, native
from nbelastic.tensorflow.ops import Compression, allreduce
from nbelastic.torch.compression import Compressor
from nbelastic.torch.gradients.optimizer import with_methods_of
from nbelastic.torch.ops.operation import GradientOp
from nbelastic.torch.ops.reductions import Average


def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: Op | GradientOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: object = None,
    scale_local_gradients: bool = True,
    *,
    local_layers: Any = None,
) -> tf.GradientTape:
    """Make ``gradient()`` of a tape return gradients reduced over all ranks.

    The tape is changed and returned. It works in a ``tf.function``, too, except with
    ``jit_compile=True``. Options are those of :func:`nbelastic.keras.DistributedOptimizer`;
    `device_dense`, `device_sparse`, `num_groups` and `groups` are ignored, because all gradients
    travel together.
    """
    options = KerasOptions(
        op=op,
        compression=compression,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        local=local_layers,
        scale_local=scale_local_gradients,
        process_set=process_set,
    )
    if isinstance(gradtape, _ReducingTape):
        raise ValueError("the tape is a DistributedGradientTape already")
    tape: Any = gradtape
    tape.__class__ = with_methods_of(_ReducingTape, type(tape))
    tape._reduction = Reduction(options, ADAPTER)
    tape._local = {
        id(native(each)) for layer in options.local for each in layer.trainable_variables
    }
    return gradtape


def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape, *, local_layers: Any = None, **options: Any
) -> tf.GradientTape:
    """Make ``gradient()`` of a tape reduce the gradients of all layers but `local_layers`.

    The gradients of these, one layer or several, stay on their rank. `options` are those of
    :func:`DistributedGradientTape`, by their names.
    """
    return DistributedGradientTape(gradtape, local_layers=local_layers, **options)


class _ReducingTape:
    """Methods of a distributed tape."""

    _reduction: Reduction
    _local: set[int]

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of a variable on its rank."""
        self._local.add(id(native(source)))

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, *args: Any, **kwargs: Any
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return pairs of variables and gradients: those of this rank, and reduced ones."""
        found: tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]] = ([], [])
        gradients = self.gradient(target, sources, *args, **kwargs)
        for source, gradient in zip(sources, gradients, strict=True):
            found[id(native(source)) not in self._local].append((source, gradient))
        return found

    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the gradients, reduced over all ranks."""
        tape: Any = super()
        gradients = tape.gradient(target, sources, *args, **kwargs)
        flat = tf.nest.flatten(gradients, expand_composites=False)
        variables = [native(each) for each in tf.nest.flatten(sources)]
        options, sparse = self._reduction.options, {}
        if not options.sparse_as_dense:  # what stays on its rank becomes dense as well
            sparse = {
                number: allreduce(each, op=options.op, process_set=options.process_set)
                for number, each in enumerate(flat)
                if isinstance(each, tf.IndexedSlices) and id(variables[number]) not in self._local
            }
        flat = [None if number in sparse else each for number, each in enumerate(flat)]
        if any(each is not None for each in flat):
            _, flat = self._reduction.reduce(flat, variables, self._local)
        for number, slices in sparse.items():
            flat[number] = slices
        return tf.nest.pack_sequence_as(gradients, flat)
