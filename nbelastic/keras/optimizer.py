"""Optimizers of Keras that apply the gradients of all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import keras

from nbelastic.collectives import Op
from nbelastic.keras.backends import KerasOptions, Reduction, backend
from nbelastic.torch.compression import Compression, Compressor
from nbelastic.torch.gradients.optimizer import with_methods_of
from nbelastic.torch.ops.operation import GradientOp
from nbelastic.torch.ops.reductions import Average

Optimizer = TypeVar("Optimizer", bound=Any)

SCALED_OUTSIDE = (
    "a LossScaleOptimizer is around a DistributedOptimizer, as compile() puts one with "
    "mixed_float16: each rank would skip other steps. Write "
    "hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(…))"
)


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Op | GradientOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: object = None,
    scale_local_gradients: bool = True,
    *,
    local_layers: Any = None,
) -> Optimizer:
    """Make a Keras optimizer apply gradients reduced over all ranks.

    Gradients are reduced before they are clipped. The optimizer survives changes of membership.
    On one rank it does what it did before. A model that is saved with it can be loaded where
    nbelastic is not installed, with the plain optimizer.

    On the torch back end gradients travel while backward still runs. What a ``train_step`` of your
    own does with gradients between ``backward()`` and ``optimizer.apply()`` needs
    ``optimizer.synchronize()`` before.

    With mixed precision, wrap the ``LossScaleOptimizer``, so that all ranks see the same
    infinities. On the JAX back end there is none; use ``mixed_bfloat16``.

    Parameters
    ----------
    optimizer : keras.optimizers.Optimizer
        This object is changed and returned. Its class becomes one derived from its present class.
    name : str, optional
        Its new name.
    device_dense, device_sparse : str
        Ignored; for Horovod's signature.
    compression, gradient_predivide_factor, op
        As for :func:`nbelastic.torch.DistributedOptimizer`.
    sparse_as_dense : bool, default False
        Whether to make sparse gradients of PyTorch dense. ``IndexedSlices`` of TensorFlow always
        become dense.
    backward_passes_per_step : int, default 1
        Batches whose gradients add up on this rank before they are reduced and applied.
        ``optimizer.iterations`` counts updates.
    average_aggregated_gradients : bool, default False
        Whether to divide these sums by their number.
    num_groups : int, default 0
        Horovod's older name of `groups`.
    groups : int or list of lists of variables, optional
        How many groups to reduce gradients in, or which variables go together, on the torch back
        end; elsewhere all travel together.
    process_set : ProcessSet, optional
        The ranks that reduce their gradients together; by default all. Other ranks apply their own.
    scale_local_gradients : bool, default True
        Whether gradients of `local_layers` are divided by the number of ranks.
    local_layers : keras.Layer or list of keras.Layer, optional
        Layers whose gradients stay on their rank. A rank that joins begins with those of the rank
        that holds the newest state.

    Returns
    -------
    keras.optimizers.Optimizer
        `optimizer`, with ``synchronize()`` besides its own methods.

    Raises
    ------
    NotInitialized
        ``init()`` has not been called.
    OptionError
        Keras has a back end, or a distribution, that does not fit.
    ValueError
        An argument has a value that it cannot have. The optimizer is as it was.
    """
    if num_groups:
        warnings.warn("num_groups is now called groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    options = KerasOptions(
        op=op,
        compression=compression,
        predivide=gradient_predivide_factor,
        passes=backward_passes_per_step,
        average_passes=average_aggregated_gradients,
        groups=groups or 0,
        sparse_as_dense=sparse_as_dense,
        local=local_layers,
        scale_local=scale_local_gradients,
        process_set=process_set,
    )
    if not all(isinstance(each, keras.layers.Layer) for each in options.local):
        raise ValueError("local_layers must be a layer, or a list of layers")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            f"DistributedOptimizer({optimizer!r}): must be an optimizer of Keras 3, such as "
            "keras.optimizers.Adam()"
        )
    if distribution_of(optimizer) is not None:
        raise ValueError("the optimizer is a DistributedOptimizer already")
    if hasattr(optimizer, "inner_optimizer") and keras.config.backend() == "jax":
        raise ValueError(
            "a LossScaleOptimizer cannot be distributed on the JAX back end, where it looks for "
            "infinities before gradients are reduced; use the policy mixed_bfloat16"
        )
    _wrap(optimizer, options)
    if name is not None:
        optimizer.name = name
    return optimizer


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Optimizer, name: str | None = None, *, local_layers: Any = None, **options: Any
) -> Optimizer:
    """Make a Keras optimizer reduce the gradients of all layers but `local_layers`.

    `options` are those of :func:`DistributedOptimizer`, by their names.
    """
    return DistributedOptimizer(optimizer, name, local_layers=local_layers, **options)


def _wrap(optimizer: Any, options: KerasOptions) -> Any:
    reduction = backend().reduction(options)
    optimizer.__class__ = with_methods_of(_ReducingOptimizer, type(optimizer), _options=options)
    object.__setattr__(optimizer, "_reduction", reduction)
    if optimizer.built:
        reduction.built(optimizer)
    return optimizer


def distribution_of(optimizer: object) -> Reduction | None:
    """Return the reduction of a distributed optimizer; None for others."""
    if isinstance(getattr(optimizer, "inner_optimizer", None), _ReducingOptimizer):
        raise ValueError(SCALED_OUTSIDE)
    return optimizer._reduction if isinstance(optimizer, _ReducingOptimizer) else None


_Base: Any = object  # in place of Keras' optimizer, which comes behind


class _ReducingOptimizer(_Base):  # type: ignore[misc]
    """Methods of a distributed optimizer; the first base of its class."""

    _reduction: Reduction
    _options: KerasOptions

    def build(self, variables: Sequence[Any]) -> None:
        super().build(variables)
        self._reduction.built(self)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        if not grads:
            return
        if not self.built:
            self.build(list(trainable_variables or ()))
        trained = self._trainable_variables if trainable_variables is None else trainable_variables
        self._reduction.apply(self, list(grads), list(trained), super().apply)

    def scale_loss(self, loss: Any) -> Any:
        self._reduction.before_backward()  # which follows
        return super().scale_loss(loss)

    def synchronize(self) -> None:
        """Wait for the reduced gradients; afterwards ``apply()`` does not. Torch back end only."""
        self._reduction.synchronize(self)

    @classmethod
    def from_config(cls, config: Any, custom_objects: Any = None) -> Any:
        more = {} if custom_objects is None else {"custom_objects": custom_objects}
        plain: Any = cls.__bases__[1]
        return _wrap(plain.from_config(config, **more), cls._options)


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type[Any]] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a model of Keras, and distribute its optimizer, which keeps its state.

    Parameters
    ----------
    filepath : str or path
        A file that ``model.save()`` has written, with or without a distributed optimizer.
    custom_optimizers : list of classes, optional
        Optimizers of your own that it may have.
    custom_objects : dict, optional
        As for ``keras.models.load_model``.
    compression : default Compression.none
        How gradients travel.
    legacy_opts : bool
        Ignored; for Horovod's signature.

    Returns
    -------
    keras.Model
        The model.
    """
    known = {each.__name__: each for each in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and distribution_of(optimizer) is None:
        DistributedOptimizer(optimizer, compression=compression)
    return model
