"""Reduction of gradients inside of compiled functions, by calls into Python.

TensorFlow and JAX call back in a thread of their own, while the rank's thread waits in the compiled
function. So that thread acts for the rank. An error there reaches the rank as one of the library's;
the original is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nbelastic.elastic.ranks.context import Acting, current
from nbelastic.keras.backends import Reduction
from nbelastic.keras.backends.reduce import reduce
from nbelastic.torch.ops.coordination import group_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.elastic.ranks.context import Context
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
    """Gradients of the batches of one step on this rank, and their reduction."""

    def __init__(
        self, options: KerasOptions, local: Sequence[bool], reduction: Reduction | None = None
    ) -> None:
        self.options = options
        self._reduction = reduction  # says whether a step is only made to be compiled
        self.context = current()
        self._local = list(local)  # for each gradient whether it stays on its rank
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
        scale = 1.0 / group_of(options.process_set).size if options.scale_local else 1.0
        return [
            gradient * scale if stays else next(reduced)
            for gradient, stays in zip(gradients, self._local, strict=True)
        ]

    def forget(self) -> None:
        """Drop gradients of earlier batches of the step."""
        self._sums, self.passes = [], 0


class CallbackReduction(Reduction):
    """Reduction of an optimizer's gradients in its ``apply()``, compiled or not."""

    def __init__(self, options: KerasOptions) -> None:
        self.options = options
        self.defers = self.keeps_final = self.dry = False
        self._gradients: dict[tuple[int, ...], Gradients] = {}

    @property
    def accumulates(self) -> bool:
        """Whether some of the passes of a step are done, and not all."""
        return any(each.passes for each in self._gradients.values())

    def apply(
        self,
        optimizer: Any,
        gradients: Sequence[Any],
        variables: Sequence[Any] | None,
        apply: Callable[..., None],
    ) -> None:
        """Reduce gradients and apply them; between the passes of a step, nothing changes."""
        if not gradients:
            return
        if not optimizer.built:
            optimizer.build(list(variables or ()))
        trained = list(optimizer._trainable_variables if variables is None else variables)
        ready, reduced = self._reduce(gradients, trained)
        if self.options.passes == 1:
            apply(reduced, trained)
        else:
            self._apply_if(ready, lambda: apply(reduced, trained), [*trained, *optimizer.variables])

    def _reduce(
        self, gradients: Sequence[Any], trained: Sequence[Any] | None
    ) -> tuple[Any, list[Any]]:
        """Return whether there are reduced gradients, and them; None stays None."""
        there = [n for n, each in enumerate(gradients) if each is not None]
        stays = self.options.is_local()
        key = tuple(id(trained[n]) for n in there) if trained is not None else (len(there),)
        if key not in self._gradients:
            local = [trained is not None and id(trained[n]) in stays for n in there]
            self._gradients[key] = Gradients(self.options, local, self)
        ready, reduced = self._call([gradients[n] for n in there], self._gradients[key])
        whole = list(gradients)
        for number, each in zip(there, reduced, strict=True):
            whole[number] = each
        return ready, whole

    def _call(self, tensors: Sequence[Any], gradients: Gradients) -> tuple[Any, Sequence[Any]]:
        """Add tensors of the back end to `gradients`, in compiled functions by a call back."""
        raise NotImplementedError

    def _apply_if(self, ready: Any, update: Callable[[], None], changed: Sequence[Any]) -> None:
        """Make an update if `ready`, which a compiled function knows only when it runs."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drop gradients of passes."""
        for each in self._gradients.values():
            each.forget()
