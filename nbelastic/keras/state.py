"""State of training with Keras."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import torch

from nbelastic.data import Loader
from nbelastic.elastic.parameter_samples import sampler_of
from nbelastic.elastic.ranks.context import current, current_or_none
from nbelastic.elastic.ranks.session import warn
from nbelastic.errors import OptionError
from nbelastic.keras.backends import backend
from nbelastic.keras.backends.torch import rates_of, variable_step
from nbelastic.keras.callbacks.progress import FitProgress
from nbelastic.keras.optimizer import distribution_of, is_distributed, settle_scaling
from nbelastic.keras.variables import Variables
from nbelastic.torch.ops.reductions import Average, grouped_allreduce
from nbelastic.torch.state.torch_state import TorchState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nbelastic.elastic.state.state_payload import StatePayload

SEED = "seed_generator_state"
"""Name that Keras gives to the state of a seed generator."""


class KerasState(TorchState):
    """State of training with a Keras model: variables, optimizer, callbacks, and values.

    A commit keeps all variables of the model and of the optimizer. On the torch back end it costs
    no copies right after a step. A synchronisation sends all of it, except the seeds of random
    layers (``Dropout``), which each rank has for itself.

    With :func:`nbelastic.keras.elastic.fit`, epoch and batch, data, metrics and callbacks belong to
    it, too.

    Parameters
    ----------
    model : keras.Model
        A model that is built: that has been given the shape of its inputs.
    optimizer : keras.optimizers.Optimizer, optional
        By default the one that the model was compiled with. It is built here, if it was not.
    **values
        Further values, as for :class:`~nbelastic.torch.elastic.TorchState`.

    Raises
    ------
    ValueError
        The model is not built.

    Examples
    --------
    >>> state = KerasState(model, epoch=0, batch=0)  # doctest: +SKIP
    """

    def __init__(self, model: Any, optimizer: Any = None, **values: Any) -> None:
        if not getattr(model, "built", False):
            raise ValueError(
                "KerasState: the model is not built, so it has no variables yet. Give it an Input "
                "(keras.layers.Input(shape)), call it on a batch, or call model.build(shape)"
            )
        back = backend()
        back.settle(model)
        settle_scaling(model)
        warning, context = back.prepare(model), current_or_none()
        if warning and context is not None:
            warn(context, warning)
        optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        self._back = back
        self._keras = {"model": model, "optimizer": optimizer}
        progress = self._progress = FitProgress(() if optimizer is None else rates_of(optimizer))
        parts = {
            "model": Variables(model.variables, back, _buffers_of(model)),
            "optimizer": self._part_of_optimizer(optimizer),
        }
        self._parts = parts
        super().__init__(**parts, **values)
        self._add("_progress", progress)
        self.__dict__.update(self._keras)

    def _part_of_optimizer(self, optimizer: Any) -> Any:
        if optimizer is None:
            return None
        if not self._back.in_place:
            return Variables(optimizer.variables, self._back)
        reduction: Any = distribution_of(optimizer)
        return variable_step(optimizer, None, None) if reduction is None else reduction.step

    def _add(self, name: str, value: Any) -> None:
        """Add a value that is not the user's, before the elastic loop."""
        setattr(self, name, value)
        self._first = {**self._first, name: value}
        if name not in self._names:
            self._names += (name,)
        self.save()
        self._loaders = self._take_part_in_steps()
        self._built = self._structure()

    # -- a state whose model and optimizer are Keras' ----------------------------------------------

    def _values(self) -> dict[str, Any]:
        return {**super()._values(), **self._parts}

    def restore(self) -> None:
        self._back.settle(self._keras["model"])
        super().restore()
        self.__dict__.update(self._keras)
        for reduction in self._reductions():
            reduction.forget()

    def save(self) -> None:
        self._back.settle(self._keras["model"])
        super().save()

    def _take(self, values: dict[str, Any], owned: dict[int, Any], more: Sequence[Any]) -> None:
        super()._take(values, owned, more)
        self.__dict__.update(self._keras)

    def _unpack(self, payload: StatePayload) -> None:
        seeds = [each for each in self._keras["model"].variables if each.name == SEED]
        own = [each.clone() for each in self._back.read(seeds)]
        super()._unpack(payload)
        if seeds:
            self._back.write(seeds, own)

    def _reductions(self) -> list[Any]:
        found = distribution_of(self._keras["optimizer"])
        return [] if found is None else [found]

    @property
    def accumulates(self) -> bool:
        """Whether the batches of one step are not all done, so that there is nothing to commit."""
        return any(each.accumulates for each in self._reductions())

    @property
    def deals_data(self) -> bool:
        """Whether a sampler or a loader is part of it, so that data know what is left."""
        return bool(self._samplers()) or bool(self._loaders)

    # -- what the elastic loop asks ----------------------------------------------------------------

    def on_reset(self) -> None:
        """Run :meth:`reset` and the reset callbacks.

        Raises
        ------
        OptionError
            A callback has changed the learning rate, though a loader keeps the batch as it is.
        """
        before = self._progress.content()["rates"]
        super().on_reset()
        if self._loaders and before != self._progress.content()["rates"]:
            raise OptionError(
                "a reset callback changes the learning rate, and the data are a Loader: its batch "
                "is the same for every number of ranks, so the rate is right as it is. Remove the "
                "callback"
            )

    def _batch(self) -> int:
        return super()._batch() if "batch" in self._names else max(self._progress.batch - 1, 0)

    def _modules(self) -> list[torch.nn.Module]:
        model = self._keras["model"]
        return [model] if isinstance(model, torch.nn.Module) else []

    def _moving_values(self) -> dict[str, object]:
        return {}

    def _running_means(self) -> Iterable[torch.Tensor]:
        return self._back.read(self._moving_statistics()) if self._back.in_place else ()

    def _moving_statistics(self) -> list[Any]:
        """Return the variables of batch normalisation that move with each batch."""
        return [
            each
            for layer in self._keras["model"]._flatten_layers()
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
            for each in layer.non_trainable_variables
            if each.name.startswith("moving_")
        ]

    def average_statistics(self) -> None:
        """Average moving statistics, of which each rank has those of its own batches.

        All ranks call this together.
        """
        variables = self._moving_statistics()
        if not variables or current().size == 1:
            return
        values = self._back.read(variables)
        self._back.write(variables, grouped_allreduce(values, op=Average))

    def _sample(self) -> tuple[tuple[float, ...], tuple[str, ...]]:
        model, optimizer = self._keras["model"], self._keras["optimizer"]
        reduction = distribution_of(optimizer)
        local = set() if reduction is None else reduction.options.is_local()
        trained = [each for each in model.trainable_variables if id(each) not in local]
        if reduction is not None and not reduction.options.is_global:
            trained = []  # each set of ranks trains a model of its own
        named = zip((each.path for each in trained), self._back.read(trained), strict=True)
        plain = [] if optimizer is None or is_distributed(optimizer) else [type(optimizer).__name__]
        return sampler_of(named)(), tuple(plain)

    def _take_part_in_steps(self) -> list[Loader]:
        loaders = super()._take_part_in_steps()
        if loaders and not self._back.in_place:
            raise OptionError(
                f"a Loader deals micro-batches, whose gradients can only be summed exactly on the "
                f"torch back end; Keras has {self._back.name}. Use hvd.elastic.ElasticDataset"
            )
        return loaders


def _buffers_of(model: Any) -> Sequence[torch.Tensor]:
    """Return the buffers of PyTorch's modules in a model."""
    return [*model.buffers()] if isinstance(model, torch.nn.Module) else ()
