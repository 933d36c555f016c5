"""Gradient tapes whose gradients are those of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from nbelastic.elastic.ranks.context import current
from nbelastic.keras.backends.callback import Gradients
from nbelastic.keras.backends.tensorflow import densified, reduce_tensors
from nbelastic.keras.options import KerasOptions, check_process_set
from nbelastic.torch.ops.compression import Compression, Compressor
from nbelastic.torch.ops.reductions import Average

if TYPE_CHECKING:
    from nbelastic.collectives import Op
    from nbelastic.torch.ops.operation import GradientOp


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
) -> tf.GradientTape:
    """Make ``gradient()`` of a tape return gradients reduced over all ranks.

    It works in a ``tf.function``, too, except with ``jit_compile=True``.

    Parameters
    ----------
    gradtape : tf.GradientTape
        This object is changed and returned.
    device_dense, device_sparse, num_groups, groups
        Ignored; for Horovod's signature. All gradients travel together.
    compression, sparse_as_dense, op, gradient_predivide_factor, process_set, \
scale_local_gradients
        As for :func:`nbelastic.keras.DistributedOptimizer`.

    Returns
    -------
    tf.GradientTape
        `gradtape`.
    """
    del device_dense, device_sparse, num_groups, groups
    check_process_set(process_set)
    options = KerasOptions(
        op=op,
        compression=compression,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        scale_local=scale_local_gradients,
    )
    return _wrap(gradtape, options)


def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
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
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """Make ``gradient()`` of a tape reduce the gradients of all layers but some.

    Parameters
    ----------
    gradtape, device_dense, device_sparse, compression, sparse_as_dense, op, \
gradient_predivide_factor, num_groups, groups, process_set, scale_local_gradients
        As for :func:`DistributedGradientTape`.
    local_layers : keras.Layer or list of keras.Layer
        Layers whose gradients stay on their rank.
    """
    del device_dense, device_sparse, num_groups, groups
    check_process_set(process_set)
    layers = [] if local_layers is None else local_layers
    layers = list(layers) if isinstance(layers, (list, tuple, set)) else [layers]
    options = KerasOptions(
        op=op,
        compression=compression,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        local=tuple(layers),
        scale_local=scale_local_gradients,
    )
    return _wrap(gradtape, options)


def _wrap(tape: Any, options: KerasOptions) -> Any:
    if isinstance(tape, _ReducingTape):
        raise ValueError("the tape is a DistributedGradientTape already")
    current()  # NotInitialized where there is none
    kind = type(tape)
    tape.__class__ = type(kind.__name__, (_ReducingTape, kind), {"__module__": kind.__module__})
    tape._options = options
    return tape


class _ReducingTape:
    """Methods of a distributed tape."""

    _options: KerasOptions

    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the gradients, reduced over all ranks."""
        tape: Any = super()
        gradients = tape.gradient(target, sources, *args, **kwargs)
        flat = tf.nest.flatten(gradients, expand_composites=False)
        options = self._options
        dense = densified(flat, sparse_as_dense=options.sparse_as_dense)
        there = [n for n, each in enumerate(dense) if each is not None]
        variables = tf.nest.flatten(sources)
        local = {id(v.value) for layer in options.local for v in layer.trainable_variables}
        local |= options.is_local()
        found = Gradients(options, [id(variables[n]) in local for n in there])
        _, reduced = reduce_tensors([dense[n] for n in there], found)
        for number, each in zip(there, reduced, strict=True):
            dense[number] = each
        if isinstance(sources, (list, tuple)) and len(dense) == len(sources):
            return type(gradients)(dense) if isinstance(gradients, (list, tuple)) else dense
        return tf.nest.pack_sequence_as(gradients, dense)
