"""Callbacks and position of a training, over several calls of Keras' ``fit``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from nbelastic.elastic.ranks.context import rank
from nbelastic.errors import OptionError
from nbelastic.trainers.callbacks import Callbacks, TrainingProgress

_WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
"""Callbacks of Keras that write for all ranks, and keep nothing that others need."""


class OnRankZero(keras.callbacks.Callback):  # type: ignore[misc]
    """Run a callback on whichever rank is 0 at the time.

    A rank that becomes rank 0 later calls its ``on_train_begin`` then. The attributes of the
    callback are not part of the state.

    Parameters
    ----------
    callback : keras.callbacks.Callback
        A callback that writes files, or sends metrics somewhere.
    """

    def __init__(self, callback: Any) -> None:
        super().__init__()
        self.callback = callback
        self._begun = False
        self._epoch: int | None = None

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        self.callback.set_params(params)

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self.callback.set_model(model)

    def _ready(self) -> bool:
        """Return whether this is rank 0, whose callback has begun."""
        if rank() != 0:
            return False
        if not self._begun:
            self._begun = True
            self.callback.on_train_begin()
            if self._epoch is not None:
                self.callback.on_epoch_begin(self._epoch)
        return True

    def on_train_begin(self, logs: Any = None) -> None:
        self._epoch = None

    def goes_on(self, epoch: int, in_epoch: bool) -> None:
        """Go on in an epoch, on a rank that may be rank 0 by now."""
        self._epoch = epoch if in_epoch else None
        if (epoch or in_epoch) and not self._begun and hasattr(self.callback, "append"):
            self.callback.append = True  # to the file of the rank that was 0 before
        self._ready()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._ready():
            self.callback.on_epoch_begin(epoch, logs)
        self._epoch = epoch


def _forwarded(name: str) -> Any:
    def method(self: OnRankZero, *args: Any, **kwargs: Any) -> None:
        if self._ready():
            getattr(self.callback, name)(*args, **kwargs)

    return method


# All that a callback may be told, but for the two above.
for _name in {each for each in dir(keras.callbacks.Callback) if each.startswith("on_")}:
    if _name not in vars(OnRankZero):
        setattr(OnRankZero, _name, _forwarded(_name))


class RankZeroModel:
    """A model whose files are written by rank 0 alone, for saving callbacks."""

    def __init__(self, model: Any) -> None:
        self.__dict__["_model"] = model

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_model"], name)
        if name in ("save", "save_weights", "export") and rank() != 0:
            return lambda *_, **__: None
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_model"], name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_model"](*args, **kwargs)


def is_keras(callback: Any) -> bool:
    """Return whether a callback is of Keras' own: those don't ask for their rank."""
    return type(callback).__module__.startswith("keras.")


def make_callbacks(callbacks: Any, verbose: Any) -> list[Any]:
    """Return the callbacks of a training, with Keras' progress bar."""
    given = keras.tree.flatten(callbacks) if callbacks else []
    for each in given:
        if isinstance(each, keras.callbacks.BackupAndRestore):
            raise OptionError(
                "elastic.fit(callbacks=[BackupAndRestore]): the state is kept in memory by all "
                "ranks, and a restore from a file would undo it. Remove it; for a job that ends "
                "as a whole, pass checkpoint= to nbelastic.fit"
            )
    found = [OnRankZero(each) if isinstance(each, _WRITERS) else each for each in given]
    own = [each.callback for each in found if isinstance(each, OnRankZero)]
    if verbose and not any(isinstance(each, keras.callbacks.ProgbarLogger) for each in own):
        found.append(OnRankZero(keras.callbacks.ProgbarLogger()))
    return found


class FitProgress(TrainingProgress):
    """Position of a training by ``fit``, and what callbacks and metrics know."""

    callbacks: Callbacks

    def __init__(self, callbacks: Sequence[Any] = (), epoch: int = 0) -> None:
        self.epoch, self.batch = epoch, 0  # the present epoch, and the batches of it that are done
        self.ended = False
        # Variables of the metrics, summed over all ranks; None before an epoch.
        self.metrics: np.ndarray[Any, Any] | None = None
        super().__init__((self, ("epoch", "batch", "ended", "metrics")))
        on_all = [each for each in callbacks if not isinstance(each, OnRankZero)]
        self.callbacks = Callbacks(
            lambda: on_all,  # those of rank 0 alone keep theirs
            begins_again=lambda each: not is_keras(each),
            shared=is_keras,
            # Keras negates ``min_delta`` as it sets ``monitor_op``, a function: not to be sent.
            hidden=("params", "_model", "min_delta", "monitor_op"),
        )
