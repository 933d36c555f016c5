"""Progress of a Trainer: what a commit keeps beyond module and optimizers."""

from __future__ import annotations

import contextlib
import csv
import functools
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops.loop import _Loop

from nbelastic.elastic.ranks.context import current
from nbelastic.trainers.callbacks import Callbacks, ProgressAdapter

_LOGGED = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_OF_LOGGERS = (
    *("_version", "_name", "_save_dir", "_root_dir"),
    *("_id", "_run_id", "_experiment_id"),  # of the runs that all ranks go on with
)
_OF_METRICS = ("has_reset", "_update_count", "_forward_cache")


class BatchRecorder(Callback):
    """The first callback, to record batches as they begin, and samplers in checkpoints."""

    training: Any = None
    found: Sequence[Any] = ()  # of samplers, in the checkpoint that training goes on from

    def on_train_batch_start(self, *_: Any) -> None:
        """Record a batch. If it fails, the sampler goes back to its commit."""
        if self.training is not None:
            self.training.batch_begins()

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        del trainer, module
        if self.training is not None:
            checkpoint["nbelastic"] = [
                None if each is None else each.state_dict() for each in self.training.samplers
            ]

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        del trainer, module
        self.found = checkpoint.get("nbelastic", ())


def callbacks_of(trainer: Any) -> Callbacks:
    """Return the callbacks of a trainer, as they are before they are set up."""
    return Callbacks(
        lambda: [
            each for each in trainer.callbacks if not isinstance(each, (ProgressBar, BatchRecorder))
        ],
        begins_again=lambda each: not type(each).__module__.startswith("lightning."),
    )


class LightningProgress:
    """Progress of a Trainer."""

    nbelastic_adapter = ProgressAdapter

    def __init__(self, trainer: Any, callbacks: Callbacks) -> None:
        self._trainer = trainer
        self.callbacks = callbacks
        self.files = ModelFiles(trainer)
        self.begun = False  # callbacks know that training has begun
        self.in_epoch = False  # an epoch has begun, and not ended

    def show(self) -> None:
        """Show the bar of progress on rank 0, and continue files of metrics there."""
        trainer = self._trainer
        if trainer.is_global_zero and self.begun:
            for logger in trainer.loggers:
                if isinstance(logger, CSVLogger):
                    go_on_with_rows(logger, trainer.fit_loop.epoch_loop._batches_that_stepped)
        for callback in trainer.callbacks:
            if not isinstance(callback, ProgressBar):
                continue
            if not trainer.is_global_zero:
                callback.disable()
            elif self.begun and getattr(callback, "is_disabled", False):
                callback.enable()
                callback.on_train_start(trainer, trainer.lightning_module)

    def content(self) -> dict[str, Any]:
        """Return the progress."""
        trainer = self._trainer
        connector = trainer._logger_connector
        return {
            "loops": trainer.fit_loop.state_dict(),
            "callbacks": self.callbacks.content(),
            "own": [_own_state(each) for each in trainer.callbacks],
            "datamodule": {} if trainer.datamodule is None else trainer.datamodule.state_dict(),
            "loggers": [_settings_of(each) for each in trainer.loggers],
            "logged": {name: dict(getattr(connector, name)) for name in _LOGGED},
            "logging": (connector._current_fx, connector._first_loop_iter),
            "precision": trainer.precision_plugin.state_dict(),
            "should_stop": trainer.should_stop,
            "progress": (self.begun, self.in_epoch),
            "rank": _identity(),
            "metrics": [_metric_state(each) for each in self._metrics()],
            "results": {name: _metric_state(each) for name, each in self._results().items()},
        }

    def take(self, found: dict[str, Any], *, own: bool) -> None:
        """Go back, or forward, to a progress."""
        trainer = self._trainer
        connector = trainer._logger_connector
        trainer.fit_loop.load_state_dict(found["loops"])
        settle(trainer.fit_loop)  # an epoch under way goes on by other means
        files = self.files.known()
        self.callbacks.take(found["callbacks"], own=own)
        for callback, state in zip(trainer.callbacks, found["own"], strict=True):
            if state:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    callback.load_state_dict(state)
                if isinstance(callback, StochasticWeightAveraging):
                    self._follow(callback, state["scheduler_state"])
        self.files.taken_back |= files - self.files.known()
        if found["datamodule"] and trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(found["datamodule"])
        for logger, attributes in zip(trainer.loggers, found["loggers"], strict=True):
            vars(logger).update(attributes)
            if attributes.get("_id") and hasattr(logger, "_wandb_init"):
                logger._wandb_init["id"] = attributes["_id"]
        for name, values in found["logged"].items():
            logged = getattr(connector, name)
            logged.clear()
            logged.update(values)
        trainer.precision_plugin.load_state_dict(found["precision"])
        trainer.should_stop = found["should_stop"]
        self.begun, self.in_epoch = found["progress"]
        connector._current_fx, connector._first_loop_iter = found["logging"]
        trainer.lightning_module._current_fx_name = None  # of a hook that has failed
        trainer.fit_loop.epoch_loop.val_loop._results.clear()  # a validation begins again
        # What another rank has counted is in its own metric: all are added up at the end.
        same = found["rank"] == _identity()
        for metric, state in zip(self._metrics(), found["metrics"], strict=False):
            _restore(metric, state if same else {})
        results = self._results()
        for name in [*results]:
            if same and name in found["results"]:
                _restore(results[name], found["results"][name])
            else:
                del results[name]

    def _follow(self, averaging: Any, state: Any) -> None:
        """Give an averaging callback the schedule of the commit's rank."""
        trainer = self._trainer
        if state is not None and averaging._swa_scheduler is not None:
            averaging._swa_scheduler.load_state_dict(state)
        elif state is not None:  # on a rank that has joined since
            groups = [group for each in trainer.optimizers for group in each.param_groups]
            rates = [{n: v for n, v in group.items() if n != "params"} for group in groups]
            latest, averaging._latest_update_epoch = averaging._latest_update_epoch, math.inf
            averaging._initialized = False
            averaging.on_train_epoch_start(trainer, trainer.lightning_module)
            averaging._latest_update_epoch = latest
            for group, values in zip(groups, rates, strict=True):
                group.update(values)

    def _metrics(self) -> list[Any]:
        modules = self._trainer.lightning_module.modules()
        return [each for each in modules if hasattr(each, "metric_state")]

    def _results(self) -> dict[str, Any]:
        results: dict[str, Any] = self._trainer.fit_loop.epoch_loop._results
        return results


