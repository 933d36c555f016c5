"""``elastic.fit``: Keras' ``fit`` in an elastic loop."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import torch

from nbelastic.collectives import Op
from nbelastic.data import Loader
from nbelastic.elastic.ranks.context import current, rank
from nbelastic.errors import OptionError
from nbelastic.keras.backends import backend
from nbelastic.keras.callbacks.fit_callbacks import (
    FitProgress,
    OnRankZero,
    RankZeroModel,
    is_keras,
    make_callbacks,
)
from nbelastic.keras.feeds import Feed, check_counts, feed_of, shard_of, split_off
from nbelastic.keras.optimizer import distribution_of
from nbelastic.keras.state import KerasState, run
from nbelastic.trainers.callbacks import report_logs

NOT_DISTRIBUTED = (
    "elastic.fit: the model was compiled with {kind}, whose gradients are not averaged over ranks: "
    "each rank would train a model of its own. Write "
    "model.compile(hvd.DistributedOptimizer(keras.optimizers.{kind}(…)), …)"
)

SEVERAL = (
    "elastic.fit: the model has optimizers of its own (model.{name}), and elastic.fit trains by "
    "that of model.compile() alone. Write the loop yourself, under hvd.elastic.run; in TensorFlow "
    "with hvd.DistributedGradientTape and a TensorFlowState of all variables"
)


def fit(
    state: KerasState,
    data: Any = None,
    y: Any = None,
    *,
    epochs: int = 1,
    batch_size: int | None = None,
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Collection[int] = 1,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    sample_weight: Any = None,
    class_weight: Any = None,
    shuffle: bool = True,
    seed: int = 0,
    verbose: int | str = "auto",
    batches_per_commit: int = 1,
) -> Any:
    """Train a Keras model as ``model.fit`` does, on ranks that come and go.

    Each sample goes into the model once per epoch, whichever ranks fail, leave and join. Epochs
    that are done, and the part of an epoch that is done, are not repeated. What callbacks keep in
    plain attributes (``EarlyStopping.wait``, ``ReduceLROnPlateau.best``, ``History.history``) and
    the sums of metrics belong to the state: a failure takes them back to the last commit with the
    rest, and a rank that joins receives them. Callbacks run on all ranks, with the same logs at the
    end of an epoch; ``ModelCheckpoint``, the progress bar, ``CSVLogger`` and ``TensorBoard`` write
    on the rank that is rank 0 at the time.

    Parameters
    ----------
    state : KerasState
        The model, compiled with a :func:`~nbelastic.keras.DistributedOptimizer`.
    data : arrays, ElasticDataset, DataLoader with an ElasticSampler, or Loader
        The same on all ranks. With a :class:`~nbelastic.data.Loader` the batch does not depend on
        the number of ranks (torch back end).
    y, sample_weight : arrays, optional
        Targets and weights, if `data` are arrays.
    epochs, validation_split, validation_batch_size, validation_freq
        As in Keras.
    batch_size : int, default 32
        Samples of a batch of each rank, if `data` are arrays.
    callbacks : list of keras.callbacks.Callback, optional
        Made by the function on each rank alike.
    validation_data : arrays, DataLoader, PyDataset or tf.data.Dataset, optional
        Each rank evaluates a part; metrics are those of all samples.
    validation_steps : int, optional
        Number of batches to evaluate, of all ranks together.
    initial_epoch : int, default 0
        Number of the first epoch, unless the state is further.
    steps_per_epoch : int, optional
        Number of batches of each rank in an epoch; the next epoch goes on in the data. By default
        an epoch has all data once. Not with a Loader.
    class_weight : dict, optional
        As in Keras, for arrays and ElasticDataset.
    shuffle : bool, default True
        Whether to shuffle arrays, differently in each epoch.
    seed : int, default 0
        Of the shuffling; the same on all ranks.
    verbose : {"auto", 0, 1, 2}
        A progress bar (1), or a line for each epoch (2, "auto"), of rank 0.
    batches_per_commit : int, default 1
        Batches from one commit to the next.

    Returns
    -------
    keras.callbacks.History
        The same on all ranks.

    Raises
    ------
    OptionError
        An argument cannot be used, with what to do instead.
    """
    if validation_split:
        data, y, sample_weight, rest = split_off(validation_split, data, y, sample_weight)
        validation_data = rest if validation_data is None else validation_data
    feed = feed_of(data, y, sample_weight, batch_size=batch_size, shuffle=shuffle, seed=seed)
    check_counts(
        "elastic.fit",
        epochs=epochs,
        batches_per_commit=batches_per_commit,
        steps_per_epoch=steps_per_epoch,
        validation_steps=validation_steps,
        validation_freq=validation_freq if isinstance(validation_freq, int) else None,
    )
    options = SimpleNamespace(
        epochs=epochs,
        initial_epoch=initial_epoch,
        steps=steps_per_epoch,
        validation_data=validation_data,
        validation_limits=(validation_batch_size or batch_size or 32, validation_steps),
        validation_freq=validation_freq,
        class_weight=class_weight,
        verbose=2 if verbose == "auto" else verbose,
        batches_per_commit=batches_per_commit,
    )
    return _Training(state, feed, make_callbacks(callbacks, verbose), options).run()


class _Training(keras.callbacks.CallbackList):  # type: ignore[misc]
    """A training by ``elastic.fit`` on this rank, as the list of callbacks that Keras calls.

    Keras' ``fit`` is called for each part of an epoch. What it says of beginnings and ends of
    trainings and epochs is not passed on: callbacks are told each once, in however many calls.
    """

    def __init__(
        self, state: KerasState, feed: Feed, callbacks: list[Any], options: SimpleNamespace
    ) -> None:
        if not isinstance(state, KerasState):
            raise OptionError(
                f"elastic.fit({type(state).__name__}, …): must be a KerasState, as in "
                "hvd.elastic.fit(hvd.elastic.KerasState(model), x, y)"
            )
        model = state.model
        if not getattr(model, "compiled", False):
            raise OptionError("elastic.fit: the model is not compiled; call model.compile() before")
        for name, value in vars(model).items():
            for each in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(each, keras.optimizers.Optimizer) and each is not model.optimizer:
                    raise OptionError(SEVERAL.format(name=name))
        self._reduction: Any = distribution_of(model.optimizer)
        if self._reduction is None:
            raise OptionError(NOT_DISTRIBUTED.format(kind=type(model.optimizer).__name__))
        if options.class_weight is not None and not isinstance(feed.source, keras.utils.PyDataset):
            raise OptionError("elastic.fit(class_weight=…): only for arrays and ElasticDataset")
        self._by_loader = isinstance(feed.part, Loader)
        if options.steps is not None and self._by_loader:
            raise OptionError(
                "elastic.fit(Loader, steps_per_epoch=…): an epoch of a Loader has all rows once; "
                "leave steps_per_epoch out"
            )
        self._state, self._feed, self._options = state, feed, options
        self._back = backend()
        self._since_commit = 0
        self._first = 0  # number in the epoch of the first batch of this call of fit
        self._stops = False
        self._logs: dict[str, Any] = {}
        super().__init__(callbacks, add_history=True)
        self._async_train = self._async_test = False  # batches are committed in their order
        self._model, model.history = model, self._history
        for each in self.callbacks:
            saves = isinstance(each, keras.callbacks.ModelCheckpoint)
            each.set_model(RankZeroModel(model) if saves else model)
        batches = options.steps or feed.deal(feed.part.epoch)
        self.set_params({"verbose": options.verbose, "epochs": options.epochs, "steps": batches})
        self._progress = FitProgress(self.callbacks, options.initial_epoch)
        state._add(_rows=feed.part, _progress=self._progress)
        state.set_total(epoch=options.epochs, batch=batches or 0)
        if not self._back.in_place:
            self._compile()

    def _compile(self) -> None:
        """Make a step and roll back, so that Keras compiles before other ranks wait."""
        self._reduction.dry = True
        try:
            self._model.train_on_batch(*self._sample())
        finally:
            self._reduction.dry = False
            self._state.restore()
            self._model.reset_metrics()

    def _sample(self) -> Any:
        return _as_tuple(self._feed.sample())

    def run(self) -> Any:
        """Train in the elastic loop; return the history."""
        model, reduction = self._model, self._reduction
        # Metrics are summed over ranks between gradients and update: a failure there leaves the
        # last commit as it is, so commits need no copies. A train_step of the user's may go on with
        # the updated model, and so cannot wait for the update: its commits follow the sum, and are
        # copied.
        own_step = type(model).train_step is not keras.Model.train_step
        reduction.defers = self._back.in_place and not own_step and not self._by_loader
        function = model.train_function
        if self._by_loader:
            model.train_function = self._train_on_step
        try:
            run(lambda _: self._train())(self._state)
        finally:
            reduction.defers = False
            if self._by_loader:
                model.train_function = function
        return self._history

    # -- the loop --------------------------------------------------------------------------------

    def _train(self) -> None:
        """Train what is left; called again after each change of membership."""
        progress = self._progress
        self._reduction.forget()
        self._stops, self._since_commit = False, 0
        progress.callbacks.begin(rank() == 0, self._begin)
        for each in self.callbacks:
            if isinstance(each, OnRankZero):
                each.goes_on(progress.epoch, progress.metrics is not None)
        while progress.epoch < self._options.epochs and not progress.ended:
            self._train_epoch()
        self._model.optimizer.finalize_variable_values(self._model.trainable_variables)
        for each in self.callbacks:
            each.on_train_end(self._logs)

    def _begin(self, again: bool, goes_on: bool) -> None:
        """Tell callbacks of the training's begin; if `again`, only the user's own, for rank 0."""
        for each in self.callbacks:
            if not again or not (is_keras(each) or isinstance(each, OnRankZero)):
                each.on_train_begin({})

    def _train_epoch(self) -> None:
        """Train the rest of an epoch, and end the epoch."""
        progress, epoch, steps = self._progress, self._progress.epoch, self._options.steps
        self._place()
        while True:  # with steps_per_epoch, data may end and begin again in an epoch
            left = self._feed.deal(epoch if steps is None else None)
            if steps is not None:
                left = min(left or 0, steps - progress.batch)
            if left == 0 or self._by_loader:
                self._build_metrics()
            if left == 0:  # the last commit was that of its last batch
                self._model.reset_metrics()
                self.on_epoch_begin(epoch)
            else:
                total = None if left is None else progress.batch + left
                self.set_params({**self.params, "steps": total})
                self._fit(epoch, None if steps is None else left)
            if steps is None or progress.batch >= steps or self._exchange():
                break
        self._end_epoch(epoch)

    def _build_metrics(self) -> None:
        """Build metrics and loss where Keras' ``fit`` does not.

        It would take a step of micro-batches for a batch, and is not called on a rank that joins
        where only the epoch's end is left.
        """
        compiled = getattr(self._model, "_compile_metrics", None)
        if compiled is None or not compiled.built:
            self._model.test_on_batch(*self._sample())

    def _fit(self, epoch: int, steps: int | None) -> None:
        # The training goes on afterwards, so that no values are final.
        optimizer = self._model.optimizer
        optimizer.finalize_variable_values = lambda _: None
        with warnings.catch_warnings():
            # Of data whose length is not known, Keras complains that they end.
            warnings.filterwarnings("ignore", "Your input ran out of data", UserWarning)
            try:
                self._model.fit(
                    self._feed.source,
                    initial_epoch=epoch,
                    epochs=epoch + 1,
                    steps_per_epoch=steps,
                    callbacks=self,
                    class_weight=self._options.class_weight,
                    shuffle=False,
                    verbose=0,
                )
            finally:
                del optimizer.finalize_variable_values
                self._feed.close()

    def _end_epoch(self, epoch: int) -> None:
        """Validate, tell callbacks, and commit the end of the epoch."""
        progress, model, options = self._progress, self._model, self._options
        self._exchange()
        self._reduction.complete()
        logs = _floats(model.get_metrics_result())
        if not self._by_loader:  # its micro-batches do that in each step
            self._state.average_statistics()
        freq = options.validation_freq
        now = (epoch + 1) % freq == 0 if isinstance(freq, int) else epoch + 1 in freq
        if options.validation_data is not None and now:
            logs.update({f"val_{name}": each for name, each in self._validate().items()})
        model.stop_training = False
        super().on_epoch_end(epoch, logs)
        self._stops |= model.stop_training
        self._logs = logs
        report_logs(logs, epoch)
        progress.ended = model.stop_training = self._exchange()
        progress.epoch, progress.batch, progress.metrics = epoch + 1, 0, None
        if options.steps is None:
            self._feed.deal(epoch + 1)
        self._place()
        self._since_commit = 0
        self._state.commit()

    def _place(self) -> None:
        """Give the user's own counters their values."""
        for name in {"epoch", "batch"} & {*self._state._names}:
            setattr(self._state, name, getattr(self._progress, name))

    def _validate(self) -> dict[str, Any]:
        """Evaluate this rank's part, and return the metrics of all parts."""
        part = shard_of(self._options.validation_data, *self._options.validation_limits)
        self._model.reset_metrics()
        if part is not None:
            self.set_params(self.params)
            self._model.evaluate(part, callbacks=self, verbose=0, return_dict=True)
        self._sum(None, stop=False)
        return _floats(self._model.get_metrics_result())

    # -- what Keras' fit says ----------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:
        self._on_begin()
        self._first = self._progress.batch

    def on_train_end(self, logs: Any = None) -> None:
        self._on_end()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin an epoch, or go on in one with its earlier metrics, which ``fit`` has reset."""
        known, present = self._progress.metrics, self._metrics()
        if known is not None and known.size == present.numel():
            self._write(torch.from_numpy(known))
            present = self._metrics()
        self._progress.metrics = present.numpy()
        if known is None:
            super().on_epoch_begin(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        pass  # the epoch ends after its validation

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_begin(self._first + batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """End one batch, or those of an execution: sum metrics, update, tell callbacks, commit."""
        progress = self._progress
        done = range(progress.batch - self._first, batch + 1)
        self._since_commit += len(done)
        due = self._since_commit >= self._options.batches_per_commit
        commits = due and not self._reduction.accumulates
        stops = commits and self._exchange()
        self._reduction.complete()
        super().on_train_batch_end(self._first + batch, logs)
        self._stops |= self._model.stop_training  # all ranks do so at the next commit
        self._feed.record(done)
        progress.batch += len(done)
        self._place()
        if commits:
            self._since_commit = 0
            self._state.commit()
        # All ranks end the epoch after the same batch, whichever asked for it.
        self._model.stop_training = stops

    # -- steps of a loader -----------------------------------------------------------------------

    def _train_on_step(self, data: Any) -> Any:
        """Train on the micro-batches of a step; Keras calls this for a batch."""
        logs: Any = {}
        for batch in data[0]:
            self._seed()
            logs = self._model.train_step(_as_tuple(batch))
        self._seed()
        self._reduction.complete()
        return logs

    def _seed(self) -> None:
        """Seed Keras' random layers from PyTorch's generator, which the loader has just seeded."""
        with torch.no_grad():
            for each in self._state._seeds:
                each.value.copy_(torch.randint(0, 2**31 - 1, each.value.shape))

    # -- metrics of all ranks ----------------------------------------------------------------------

    # Metrics are sums: their variables are ``total``, ``count``. Each rank adds what it has added
    # since the last exchange, so no sample is lost with its rank.

    def _sums(self) -> list[Any]:
        """Return the variables of metrics, which exist once the model has seen a batch."""
        variables = self._model.metrics_variables
        return [each for each in variables if getattr(each, "aggregation", "sum") == "sum"]

    def _metrics(self) -> torch.Tensor:
        values = self._back.read(self._sums())
        flat = [each.detach().reshape(-1).to("cpu", torch.float64) for each in values]
        return torch.cat(flat) if flat else torch.zeros(0, dtype=torch.float64)

    def _write(self, flat: torch.Tensor) -> None:
        variables = self._sums()
        parts = torch.split(flat, [math.prod(each.shape) for each in variables])
        shaped = [p.reshape(tuple(v.shape)) for p, v in zip(parts, variables, strict=True)]
        self._back.write(variables, shaped)

    def _exchange(self) -> bool:
        """Sum metrics over ranks; return whether a callback on any of them stops the training."""
        self._stops = self._sum(self._progress.metrics, stop=self._stops)
        self._progress.metrics = self._metrics().numpy()  # rounded as the variables are
        return self._stops

    def _sum(self, known: np.ndarray[Any, Any] | None, *, stop: bool) -> bool:
        """Add up over all ranks what was added to `known` sums; return whether any has `stop`."""
        self._back.settle(self._model)
        context, present = current(), self._metrics()
        before = torch.zeros_like(present) if known is None else torch.from_numpy(known)
        flags = torch.tensor([float(stop), float(context.change_flag())], dtype=torch.float64)
        flat = torch.cat([present - before, flags])
        communicator = context.communicator()
        if communicator.size > 1:
            communicator.current_operation = "the sum of Keras' metrics"
            communicator.allreduce(flat, Op.SUM)
            self._write(before + flat[:-2])
        stops, changes = flat[-2:].tolist()
        context.agree(bool(changes))
        return bool(stops)


def _as_tuple(batch: Any) -> Any:
    return tuple(batch) if isinstance(batch, list) else batch


def _floats(logs: Any) -> dict[str, Any]:
    """Return logs with numbers of Python."""
    sizes = {name: math.prod(getattr(each, "shape", ())) for name, each in logs.items()}
    return {name: float(each) if sizes[name] == 1 else each for name, each in logs.items()}
