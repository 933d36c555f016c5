"""Learning rates of jobs whose batch grows and shrinks with the number of ranks.

A job with a :class:`~nbelastic.data.Loader` needs none of this: its batch is the same for every
number of ranks.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nbelastic.elastic.ranks.context import current
from nbelastic.errors import OptionError, StateMismatch

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
    have the rates of `reference` ranks. Make it part of a
    :class:`~nbelastic.torch.elastic.TorchState`, before the state.

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
    warmup : int, default 0
        Number of steps in which a larger factor is approached. A smaller one holds at once.

    Attributes
    ----------
    factor : float
        The factor of the next step.

    Raises
    ------
    OptionError
        A value cannot be used.

    Examples
    --------
    >>> scaler = hvd.elastic.LRScaler(optimizer, reference=4, warmup=100)  # doctest: +SKIP
    >>> state = hvd.elastic.TorchState(model, optimizer, scaler=scaler)  # doctest: +SKIP
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        reference: float = 1.0,
        rule: str | Callable[[float], float] | None = None,
        warmup: int = 0,
    ) -> None:
        if not reference > 0:
            raise OptionError(f"LRScaler(reference={reference!r}): must be a number of ranks")
        if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
            raise OptionError(
                f"LRScaler(warmup={warmup!r}): must be a whole number of steps, at least 0"
            )
        if rule is None:
            rule = "linear" if isinstance(optimizer, torch.optim.SGD) else "sqrt"
        if not callable(rule) and rule not in RULES:
            raise OptionError(f"LRScaler(rule={rule!r}): must be 'linear', 'sqrt' or a function")
        if any(isinstance(each, LRScaler) for each in _scalers.get(optimizer, ())):
            raise OptionError("LRScaler: the optimizer has one already")
        self._optimizer = weakref.ref(optimizer)
        self._reference = reference
        self._rule = rule if callable(rule) else RULES[rule]
        self._warmup = warmup
        self._built = (current().size, [float(group["lr"]) for group in optimizer.param_groups])
        self._size = current().size
        self._from = self._to = self._target(self._size)
        self._steps = warmup
        self._unscaled: list[tuple[dict[str, Any], Any]] = []
        # Weak references, because a scaler that the user has dropped must not go on scaling.
        optimizer.register_step_pre_hook(WhileAlive(self._scale))
        optimizer.register_step_post_hook(WhileAlive(self._put_back))
        _scalers.setdefault(optimizer, weakref.WeakSet()).add(self)

    def _target(self, size: int) -> float:
        factor = float(self._rule(size / self._reference))
        if not 0.0 < factor < math.inf:
            raise OptionError(
                f"LRScaler(rule=…): the factor for {size} ranks is {factor}; it must be positive"
            )
        return factor

    @property
    def factor(self) -> float:
        """The factor of the next step."""
        size = current().size
        return self._reached() if size == self._size else self._factor_after(size)[0]

    def _reached(self) -> float:
        progress = min(self._steps / self._warmup, 1.0) if self._warmup else 1.0
        return self._from + (self._to - self._from) * progress

    def _factor_after(self, size: int) -> tuple[float, float]:
        """Return the first and the last factor after a change of the number of ranks."""
        now, target = self._reached(), self._target(size)
        return (now if target > now and self._warmup else target), target

    def _scale(self) -> None:
        self._put_back()  # an exception may have ended the last step in its middle
        size = current().size
        if size != self._size:
            (self._from, self._to), self._size, self._steps = self._factor_after(size), size, 0
        factor, optimizer = self.factor, self._optimizer()
        for group in [] if optimizer is None else optimizer.param_groups:
            self._unscaled.append((group, group["lr"]))
            group["lr"] = group["lr"] * factor
        self._steps += 1

    def _put_back(self) -> None:
        unscaled, self._unscaled = self._unscaled, []
        for group, rate in unscaled:
            group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """Return the factor, and how far its warm-up has come."""
        return {
            "from": self._from,
            "to": self._to,
            "size": self._size,
            "steps": self._steps,
            "built": [self._built[0], *self._built[1]],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state dict.

        Raises
        ------
        StateMismatch
            The rates with which the optimizer was built were multiplied by the number of ranks.
        """
        size, *rates = state_dict["built"]
        mine_size, mine = self._built
        if size != mine_size and len(rates) == len(mine):
            pairs = zip(mine, rates, strict=True)
            if all(a != b and math.isclose(a * size, b * mine_size) for a, b in pairs):
                raise StateMismatch(
                    f"learning rates were multiplied by the number of ranks: {mine} with "
                    f"{mine_size} ranks, {rates} with {size}. An LRScaler does that by itself; "
                    "build the optimizer without `* hvd.size()`"
                )
        self._unscaled = []  # the optimizer's own state has its rates
        self._from, self._to = float(state_dict["from"]), float(state_dict["to"])
        self._size, self._steps = int(state_dict["size"]), int(state_dict["steps"])


_scalers: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.WeakSet[LRScaler]] = (
    weakref.WeakKeyDictionary()
)


def adjusts_to_size(value: object) -> bool:
    """Return whether an object adjusts a rate to the number of ranks, or its scaler does."""
    if isinstance(value, torch.optim.Optimizer):
        return bool(_scalers.get(value))
    return isinstance(value, (LRScaler, SampleScheduler))


class SampleScheduler:
    """Scheduler that is stepped by samples; made by :func:`by_samples`."""

    def __init__(self, scheduler: Any, reference: float) -> None:
        self._scheduler = scheduler
        self._reference = reference
        self._due = 0.0

    def step(self) -> None:
        """Advance by the samples of a step on all ranks: call this once per optimizer's step."""
        self._due += current().size / self._reference
        while self._due >= 1.0 - 1e-9:  # ten tenths add up to a little less
            self._due -= 1.0
            self._scheduler.step()

    def get_last_lr(self) -> list[float]:
        """Return the last rates of the scheduler."""
        rates: list[float] = self._scheduler.get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state, and the part of a step that is due."""
        return {"scheduler": self._scheduler.state_dict(), "due": self._due}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state dict."""
        self._scheduler.load_state_dict(state_dict["scheduler"])
        self._due = float(state_dict["due"])


def by_samples(scheduler: Any, reference: float = 1.0) -> SampleScheduler:
    """Make a learning rate scheduler advance by samples, not by steps.

    With a batch per rank, an epoch has fewer steps on more ranks, and a schedule over steps would
    not end. One step of `scheduler` then stands for a step of `reference` ranks.

    Parameters
    ----------
    scheduler : torch.optim.lr_scheduler.LRScheduler
        Built for the number of steps that `reference` ranks would take.
    reference : float, default 1
        Number of ranks.

    Returns
    -------
    SampleScheduler
        With ``step()``, ``get_last_lr()``, ``state_dict()`` and ``load_state_dict()``.

    Raises
    ------
    OptionError
        A value cannot be used.

    Examples
    --------
    >>> cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4000)  # doctest: +SKIP
    >>> scheduler = hvd.elastic.by_samples(cosine, reference=4)  # doctest: +SKIP
    """
    if not callable(getattr(scheduler, "step", None)):
        raise OptionError(f"by_samples({scheduler!r}): must be a learning rate scheduler")
    if not reference > 0:
        raise OptionError(f"by_samples(reference={reference!r}): must be a number of ranks")
    return SampleScheduler(scheduler, reference)
