"""Reduction of gradients inside of compiled functions, by calls into Python.

TensorFlow and JAX call back in a thread of their own, while the rank's thread waits in the compiled
function. So that thread acts for the rank. An error there reaches the rank as one of the library's;
the original is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nbelastic.elastic.context import Acting, current
from nbelastic.keras.reduce import reduce

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.elastic.context import Context
    from nbelastic.keras.backends import Reduction
    from nbelastic.keras.options import KerasOptions


class CalledBack:
    """Calls for a rank in threads of a library, and the last error of one."""

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def call(
        self, context: Context, function: Callable[[], Sequence[torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        """Call a function for the rank, and keep its error."""
        try:
            with Acting(context):
                return function()
        except BaseException as error:
            self._error = error.with_traceback(None)
            raise

    def raised(self) -> BaseException | None:
        """Return the last error, once."""
        error, self._error = self._error, None
        return error


class Gradients:
    """Gradients of the batches of one step on this rank, and their reduction.

    Parameters
    ----------
    options : KerasOptions
        How to reduce.
    local : sequence of bool
        For each gradient whether it stays on its rank.
    reduction : Reduction, optional
        Says whether a step is only made to be compiled, before this rank is a member.
    """

    def __init__(
        self, options: KerasOptions, local: Sequence[bool], reduction: Reduction | None = None
    ) -> None:
        self.options = options
        self._reduction = reduction
        self.context = current()
        self._local = list(local)
        self._sums: list[torch.Tensor] = []
        self.passes = 0

    def add(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Add the gradients of a batch; return reduced ones after the last of a step."""
        options = self.options
        if self._reduction is not None and self._reduction.dry:
            return list(gradients)
        if options.passes > 1:
            gradients = [each.clone() for each in gradients]
            if self._sums:
                torch._foreach_add_(self._sums, gradients)
            else:
                self._sums = list(gradients)
            self.passes += 1
            if self.passes < options.passes:
                return None
            gradients, self._sums, self.passes = self._sums, [], 0
            if options.average_passes:
                torch._foreach_div_(gradients, float(options.passes))
        shared = [g for g, stays in zip(gradients, self._local, strict=True) if not stays]
        reduced = iter(reduce(shared, options))
        scale = 1.0 / self.context.size if options.scale_local else 1.0
        return [
            gradient * scale if stays else next(reduced)
            for gradient, stays in zip(gradients, self._local, strict=True)
        ]

    def forget(self) -> None:
        """Drop gradients of earlier batches of the step."""
        self._sums, self.passes = [], 0
