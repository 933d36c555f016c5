"""Back ends of Keras: what nbelastic needs of each, in one small adapter."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

import keras

from nbelastic.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from nbelastic.keras.options import KerasOptions

__all__ = ["Backend", "Reduction", "backend"]


class Reduction(Protocol):
    """Reduction of one optimizer's gradients."""

    options: KerasOptions
    defers: bool  # an update waits for :meth:`complete`; only on the torch back end
    keeps_final: bool  # ``finalize_variable_values`` is put off, because training goes on
    dry: bool  # gradients are applied as they are, in a step that is made to be compiled

    @property
    def accumulates(self) -> bool:
        """Whether some of the passes of a step are done, and not all."""

    def built(self, optimizer: Any) -> None:
        """Prepare for an optimizer that has its variables."""
        return

    def before_backward(self) -> None:
        """Prepare for the gradients of a loss."""
        return

    def apply(
        self,
        optimizer: Any,
        gradients: Sequence[Any],
        variables: Sequence[Any] | None,
        apply: Callable[..., None],
    ) -> None:
        """Reduce gradients and apply them."""

    def stateless(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Return reduced gradients, where Keras has no variables at hand: on JAX only."""
        raise RuntimeError(
            f"stateless_apply() does not reduce gradients on the {keras.config.backend()} back end"
        )

    def synchronize(self, optimizer: Any) -> None:
        """Wait for the reduced gradients before ``apply()`` does."""
        return

    def complete(self) -> None:
        """Apply an update that was put off."""
        return

    def forget(self) -> None:
        """Drop an update that was put off, and gradients of passes."""


class Backend(Protocol):
    """What nbelastic needs of a back end."""

    name: str  # in Keras
    in_place: bool  # variables are tensors of PyTorch, which are read and filled in place

    def read(self, variables: Sequence[Any]) -> list[torch.Tensor]:
        """Return the variables' values; they may share memory with them."""

    def write(self, variables: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
        """Copy values into variables."""

    def prepare(self, model: Any) -> str:
        """Change what of a compiled model cannot work; return a warning, or nothing."""
        return ""

    def settle(self, model: Any) -> None:
        """Set the variables of a model to their present values, in the middle of ``fit``."""
        return

    def reduction(self, options: KerasOptions) -> Reduction:
        """Return a new reduction of gradients."""

    def to_torch(self, value: Any) -> torch.Tensor:
        """Return a tensor of this back end, or an array, as one of PyTorch; best without a copy."""

    def from_torch(self, tensor: torch.Tensor) -> Any:
        """Return a tensor of PyTorch as one of this back end."""

    def raised(self) -> BaseException | None:
        """Return, once, the error of the last operation between ranks that the back end has hidden.

        PyTorch hides none.
        """
        return None


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
