"""Position of a training by ``fit``, with what callbacks and metrics know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from nbelastic.trainers import Callbacks, ProgressAdapter

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np


class FitProgress:
    """Position of a training by ``fit``, and what callbacks and metrics know."""

    nbelastic_adapter = ProgressAdapter

    def __init__(self, rates: Sequence[Any] = (), callbacks: Sequence[Any] = ()) -> None:
        self.epoch = self.batch = 0  # the present epoch, and the batches of it that are done
        self.in_epoch = False  # callbacks were told of its beginning
        self.ended = False
        # Variables of the metrics, summed over all ranks, as far as the epoch is done.
        self.metrics: list[np.ndarray[Any, Any]] = []
        self.rates = list(rates)  # variables that callbacks change between steps
        self.callbacks = Callbacks(
            lambda: callbacks,
            begins_again=lambda each: not is_keras(each),
            shared=is_keras,
            hidden=("params", "_model"),
        )

    def begin(self, callbacks: Sequence[Any]) -> None:
        """Begin a training with these callbacks; those of rank 0 alone keep theirs."""
        on_all = [each for each in callbacks if not hasattr(each, "goes_on")]
        self.__init__(self.rates, on_all)  # type: ignore[misc]

    def content(self) -> dict[str, Any]:
        """Return all there is to know."""
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "in_epoch": self.in_epoch,
            "ended": self.ended,
            "metrics": list(self.metrics),
            "callbacks": self.callbacks.content(),
            "rates": [float(keras.ops.convert_to_numpy(each)) for each in self.rates],
        }

    def take(self, content: dict[str, Any], *, own: bool) -> None:
        """Take over what this rank, or another one, has committed."""
        for name in ("epoch", "batch", "in_epoch", "ended"):
            setattr(self, name, content[name])
        self.metrics = list(content["metrics"])
        for variable, value in zip(self.rates, content["rates"], strict=False):
            variable.assign(value)
        self.callbacks.take(content["callbacks"], own=own)


def is_keras(callback: Any) -> bool:
    """Return whether a callback is of Keras' own: those don't ask for their rank."""
    return type(callback).__module__.startswith("keras.")
