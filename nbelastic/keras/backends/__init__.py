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
    """Reduction of one optimizer's gradients.

    Attributes
    ----------
    options : KerasOptions
        How to reduce.
    defers : bool
        Whether an update waits for :meth:`complete`. Only some back ends can.
    keeps_final : bool
        Whether ``finalize_variable_values`` is put off, because training goes on.
    dry : bool
        Whether gradients are applied as they are, in a step that is made to be compiled.
    """

    options: KerasOptions
    defers: bool
    keeps_final: bool
    dry: bool

    @property
    def accumulates(self) -> bool:
        """Whether some of the passes of a step are done, and not all."""

    def built(self, optimizer: Any) -> None:
        """Take note that the optimizer has its variables."""

    def before_backward(self) -> None:
        """Take note that a loss is about to be differentiated."""

    def apply(
        self,
        optimizer: Any,
        gradients: Sequence[Any],
        variables: Sequence[Any] | None,
        apply: Callable[..., None],
    ) -> None:
        """Reduce gradients and apply them."""

    def stateless(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Return reduced gradients, where Keras has no variables at hand."""

    def synchronize(self, optimizer: Any) -> None:
        """Wait for the reduced gradients before ``apply()`` does."""

    def complete(self) -> None:
        """Apply an update that was put off."""

    def forget(self) -> None:
        """Drop an update that was put off, and gradients of passes."""


class Backend(Protocol):
    """What nbelastic needs of a back end.

    Attributes
    ----------
    name : str
        Its name in Keras.
    in_place : bool
        Whether variables are tensors of PyTorch, which are read and filled in place.
    """

    name: str
    in_place: bool

    def read(self, variables: Sequence[Any]) -> list[torch.Tensor]:
        """Return the variables' values; they may share memory with them."""

    def write(self, variables: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
        """Copy values into variables."""

    def prepare(self, model: Any) -> str:
        """Change what of a compiled model cannot work; return a warning, or nothing."""

    def settle(self, model: Any) -> None:
        """Have the variables of a model hold their present values, in the middle of ``fit``."""

    def reduction(self, options: KerasOptions) -> Reduction:
        """Return a new reduction of gradients."""

    def to_torch(self, value: Any) -> torch.Tensor:
        """Return a tensor of this back end, or an array, as one of PyTorch; best without a copy."""

    def from_torch(self, tensor: torch.Tensor) -> Any:
        """Return a tensor of PyTorch as one of this back end."""

    def raised(self) -> BaseException | None:
        """Return the error of the last operation between ranks, where the back end has hidden it.

        It is returned once.
        """


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
    """Return the adapter of Keras' back end.

    Raises
    ------
    OptionError
        It is none of torch, tensorflow and jax; or a distribution of Keras is set.
    """
    if keras.distribution.distribution() is not None:
        raise OptionError(
            "keras.distribution is set: Keras would distribute the model over devices by itself, "
            "over a fixed number of processes. nbelastic gives each rank a model of its own. "
            "Remove keras.distribution.set_distribution(…)"
        )
    return _backend(keras.config.backend())