class ModelFiles:
    """Files of ``ModelCheckpoint``, written in a failed step.

    Where the step is repeated, they are written again, under the same names. Those that are not are
    removed at the next commit.
    """

    def __init__(self, trainer: Any) -> None:
        callbacks = trainer.checkpoint_callbacks
        self._trainer = trainer
        self._callbacks = [each for each in callbacks if isinstance(each, ModelCheckpoint)]
        self.taken_back: set[str] = set()
        for each in self._callbacks:
            vars(each)["file_exists"] = functools.partial(self._exists, each)

    def known(self) -> set[str]:
        """Return the paths that callbacks know of."""
        found: set[str] = set()
        for each in self._callbacks:
            found.update((each.last_model_path, each.best_model_path, *each.best_k_models))
        return found - {""}

    def _exists(self, callback: Any, path: str, trainer: Any) -> bool:
        mine = trainer.is_global_zero and path not in self.taken_back and callback._fs.exists(path)
        return bool(trainer.strategy.reduce_boolean_decision(mine, all=False))

    def committed(self) -> None:
        """Remove files written in a failed step, and not written again."""
        for path in self.taken_back - self.known() if self.taken_back else ():
            self._trainer.strategy.remove_checkpoint(path)
        self.taken_back = set()

    def close(self) -> None:
        """Give callbacks their own methods back."""
        for each in self._callbacks:
            vars(each).pop("file_exists", None)


def go_on_with_rows(logger: Any, step: int) -> None:
    """Continue a file of metrics on rank 0, without rows of steps that a failure has taken back."""
    path = Path(logger.log_dir) / "metrics.csv"
    rows: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    writer = logger.experiment  # it may remove the file
    names = list(rows[0]) if rows else []
    for each in (writer.metrics, rows):
        while each and str(each[-1]["step"]).isdigit() and int(each[-1]["step"]) >= step:
            each.pop()
        if each:
            break
    path.unlink(missing_ok=True)
    if rows:
        writer.metrics_keys = names
        with path.open("w", newline="") as file:
            out = csv.DictWriter(file, names)
            out.writeheader()
            out.writerows(rows)


def settle(loop: Any) -> None:
    """Clear the restart flags of a loop and of its inner loops."""
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    loop.reset_restart_stage()
    for each in vars(loop).values():
        if isinstance(each, _Loop):
            settle(each)


def _settings_of(logger: Any) -> dict[str, Any]:
    found = {name: vars(logger)[name] for name in _OF_LOGGERS if name in vars(logger)}
    if hasattr(logger, "_wandb_init"):
        found["_id"] = logger.version
    return found


def _own_state(callback: Any) -> dict[str, Any]:
    """Return the state dict of a callback that overrides ``state_dict``."""
    if type(callback).state_dict is Callback.state_dict:
        return {}
    with contextlib.suppress(Exception):  # a callback of a user's that is not set up yet
        return dict(callback.state_dict())
    return {}


def _metric_state(metric: Any) -> dict[str, Any]:
    with contextlib.suppress(Exception):
        kept = {name: vars(metric)[name] for name in _OF_METRICS if name in vars(metric)}
        return {**metric.metric_state, **kept}
    return {}


def _restore(metric: Any, state: dict[str, Any]) -> None:
    metric.reset()
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            value = value.clone()  # noqa: PLW2901 - metrics add to it in place
        setattr(metric, name, list(value) if isinstance(value, list) else value)


def _identity() -> int:
    """Return the number of this rank's start, which no other rank of the job has."""
    spec = getattr(current(), "spec", None)
    return -1 if spec is None else int(spec.start)
