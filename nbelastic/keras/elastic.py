"""Elastic training with Keras: Horovod's ``hvd.elastic``, and :func:`fit`."""

from __future__ import annotations

from typing import Any

import keras

from nbelastic.data import Batch, Dask, Loader, Parquet, Shards, Stateful
from nbelastic.elastic.state import ObjectState, State
from nbelastic.keras.callbacks.fit_callbacks import OnRankZero
from nbelastic.keras.feeds import ElasticDataset
from nbelastic.keras.fit import fit
from nbelastic.keras.state import KerasState, run
from nbelastic.torch.elastic import ElasticSampler
from nbelastic.trainers.callbacks import report_logs

__all__ = [
    "Batch",
    "CommitStateCallback",
    "Dask",
    "ElasticDataset",
    "ElasticSampler",
    "KerasState",
    "Loader",
    "ObjectState",
    "OnRankZero",
    "Parquet",
    "Shards",
    "State",
    "Stateful",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "fit",
    "run",
]


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commit a state every few batches, and at the end of each epoch.

    The batches of one ``backward_passes_per_step`` are committed together, after the last.

    Parameters
    ----------
    state : KerasState
        The state.
    batches_per_commit : int, default 1
        Batches from one commit to the next.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise ValueError(f"batches_per_commit must be at least 1, not {batches_per_commit}")
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches_remaining -= 1
        if self.batches_remaining <= 0:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        report_logs(logs or {}, epoch)
        self._commit()

    def _commit(self) -> None:
        if not self.state.accumulates:
            self.batches_remaining = self.batches_per_commit
            self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keep the number of batches that are done in a state's ``batch``; 0 at the end of an epoch.

    When ``fit`` is called again in the middle of an epoch, that epoch ends after the batches that
    are left of its ``steps``. Where a sampler or a loader is part of the state, the data know by
    themselves what is left. Put this callback before others that set ``model.stop_training``: it
    ends that epoch so.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._done = 0
        self._ends_epoch = False

    def on_train_begin(self, logs: Any = None) -> None:
        self._done = self.state.batch
        self._ends_epoch = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = self._done + batch + 1
        steps = (self.params or {}).get("steps")
        if self._done and steps and not self.state.deals_data and self.state.batch >= steps:
            self._ends_epoch = self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = self._done = 0
        if self._ends_epoch:
            self._ends_epoch = self.model.stop_training = False


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keep the number of epochs that are done in a state's ``epoch``.

    Both of Horovod's ways work: ``fit(initial_epoch=state.epoch, epochs=n)``, and
    ``fit(epochs=n - state.epoch)``, which numbers the epochs from 0 again.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._shift: int | None = None  # from the numbers of fit to the state's

    def on_train_begin(self, logs: Any = None) -> None:
        self._shift = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._shift is None:
            self._shift = self.state.epoch - epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = epoch + (self._shift or 0) + 1
