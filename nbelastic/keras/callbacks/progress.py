"""Position of a training by ``fit``, with what callbacks and metrics know."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from nbelastic.torch.state.flatten import Adapter, ValueNode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbelastic.torch.state.flatten import Flattener, Node, Unflattener

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, np.ndarray)
_CONTAINERS = (list, tuple, dict, set, frozenset)
_NOT_STATE = ("params", "_model")
"""Attributes of callbacks that belong to their rank."""


class FitProgressAdapter(Adapter):
    """Capture and restoration of :class:`FitProgress`."""

    def capture(self, flattener: Flattener, obj: FitProgress) -> dict[str, Any]:
        """Return its content, which shares nothing that changes with it."""
        del flattener
        return obj.content()

    def restore(self, unflattener: Unflattener, obj: FitProgress, content: dict[str, Any]) -> None:
        """Take over its content."""
        obj.take(content, own=unflattener.local)

    def state_dict(self, content: Any, *, whole: bool = False) -> Node:
        """Return the content."""
        del whole
        return ValueNode(content)


class FitProgress:
    """Position of a training by ``fit``, and what callbacks and metrics know."""

    nbelastic_adapter = FitProgressAdapter

    def __init__(self, rates: Sequence[Any] = ()) -> None:
        self.epoch = self.batch = 0  # the present epoch, and the batches of it that are done
        self.begun = self.in_epoch = False  # callbacks were told of the beginning
        self.ended = False
        # Variables of the metrics, summed over all ranks, as far as the epoch is done.
        self.metrics: list[np.ndarray[Any, Any]] = []
        self.callbacks: list[Any] = []  # of which attributes are kept
        self.rates = list(rates)  # variables that callbacks change between steps
        self.received = False  # from another rank; callbacks know nothing of it yet
        self._attributes: list[dict[str, Any]] = []  # of callbacks, as received

    def begin(self, callbacks: Sequence[Any]) -> None:
        """Begin a training with these callbacks."""
        self.__init__(self.rates)  # type: ignore[misc]
        self.callbacks = list(callbacks)

    def content(self) -> dict[str, Any]:
        """Return all there is to know, as plain values."""
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "begun": self.begun,
            "in_epoch": self.in_epoch,
            "ended": self.ended,
            "metrics": list(self.metrics),  # arrays that are replaced, and never changed
            "callbacks": [attributes_of(each) for each in self.callbacks],
            "rates": [float(keras.ops.convert_to_numpy(each)) for each in self.rates],
        }

    def take(self, content: dict[str, Any], *, own: bool) -> None:
        """Take over what this rank, or another one, has committed."""
        for name in ("epoch", "batch", "begun", "in_epoch", "ended"):
            setattr(self, name, content[name])
        self.metrics = list(content["metrics"])
        for variable, value in zip(self.rates, content["rates"], strict=False):
            variable.assign(value)
        self._attributes = content["callbacks"]
        self.received = not own
        self.give_to_callbacks()

    def give_to_callbacks(self) -> None:
        """Give callbacks the attributes that were taken over."""
        for callback, attributes in zip(self.callbacks, self._attributes, strict=False):
            for name in [] if self.received else [*attributes_of(callback)]:
                if name not in attributes:  # it is newer than the commit
                    del vars(callback)[name]
            vars(callback).update(copied(attributes, shares=_is_keras(callback)))


def attributes_of(callback: Any) -> dict[str, Any]:
    """Return copies of a callback's attributes that are plain values, or containers of them."""
    shares = _is_keras(callback)
    return {
        name: copied(value, shares=shares)
        for name, value in vars(callback).items()
        if name not in _NOT_STATE and _is_plain(value)
    }


def copied(value: Any, *, shares: bool) -> Any:
    """Return a copy; `shares` means that arrays are replaced by their owner, never changed."""
    if not shares:
        return copy.deepcopy(value)
    kind = type(value)
    if kind is dict:
        return {key: copied(each, shares=True) for key, each in value.items()}
    if kind in (list, tuple):
        return kind(copied(each, shares=True) for each in value)
    return set(value) if kind is set else value


def _is_keras(callback: Any) -> bool:
    """Return whether a callback is of Keras' own, which never change arrays in place."""
    return type(callback).__module__.startswith("keras.")


def _is_plain(value: Any) -> bool:
    if isinstance(value, _PLAIN):
        return not (isinstance(value, np.ndarray) and value.dtype.hasobject)
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return type(value) in _CONTAINERS and all(map(_is_plain, value))
