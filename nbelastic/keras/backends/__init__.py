"""Back ends of Keras: for each, an adapter with conversions to PyTorch and back."""

from __future__ import annotations

import functools
import importlib

import keras

from nbelastic.errors import OptionError
from nbelastic.keras.backends.reduction import Backend, KerasOptions, Reduction

__all__ = ["Backend", "KerasOptions", "Reduction", "backend"]

_ADAPTERS = {"torch": "TorchBackend", "tensorflow": "TensorFlowBackend", "jax": "JaxBackend"}


@functools.cache
def _backend(name: str) -> Backend:
    if name not in _ADAPTERS:
        raise OptionError(
            f"Keras has the back end {name!r}; nbelastic.keras works with torch, tensorflow and "
            "jax. Set KERAS_BACKEND before Keras is imported"
        )
    module = importlib.import_module(f"nbelastic.keras.backends.{name}")
    found: Backend = getattr(module, _ADAPTERS[name])()
    return found


def backend() -> Backend:
    """Return the adapter of Keras' back end, unless a distribution of Keras is set."""
    if keras.distribution.distribution() is not None:
        raise OptionError(
            "keras.distribution is set: Keras would distribute the model over devices by itself, "
            "over a fixed number of processes. nbelastic gives each rank a model of its own. "
            "Remove keras.distribution.set_distribution(…)"
        )
    return _backend(keras.config.backend())
