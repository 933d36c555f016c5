"""Back ends of Keras: for each, a small adapter with the needs of nbelastic."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import keras

from nbelastic.errors import OptionError
from nbelastic.keras.backends.reduction import KerasOptions, Reduction

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from nbelastic.keras.backends.reduction import Operation

__all__ = ["Backend", "KerasOptions", "Reduction", "backend"]


class Backend:
    """Adapter of a back end, whose compiled functions call back into Python."""

    name: str  # in Keras
    in_place = False  # variables are tensors of PyTorch, which are read and filled in place

    def to_torch(self, value: Any) -> torch.Tensor:
        """Return a tensor of this back end, or an array, as one of PyTorch; best without a copy."""
        raise NotImplementedError

    def from_torch(self, tensor: torch.Tensor) -> Any:
        """Return a tensor of PyTorch as one of this back end."""
        raise NotImplementedError

    def read(self, variables: Sequence[Any]) -> list[torch.Tensor]:
        """Return the variables' values; they may share memory with them."""
        return [self.to_torch(each) for each in variables]

    def write(self, variables: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
        """Copy values into variables."""
        raise NotImplementedError

    def prepare(self, model: Any) -> str:
        """Change what of a compiled model cannot work; return a warning, or nothing."""
        del model
        return ""

    def settle(self, model: Any) -> None:
        """Set the variables of a model to their present values, in the middle of ``fit``."""

    def call_back(
        self, tensors: Sequence[Any], operation: Operation, results: Sequence[tuple[Any, Any]]
    ) -> list[Any]:
        """Call a function on tensors of PyTorch, from a compiled function or not.

        `results` are the types and shapes that come out.
        """
        raise NotImplementedError

    def apply_if(self, ready: Any, update: Callable[[], None], changed: Sequence[Any]) -> None:
        """Make an update if `ready`, known to a compiled function only when it runs."""
        raise NotImplementedError

    def dense(self, gradients: Sequence[Any], options: KerasOptions) -> Sequence[Any]:
        """Return gradients without sparse ones."""
        del options
        return gradients

    def reduction(self, options: KerasOptions) -> Reduction:
        """Return a new reduction of gradients."""
        return Reduction(options, self)


@functools.cache
def _backend(name: str) -> Backend:
    if name == "torch":
        from nbelastic.keras.backends.torch import TorchBackend

        return TorchBackend()
    if name == "tensorflow":
        from nbelastic.keras.backends.tensorflow import TensorFlowBackend

        return TensorFlowBackend()
    if name == "jax":
        from nbelastic.keras.backends.jax import JaxBackend

        return JaxBackend()
    raise OptionError(
        f"Keras has the back end {name!r}; nbelastic.keras works with torch, tensorflow and jax. "
        "Set KERAS_BACKEND before Keras is imported"
    )


def backend() -> Backend:
    """Return the adapter of Keras' back end, unless a distribution of Keras is set."""
    if keras.distribution.distribution() is not None:
        raise OptionError(
            "keras.distribution is set: Keras would distribute the model over devices by itself, "
            "over a fixed number of processes. nbelastic gives each rank a model of its own. "
            "Remove keras.distribution.set_distribution(…)"
        )
    return _backend(keras.config.backend())
