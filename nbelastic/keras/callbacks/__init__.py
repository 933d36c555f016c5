"""Horovod's callbacks for Keras.

Those for an elastic loop are in :mod:`nbelastic.keras.elastic`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import torch

from nbelastic.elastic.ranks.context import rank, size
from nbelastic.keras.backends import backend
from nbelastic.keras.callbacks.fit_callbacks import RankZeroModel
from nbelastic.keras.ops import broadcast_variables
from nbelastic.keras.optimizer import distribution_of
from nbelastic.torch.ops.reductions import Average, allreduce

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Give all ranks the variables of model and optimizer of one rank, once, after its first batch.

    Not needed with a :class:`~nbelastic.keras.elastic.KerasState`, which is synchronised before.

    Parameters
    ----------
    root_rank : int
        The rank.
    device : str
        Ignored; for Horovod's signature.
    local_variables : list of variables, optional
        Variables to leave out.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local = list(local_variables or ())

    def register_local_var(self, var: Any) -> None:
        """Leave out a variable."""
        self._local.append(var)

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        distribution_of(model.optimizer)  # refuses a scaling of each rank's own

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.broadcast_done:
            return
        self.broadcast_done = True
        backend().settle(self.model)
        optimizer = self.model.optimizer
        variables = [*self.model.variables, *(optimizer.variables if optimizer else ())]
        local = set(map(id, self._local))
        broadcast_variables([v for v in variables if id(v) not in local], self.root_rank)


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Average the logs of an epoch over all ranks; to be placed before readers of the logs.

    `device` is ignored; it is for Horovod's signature.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        names = sorted(logs or ())
        if not names:
            return
        values = torch.tensor([float(logs[name]) for name in names], dtype=torch.float64)
        averages = allreduce(values, op=Average, name=f"metrics {', '.join(names)}")
        logs.update(zip(names, averages.tolist(), strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Multiply the learning rate from one epoch to another.

    Parameters
    ----------
    initial_lr : float
        Rate for a multiplier of 1.
    multiplier : float or callable
        A number `m` means ``m ** (epoch - start_epoch)``; a function gets the epoch, as a fraction
        with ``staircase=False``.
    start_epoch : int, default 0
        The first epoch.
    end_epoch : int, optional
        The epoch after the last.
    staircase : bool, default True
        Whether the rate changes with epochs alone, and not with batches.
    momentum_correction : bool, default True
        Whether the momentum is scaled with the rate for the first batch after a change. Only where
        Keras reads it anew in each step: on the torch back end, or with ``run_eagerly``.
    steps_per_epoch : int, optional
        Batches of an epoch, for ``staircase=False``; by default those of ``fit``.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self._restores: float | None = None
        if callable(multiplier):
            self.multiplier: Callable[[float], float] = multiplier
        else:
            self.staircase = True
            self.multiplier = lambda epoch: multiplier ** (epoch - start_epoch)

    def _rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before, rate = self._rate(), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = rate
        momentum = getattr(optimizer, "momentum", None)
        if self.momentum_correction and isinstance(momentum, float) and before > 0:
            # See the paper cited by Horovod: https://arxiv.org/abs/1706.02677
            self._restores = momentum
            optimizer.momentum = momentum * rate / before

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    f"{type(self).__name__}: the number of batches of an epoch is not known; pass "
                    "steps_per_epoch="
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        is_over = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if is_over or self.current_epoch < self.start_epoch:
            return
        if self.staircase and batch == 0:
            self._adjust(self.current_epoch)
        elif not self.staircase:
            assert self.steps_per_epoch is not None
            self._adjust(self.current_epoch + batch / self.steps_per_epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._restores is not None:
            self.model.optimizer.momentum, self._restores = self._restores, None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = self._rate()


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate batch by batch, from ``initial_lr / size`` to ``initial_lr``.

    Parameters
    ----------
    initial_lr : float
        Rate after the warm-up.
    warmup_epochs : int, default 5
        Its length.
    momentum_correction, steps_per_epoch
        As for :class:`LearningRateScheduleCallback`.
    verbose : int, default 0
        Whether rank 0 prints the rate at the end.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # The last batch of the warm-up has the full rate.
            epoch += 1.0 / (self.steps_per_epoch or 1)
            return 1.0 / size() * (epoch * (size() - 1) / warmup_epochs + 1)

        options = (momentum_correction, steps_per_epoch)
        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, *options)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose > 0 and epoch == (self.end_epoch or 0) - 1 and rank() == 0:
            print(  # noqa: T201 - asked for
                f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}."
            )


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """``keras.callbacks.ModelCheckpoint`` that keeps the best model, written by rank 0."""

    def __init__(self, filepath: Any, monitor: str = "val_loss", **options: Any) -> None:
        super().__init__(filepath, monitor, save_best_only=True, **options)

    def set_model(self, model: Any) -> None:
        super().set_model(model if isinstance(model, RankZeroModel) else RankZeroModel(model))
