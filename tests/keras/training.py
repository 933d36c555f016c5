"""A training by ``elastic.fit`` that does harm where it is told to, and tells what came of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.training import Fault, once

SAMPLES, BATCH = 96, 8


@dataclass(frozen=True)
class Training:
    """A training, and what ranks do to themselves, once.

    Before a batch a rank is killed (``kill``), or waits until the membership is ``whole``,
    of three ranks, which it is after this batch. After the batch it may ``stop`` the training, or
    ``wait`` for a change of the membership. At the ``end`` of the epoch it is killed.
    """

    marks: Path  # an empty directory that all workers see
    faults: tuple[Fault, ...] = ()
    epochs: int = 4
    loader: bool = False  # the data are a Loader with an exact batch
    patience: int = 2
    own_step: bool = False
    loads: bool = False  # they are a DataLoader
    steps: int | None = None

    def __call__(self) -> dict[str, Any]:
        return _train(self)


def _train(work: Training) -> dict[str, Any]:
    import hashlib
    import signal
    import time

    import keras
    import numpy as np

    import nbelastic.keras as hvd
    from nbelastic.elastic.ranks.context import current

    hvd.init()
    made = np.random.default_rng(1)
    x = made.normal(size=(SAMPLES, 6)).astype("float32")
    target = np.tanh(x.sum(1, keepdims=True)) + made.normal(size=(SAMPLES, 1)) * 0.3
    y = np.concatenate([target, np.arange(SAMPLES)[:, None]], axis=1).astype("float32")

    class Seen(keras.metrics.Metric):
        """Counts how often each sample went into the model in an epoch."""

        def __init__(self, name):
            super().__init__(name=name)
            self.counts = self.add_variable((SAMPLES,), "zeros", name="counts")

        def update_state(self, y_true, y_pred, sample_weight=None):
            numbers = keras.ops.cast(y_true[:, 1], "int32")
            ones = keras.ops.one_hot(numbers, SAMPLES, dtype="float32")
            self.counts.assign(self.counts + keras.ops.sum(ones, axis=0))

        def result(self):
            return keras.ops.min(self.counts) + 1000 * keras.ops.max(self.counts)

    class Harm(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.begins = 0
            self.own = hvd.rank(), os.getpid()

        def on_train_begin(self, logs=None):
            self.begins += 1
            self.is_main = hvd.rank() == 0

        def on_epoch_begin(self, epoch, logs=None):
            self.at = epoch
            self.epochs = [*getattr(self, "epochs", []), epoch]

        def on_train_batch_begin(self, batch, logs=None):
            self.do(batch, ("kill", "whole"))

        def on_train_batch_end(self, batch, logs=None):
            self.batches = getattr(self, "batches", 0) + 1
            self.do(batch, ("wait", "stop"))

        def on_epoch_end(self, epoch, logs=None):
            self.do(0, ("end",))

        def do(self, batch, kinds):
            for number, fault in enumerate(work.faults):
                here = (fault.rank, fault.epoch, fault.batch) == (hvd.rank(), self.at, batch)
                if not here or fault.kind not in kinds or not once(work.marks / f"fault-{number}"):
                    continue
                if fault.kind in ("kill", "end"):
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault.kind == "stop":
                    self.model.stop_training = True
                    return
                is_whole = fault.kind == "whole" and hvd.size() == 3
                while not (is_whole or current().change_flag()):
                    time.sleep(0.01)

    class Careful(keras.Model):
        """A model with a train_step of its own."""

        def train_step(self, *args, **kwargs):
            return super().train_step(*args, **kwargs)

    def loss(y_true, y_pred):
        return keras.ops.mean(keras.ops.square(y_true[:, :1] - y_pred), axis=-1)

    def dense(units, **options):
        begin = keras.initializers.GlorotUniform(seed=units)
        return keras.layers.Dense(units, kernel_initializer=begin, **options)

    inputs = keras.layers.Input((6,))
    hidden = dense(16, activation="tanh")(inputs)
    if not work.loader:
        hidden = keras.layers.BatchNormalization()(hidden)
    hidden = keras.layers.Dropout(0.1)(hidden)
    kind = Careful if work.own_step else keras.Model
    model = kind(inputs, dense(1)(hidden))
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.Adam(0.02)), loss=loss, metrics=[Seen("seen")]
    )
    stopping = keras.callbacks.EarlyStopping(
        "val_loss", patience=work.patience, restore_best_weights=True
    )
    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=9, min_lr=1e-4)
    best = keras.callbacks.ModelCheckpoint(str(work.marks / "best.keras"), save_best_only=True)
    log = keras.callbacks.CSVLogger(str(work.marks / "log.csv"))
    harm = Harm()
    own = harm.own
    newcomer = not once(work.marks / f"first-{hvd.rank()}")
    state = hvd.elastic.KerasState(model, epoch=0)
    data, more = x, {"y": y, "batch_size": BATCH}
    if work.loader or work.loads:
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        rows = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    if work.loader:
        batch = hvd.elastic.Batch(BATCH * 3, micro=BATCH // 2, exact=True)
        data, more = hvd.elastic.Loader(rows, batch, seed=3), {}
    if work.loads:
        sampler = hvd.elastic.ElasticSampler(rows)
        data, more = DataLoader(rows, BATCH, sampler=sampler), {}
    history = hvd.elastic.fit(
        state,
        data,
        epochs=work.epochs,
        steps_per_epoch=work.steps,
        callbacks=[log, harm, stopping, plateau, best],
        validation_data=(x[:31], y[:31]),
        verbose=0,
        **more,
    )
    weights = b"".join(np.ascontiguousarray(each).tobytes() for each in model.get_weights())
    return {
        "newcomer": newcomer,
        "history": history.history,
        "epochs": history.epoch,
        "wait": (stopping.wait, stopping.best, stopping.best_epoch, stopping.stopped_epoch),
        "plateau": (plateau.wait, plateau.best, plateau.cooldown_counter),
        "best": best.best,
        "batches": harm.batches,
        "begins": harm.begins,
        "own": (harm.own == own, harm.is_main == (hvd.rank() == 0)),
        "told": harm.epochs,
        "digest": hashlib.sha256(weights).hexdigest(),
    }
