"""Progress of a Trainer: what a commit keeps beyond module and optimizers."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ProgressBar

from nbelastic.elastic.ranks.context import current
from nbelastic.trainers import plain_attributes

_LOGGED = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_OF_LOGGERS = ("_version", "_name", "_save_dir", "_root_dir")


class LightningProgress:
    """Progress of a Trainer, with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.begun = False  # callbacks know that training has begun
        self.in_epoch = False  # an epoch has begun, and not ended

    def show(self) -> None:
        """Show the bar of progress on rank 0, and on no other."""
        trainer = self._trainer
        for callback in trainer.callbacks:
            if not isinstance(callback, ProgressBar):
                continue
            if not trainer.is_global_zero:
                callback.disable()
            elif self.begun and getattr(callback, "is_disabled", False):
                callback.enable()
                callback.on_train_start(trainer, trainer.lightning_module)

    def state_dict(self) -> dict[str, Any]:
        """Return the progress."""
        trainer = self._trainer
        connector = trainer._logger_connector
        return {
            "loops": trainer.fit_loop.state_dict(),
            "callbacks": [
                {} if isinstance(each, ProgressBar) else plain_attributes(each)
                for each in trainer.callbacks
            ],
            "own": [_own_state(each) for each in trainer.callbacks],
            "loggers": [
                {name: vars(each)[name] for name in _OF_LOGGERS if name in vars(each)}
                for each in trainer.loggers
            ],
            "logged": {name: dict(getattr(connector, name)) for name in _LOGGED},
            "precision": trainer.precision_plugin.state_dict(),
            "should_stop": trainer.should_stop,
            "progress": (self.begun, self.in_epoch),
            "rank": _identity(),
            "metrics": [_metric_state(each) for each in self._metrics()],
        }

    def load_state_dict(self, found: dict[str, Any]) -> None:
        """Go back, or forward, to a progress."""
        trainer = self._trainer
        trainer.fit_loop.load_state_dict(found["loops"])
        trainer.fit_loop.restarting = False  # an epoch under way goes on by other means
        trainer.fit_loop.on_iteration_done()
        for callback, attributes, own in zip(
            trainer.callbacks, found["callbacks"], found["own"], strict=True
        ):
            vars(callback).update(attributes)
            if own:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    callback.load_state_dict(own)
        for logger, attributes in zip(trainer.loggers, found["loggers"], strict=True):
            vars(logger).update(attributes)
        for name, values in found["logged"].items():
            logged = getattr(trainer._logger_connector, name)
            logged.clear()
            logged.update(values)
        trainer.precision_plugin.load_state_dict(found["precision"])
        trainer.should_stop = found["should_stop"]
        self.begun, self.in_epoch = found["progress"]
        same = found["rank"] == _identity()
        for metric, state in zip(self._metrics(), found["metrics"], strict=False):
            # What another rank has counted is in its own metric: all are added up at the end.
            metric.reset()
            if same:
                for name, value in state.items():
                    setattr(metric, name, list(value) if isinstance(value, list) else value.clone())

    def _metrics(self) -> list[Any]:
        modules = self._trainer.lightning_module.modules()
        results = self._trainer.fit_loop.epoch_loop._results
        found = [each for each in modules if hasattr(each, "metric_state")]
        return found + [each for each in results.values() if hasattr(each, "metric_state")]


def _own_state(callback: Any) -> dict[str, Any]:
    """Return the state dict of a callback that has one of its own."""
    if type(callback).state_dict is Callback.state_dict:
        return {}
    with contextlib.suppress(Exception):  # a callback of a user's that is not set up yet
        return dict(callback.state_dict())
    return {}


def _metric_state(metric: Any) -> dict[str, Any]:
    with contextlib.suppress(Exception):
        return dict(metric.metric_state)
    return {}


def _identity() -> int:
    """Return the number of this rank's start, which no other rank of the job has."""
    spec = getattr(current(), "spec", None)
    return -1 if spec is None else int(spec.start)
