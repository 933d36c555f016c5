"""Learning rates of jobs whose batch grows and shrinks with the number of ranks.

A job with a :class:`~nbelastic.data.Loader` needs none of this: its batch is the same for every
number of ranks.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch

from nbelastic.elastic.ranks.context import current
from nbelastic.errors import OptionError

RULES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt}


class WhileAlive:
    """Call of a method as long as its object lives; a copy of the call does nothing."""

    def __init__(self, method: Callable[[], Any] | None) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)

    def __call__(self, *_: object) -> Any:
        method = None if self._method is None else self._method()
        return None if method is None else method()

    def __reduce__(self) -> tuple[Any, ...]:
        return WhileAlive, (None,)


class LRScaler:
    """Multiply an optimizer's learning rates in each step, by the number of ranks.

    With a batch per rank, twice as many ranks make twice as large a batch. The rates are multiplied
    just before each step and put back after it. So schedulers, checkpoints and ``param_groups``
    have the rates of `reference` ranks. The scaler lives with its optimizer, and has no state.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Its rates are right for `reference` ranks. Do not multiply them by ``size()``.
    reference : float, default 1
        Number of ranks.
    rule : {"linear", "sqrt"} or callable, optional
        Factor of the rates, from the number of ranks relative to `reference`. By default
        ``"linear"`` for SGD, which takes a larger step in proportion to a larger batch, and
        ``"sqrt"`` for others, which normalise gradients.

    Attributes
    ----------
    factor : float
        The factor for the present number of ranks.

    Raises
    ------
    OptionError
        A value cannot be used.

    Examples
    --------
    >>> hvd.elastic.LRScaler(optimizer, reference=4)  # doctest: +SKIP
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        reference: float = 1.0,
        rule: str | Callable[[float], float] | None = None,
    ) -> None:
        if not reference > 0:
            raise OptionError(f"LRScaler(reference={reference!r}): must be a number of ranks")
        if rule is None:
            rule = "linear" if isinstance(optimizer, torch.optim.SGD) else "sqrt"
        if not callable(rule) and rule not in RULES:
            raise OptionError(f"LRScaler(rule={rule!r}): must be 'linear', 'sqrt' or a function")
        if adjusts_to_size(optimizer):
            raise OptionError("LRScaler: the optimizer has one already")
        self._reference = reference
        self._rule = rule if callable(rule) else RULES[rule]
        self._scaled: list[tuple[dict[str, Any], Any, Any]] = []  # groups, their rates, the scaled
        _ = self.factor  # refuses a rule that is wrong for the present number
        optimizer.register_step_pre_hook(self._scale)
        put_back = optimizer.register_step_post_hook(self._put_back)
        # First, as a state may capture the end of a step in a hook of its own.
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(put_back.id, last=False)
        _scalers[optimizer] = self

    @property
    def factor(self) -> float:
        """The factor for the present number of ranks."""
        size = current().size
        factor = float(self._rule(size / self._reference))
        if not 0.0 < factor < math.inf:
            raise OptionError(
                f"LRScaler(rule=…): the factor for {size} ranks is {factor}; it must be positive"
            )
        return factor

    def _scale(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._put_back()  # an exception may have ended the last step in its middle
        factor = self.factor
        for group in optimizer.param_groups:
            rate, group["lr"] = group["lr"], group["lr"] * factor
            self._scaled.append((group, rate, group["lr"]))

    def _put_back(self, *_: object) -> None:
        for group, rate, scaled in self._scaled:
            if group["lr"] is scaled:  # else a state was restored
                group["lr"] = rate
        self._scaled = []


_scalers: weakref.WeakKeyDictionary[torch.optim.Optimizer, LRScaler] = weakref.WeakKeyDictionary()


def adjusts_to_size(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has a scaler."""
    return optimizer in _scalers
