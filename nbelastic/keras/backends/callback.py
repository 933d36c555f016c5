"""Reduction of gradients inside of compiled functions, by calls into Python.

TensorFlow and JAX call back in a thread of their own, while the rank's thread waits in the compiled
function. So that thread acts for the rank. An error there reaches the rank as one of the library's;
the original is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nbelastic.collectives import Op
from nbelastic.elastic.ranks.context import Acting, current
from nbelastic.keras.backends import Backend, Reduction
from nbelastic.torch.ops.coordination import group_of
from nbelastic.torch.ops.reductions import Average, Sum, grouped_allreduce

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.elastic.ranks.context import Context
    from nbelastic.keras.options import KerasOptions

    Operation = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
    CallBack = Callable[[Sequence[Any], Operation, Sequence[tuple[Any, Any]]], list[Any]]


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


def reduce(gradients: Sequence[torch.Tensor], options: KerasOptions) -> list[torch.Tensor]:
    """Return gradients reduced over all ranks, which call this together.

    One more number travels with them: whether a rank knows that the membership is about to change.
    """
    context = current()
    context.communicator()  # in a job without an elastic loop, the first one makes it a member
    group = group_of(options.process_set)
    if context.rank not in group.ranks:
        return list(gradients)
    op, pre = options.op, options.predivide
    before, after = 1.0, 1.0
    if op is Average and pre != 1.0:
        op, before, after = Sum, 1.0 / pre, pre / group.size
    flags = (
        [torch.tensor([float(context.change_flag())])]
        if isinstance(op, Op) and group.is_global
        else []
    )
    reduced = grouped_allreduce(
        [*gradients, *flags],
        compression=options.compression,
        op=op,
        prescale_factor=before,
        postscale_factor=after,
        process_set=options.process_set,
    )
    if flags:
        context.agree(bool(reduced.pop()))
    return reduced


class Gradients:
    """Gradients of the batches of one step on this rank, and their reduction."""

    def __init__(
        self, options: KerasOptions, local: Sequence[bool], reduction: Reduction | None = None
    ) -> None:
        self.options = options
        self._reduction = reduction  # says whether a step is only made to be compiled
        self._local = list(local)  # for each gradient whether it stays on its rank
        self._sums: list[torch.Tensor] = []
        self.passes = 0

    def reduce(self, tensors: Sequence[Any], call_back: CallBack) -> tuple[Any, list[Any]]:
        """Reduce tensors of the back end over all ranks, compiled or not.

        Returns whether there are reduced ones, which is not so between the passes of a step, and
        them.
        """

        def add(given: list[torch.Tensor]) -> list[torch.Tensor]:
            found = self.add(given)
            return [torch.tensor(found is not None), *(found or given)]

        results = [("bool", ()), *((each.dtype, each.shape) for each in tensors)]
        ready, *reduced = call_back(tensors, add, results)
        return ready, reduced

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


class CallbackBackend(Backend):
    """Back end whose compiled functions call back into Python to reduce gradients."""

    in_place = False
    called_back: CalledBack

    def call_back(
        self, tensors: Sequence[Any], operation: Operation, results: Sequence[tuple[Any, Any]]
    ) -> list[Any]:
        """Call a function on tensors of PyTorch, from a compiled function or not.

        `results` are the types and shapes that come out.
        """
        raise NotImplementedError

    def apply_if(self, ready: Any, update: Callable[[], None], changed: Sequence[Any]) -> None:
        """Make an update if `ready`, which a compiled function knows only when it runs."""
        raise NotImplementedError

    def dense(self, gradients: Sequence[Any], options: KerasOptions) -> Sequence[Any]:
        """Return gradients without sparse ones."""
        del options
        return gradients

    def reduction(self, options: KerasOptions) -> Reduction:
        return CallbackReduction(options, self)

    def raised(self) -> BaseException | None:
        return self.called_back.raised()


class CallbackReduction(Reduction):
    """Reduction of an optimizer's gradients in its ``apply()``, compiled or not."""

    def __init__(self, options: KerasOptions, back: CallbackBackend) -> None:
        self.options, self._back = options, back
        self.defers = self.keeps_final = self.dry = False
        self._gradients: dict[tuple[int, ...], Gradients] = {}

    @property
    def accumulates(self) -> bool:
        return any(each.passes for each in self._gradients.values())

    def apply(
        self,
        optimizer: Any,
        gradients: Sequence[Any],
        variables: Sequence[Any] | None,
        apply: Callable[..., None],
    ) -> None:
        if not gradients:
            return
        if not optimizer.built:
            optimizer.build(list(variables or ()))
        trained = list(optimizer._trainable_variables if variables is None else variables)
        ready, reduced = self._reduce(gradients, trained)
        if self.options.passes == 1:
            apply(reduced, trained)
        else:
            changed = [*trained, *optimizer.variables]
            self._back.apply_if(ready, lambda: apply(reduced, trained), changed)

    def stateless(self, gradients: Sequence[Any]) -> Sequence[Any]:
        if self._back.name != "jax":
            return super().stateless(gradients)
        if self.options.passes > 1 or self.options.local:
            raise ValueError(
                "backward_passes_per_step and local layers cannot be used with a "
                "LossScaleOptimizer on the JAX back end"
            )
        return self._reduce(gradients, None)[1]

    def _reduce(
        self, gradients: Sequence[Any], trained: Sequence[Any] | None
    ) -> tuple[Any, list[Any]]:
        """Return whether there are reduced gradients, and them; None stays None."""
        gradients = self._back.dense(gradients, self.options)
        there = [n for n, each in enumerate(gradients) if each is not None]
        stays = self.options.is_local()
        key = tuple(id(trained[n]) for n in there) if trained is not None else (len(there),)
        if key not in self._gradients:
            local = [trained is not None and id(trained[n]) in stays for n in there]
            self._gradients[key] = Gradients(self.options, local, self)
        tensors = [gradients[n] for n in there]
        ready, reduced = self._gradients[key].reduce(tensors, self._back.call_back)
        whole = list(gradients)
        for number, each in zip(there, reduced, strict=True):
            whole[number] = each
        return ready, whole

    def forget(self) -> None:
        for each in self._gradients.values():
            each.forget()
