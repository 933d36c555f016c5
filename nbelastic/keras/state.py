"""State of training with Keras, and the elastic loop that restores the state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import keras
import torch

from nbelastic.data import Loader
from nbelastic.elastic import loop
from nbelastic.elastic.ranks.context import current
from nbelastic.elastic.state.state_payload import StatePayload
from nbelastic.elastic.training_checks import sample
from nbelastic.errors import OptionError, StateMismatch
from nbelastic.keras import backends
from nbelastic.keras.backends.torch import rates_of, variable_step
from nbelastic.keras.optimizer import distribution_of
from nbelastic.torch.ops.reductions import Average, grouped_allreduce
from nbelastic.torch.state.flatten import Adapter, Flattener, Unflattener
from nbelastic.torch.state.structure import Structure, word_for
from nbelastic.torch.state.torch_state import TorchState

P = ParamSpec("P")
R = TypeVar("R")
SEED = "seed_generator_state"  # name that Keras gives to the state of a seed generator


class VariablesAdapter(Adapter):
    """Capture and restoration of :class:`Variables`, in place."""

    def capture(self, flattener: Flattener, obj: Variables) -> list[tuple[str, torch.Tensor]]:
        return [(name, flattener.flatten(tensor)) for name, tensor in obj.tensors()]

    def restore(
        self, unflattener: Unflattener, obj: Variables, content: list[tuple[str, torch.Tensor]]
    ) -> None:
        if len(obj.variables) != len(content):
            raise StateMismatch(f"expected {len(obj.variables)} variables; came {len(content)}")
        if obj.backend.in_place:
            for (_, tensor), (_, captured) in zip(obj.tensors(), content, strict=True):
                unflattener.tensor(captured, tensor)
        else:  # what the variables have now may be gone: JAX gives it to a step
            values = [unflattener.tensor(captured) for _, captured in content]
            obj.backend.write(obj.variables, values)

    def parts(self, label: str, content: Any, names: dict[int, str]) -> Structure:
        for name, tensor in content:
            names.setdefault(id(tensor), f"{label}.{name}")
        return {("parameter", f"{label}.{name}"): word_for(tensor) for name, tensor in content}

    def state_dict(self, content: Any, *, whole: bool = False) -> dict[str, torch.Tensor]:
        return dict(content)


class Variables:
    """Variables of a model or an optimizer, all of which must exist by now, by their positions.

    Keras numbers names by the models that a process has made before (``dense_2``), so names differ
    between ranks. On the torch back end there may be tensors among them.
    """

    nbelastic_adapter = VariablesAdapter

    def __init__(self, variables: Sequence[Any], backend: backends.Backend) -> None:
        self.variables, self.backend = list(variables), backend

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return a name and a tensor for each variable."""
        names = [f"{n}.{each.name or 'buffer'}" for n, each in enumerate(self.variables)]
        return list(zip(names, self.backend.read(self.variables), strict=True))


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
    backend : None
        For Horovod's signature.
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

    _progress: Any = None  # of elastic.fit

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **values: Any
    ) -> None:
        if not getattr(model, "built", False):
            raise ValueError(
                "KerasState: the model is not built, so it has no variables yet. Give it an Input "
                "(keras.layers.Input(shape)), call it on a batch, or call model.build(shape)"
            )
        back = self._back = backends.backend()
        back.settle(model)
        optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        self._keras = {"model": model, "optimizer": optimizer}
        self._seeds = [each for each in model.variables if each.name == SEED]
        reduction: Any = distribution_of(optimizer)
        self._reduction = reduction
        part: Any = None
        variables = [*model.variables]
        if back.in_place:  # what an optimizer's step leaves alone, and buffers of PyTorch's modules
            variables += [*rates_of(optimizer), *model.buffers()]
        if optimizer is None:
            pass
        elif back.in_place:
            part = variable_step(optimizer) if reduction is None else reduction.step
        else:
            part = Variables(optimizer.variables, back)
        self._parts = {"model": Variables(variables, back), "optimizer": part}
        super().__init__(**self._parts, **values)
        self.__dict__.update(self._keras)

    def _add(self, **values: Any) -> None:
        """Add values that are not the user's, before the elastic loop."""
        self.__dict__.update(values)
        self._names = tuple(dict.fromkeys([*self._names, *values]))
        self.save()
        self._loaders = self._take_part_in_steps()
        self._built = self._commit.structure()

    # -- a state whose model and optimizer are Keras' ----------------------------------------------

    def _values(self) -> dict[str, Any]:
        return {**super()._values(), **self._parts}

    def restore(self) -> None:
        self._back.settle(self._keras["model"])
        super().restore()
        self.__dict__.update(self._keras)
        if self._reduction is not None:
            self._reduction.forget()

    def save(self) -> None:
        self._back.settle(self._keras["model"])
        super().save()

    def _take(self, values: dict[str, Any], owned: dict[int, Any], more: Sequence[Any]) -> None:
        super()._take(values, owned, more)
        self.__dict__.update(self._keras)

    def _unpack(self, payload: StatePayload) -> None:
        own = [each.clone() for each in self._back.read(self._seeds)]
        super()._unpack(payload)
        self._back.write(self._seeds, own)

    @property
    def accumulates(self) -> bool:
        """Whether a step is incomplete, so that a commit has to wait."""
        return self._reduction is not None and self._reduction.accumulates

    @property
    def deals_data(self) -> bool:
        """Whether the state has a sampler or a loader, so that data know the rest of the epoch."""
        return bool(self._samplers()) or bool(self._loaders)

    # -- what the elastic loop asks ----------------------------------------------------------------

    def _rates(self) -> list[float]:
        rates = self._back.read(rates_of(self._keras["optimizer"]))
        return [float(each) for each in rates]

    def _batch(self) -> int:
        own = self._progress is None or "batch" in self._names
        return super()._batch() if own else max(self._progress.batch - 1, 0)

    def _modules(self) -> list[torch.nn.Module]:
        return [self._keras["model"]] if self._back.in_place else []

    def _running_means(self) -> Iterable[torch.Tensor]:
        return self._back.read(self._moving_statistics())

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
        """Average moving statistics over ranks, because each rank's are of its own batches."""
        variables = self._moving_statistics()
        if not variables or current().size == 1:
            return
        values = self._back.read(variables)
        self._back.write(variables, grouped_allreduce(values, op=Average))

    def _sample(self) -> tuple[float, ...]:
        model, reduction = self._keras["model"], self._reduction
        local = set() if reduction is None else reduction.options.is_local()
        trained = [each for each in model.trainable_variables if id(each) not in local]
        if reduction is not None and reduction.options.process_set.process_set_id:
            trained = []  # each set of ranks trains a model of its own
        return sample(self._back.read(trained))

    def _take_part_in_steps(self) -> list[Loader]:
        loaders = super()._take_part_in_steps()
        if loaders and not self._back.in_place:
            raise OptionError(
                "a Loader deals micro-batches, whose gradients can only be summed exactly on the "
                f"torch back end; Keras has {keras.config.backend()}. "
                "Use hvd.elastic.ElasticDataset"
            )
        return loaders


def run(function: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Decorate a training function to survive changes of membership.

    As :func:`nbelastic.torch.elastic.run`. An error of an operation between ranks that TensorFlow
    or JAX has raised as one of its own is raised as what it was.

    Examples
    --------
    >>> @run  # doctest: +SKIP
    ... def train(state):
    ...     model.fit(data, initial_epoch=state.epoch, callbacks=callbacks)
    """

    @functools.wraps(function)
    def translated(state: Any, *args: Any, **kwargs: Any) -> Any:
        backends.raised()  # one that the function has handled by itself
        try:
            return function(state, *args, **kwargs)
        except Exception as error:
            hidden = backends.raised()
            if hidden is None or hidden is error:
                raise
            # JAX has given the memory of variables to the step that failed. What they were after
            # the last commit, or as the loop was entered, must be there before ranks meet again.
            state.restore()
            raise hidden from None

    return loop.run(translated)
