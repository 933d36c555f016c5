"""Callbacks of a trainer: their attributes in commits, and their beginnings.

A callback is told of the beginning on every rank, before or in its first generation there. A rank
that becomes the main one begins its callbacks again, as those of the main rank: only then do they
open files and runs.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.optim.swa_utils import AveragedModel

from nbelastic.elastic import report
from nbelastic.torch.elastic import TorchState
from nbelastic.torch.process_group import default_group
from nbelastic.torch.state.flatten import Adapter, Flattener, Unflattener

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, np.ndarray, torch.Tensor)
_CONTAINERS = (list, tuple, dict, set, frozenset)
_MISSING = object()


class _ProgressAdapter(Adapter):
    def capture(self, flattener: Flattener, obj: TrainingProgress) -> Any:
        return flattener.flatten(obj.content())

    def restore(self, unflattener: Unflattener, obj: TrainingProgress, content: Any) -> None:
        obj.take(unflattener.unflatten(content), own=unflattener.local)


class TrainingProgress:
    """Attributes of objects, and callbacks, as a value of a state."""

    nbelastic_adapter = _ProgressAdapter
    callbacks: Callbacks | None = None

    def __init__(self, *fields: tuple[Any, Iterable[str]]) -> None:
        self._fields = [(each, name) for each, names in fields for name in names]

    def content(self) -> dict[str, Any]:
        """Return the content of a commit."""
        callbacks = None if self.callbacks is None else self.callbacks.content()
        return {"fields": [getattr(*each) for each in self._fields], "callbacks": callbacks}

    def take(self, found: dict[str, Any], *, own: bool) -> None:
        """Take over a commit of this rank, or of another rank."""
        for (each, name), value in zip(self._fields, found["fields"], strict=True):
            setattr(each, name, value)
        if self.callbacks is not None:
            self.callbacks.take(found["callbacks"], own=own)


class Training(TrainingProgress):
    """Training by a trainer, from the first generation to the last, which its state keeps."""

    callbacks: Callbacks
    state: Any

    def make_state(self, callbacks: Iterable[Any], epoch: int, **values: Any) -> None:
        """Make the state, of values and of averages of the model that callbacks keep."""
        kept = [value for each in callbacks for value in vars(each).values()]
        averages = [value for value in kept if isinstance(value, AveragedModel)]
        self.state = TorchState(**values, progress=self, averages=averages, epoch=epoch, batch=0)

    def commit(self, epoch: int, batch: int) -> None:
        """Commit the state, as of an epoch and a step."""
        self.state.epoch, self.state.batch = epoch, batch
        self.state.commit()


class Callbacks:
    """Plain attributes of callbacks in commits, and the beginnings of callbacks on this rank.

    Plain are numbers, strings, arrays, tensors, and containers of them. Other ranks receive those
    that training has changed since the beginning. All others are a rank's own: its number, a path,
    a device. Callbacks are told apart by their class and their order within it.
    """

    def __init__(
        self,
        callbacks: Callable[[], Iterable[Any]],
        begins_again: Callable[[Any], bool] = lambda _: True,  # does other things on the main rank
        shared: Callable[[Any], bool] = lambda _: False,  # replaces arrays: they need no copies
        hidden: Iterable[str] = (),  # attributes to leave out
    ) -> None:
        self._callbacks = callbacks
        self.begins_again = begins_again
        self._shared = shared
        self._hidden = frozenset(hidden)
        self._made = self._start = self._copies()
        self._received: dict[str, Any] = {}  # before the beginning
        self._begun = 0  # how often callbacks have begun here
        self.main: bool | None = None  # whether as those of the main rank

    def begin(self, main: bool, call: Callable[[bool, bool], None]) -> None:
        """Begin callbacks by ``call(again, goes_on)``: once, and again on a rank become `main`.

        Where training goes on, others are in its middle, and this rank is alone in the call.
        """
        # Those that begin again have their attributes as they were made.
        again = main and self.main is False
        if self._begun and not again:
            return
        known = self.content() if self._begun else self._received
        if again:
            for key, callback in self._named().items():
                if key in self._made and self.begins_again(callback):
                    self._put(callback, _copied(self._made[key]))
        goes_on = known.get("trained", False)
        with by_itself() if goes_on else contextlib.nullcontext():
            call(again, goes_on)
        self._begun, self.main = self._begun + 1, main
        before, self._start, self._received = self._start, self._copies(), {}
        for key, callback in self._named().items():
            if again and key in before and not self.begins_again(callback):
                self._start[key] = before[key]  # what it has changed since is sent, too
        if goes_on:
            self.take(known, own=False)

    def content(self) -> dict[str, Any]:
        """Return attributes, with the names of attributes changed by training."""
        found = {}
        for key, callback in self._named().items():
            values, start = self._plain(callback), self._start.get(key, {})
            changed = [n for n, v in values.items() if not _same(v, start.get(n, _MISSING))]
            if self._shared(callback):
                values = _mapped(values, lambda v: Frozen(v) if isinstance(v, np.ndarray) else v)
            found[key] = (values, changed)
        trained = self._begun > 0 or self._received.get("trained", False)
        return {"begun": self._begun, "trained": trained, "attributes": found}

    def take(self, content: dict[str, Any], *, own: bool) -> None:
        """Take over this rank's commit, or another rank's attributes changed by training."""
        if not own and not self._begun:
            self._received = content
        exact = own and content["begun"] == self._begun  # else from before they began again
        for key, callback in self._named().items():
            if key not in content["attributes"]:  # added since
                continue
            values, changed = content["attributes"][key]
            values = _mapped(values, lambda v: v.value if isinstance(v, Frozen) else v)
            if exact:
                self._put(callback, values)
                continue
            start = _copied(self._start.get(key, {}))
            if own:
                self._put(callback, start)
            # An attribute that is no longer plain on the sender, or here, stays as it is.
            vars(callback).update((name, start[name]) for name in start.keys() & values.keys())
            vars(callback).update((name, values[name]) for name in changed)

    def _named(self) -> dict[str, Any]:
        counts: Counter[str] = Counter()
        found = {}
        for each in self._callbacks():
            kind = type(each).__qualname__
            if hasattr(each, "__dict__"):
                found[f"{kind} {counts[kind]}"] = each
            counts[kind] += 1
        return found

    def _plain(self, callback: Any) -> dict[str, Any]:
        values = vars(callback).items()
        return {name: v for name, v in values if name not in self._hidden and _is_plain(v)}

    def _put(self, callback: Any, values: dict[str, Any]) -> None:
        for name in self._plain(callback).keys() - values.keys():
            del vars(callback)[name]
        vars(callback).update(values)

    def _copies(self) -> dict[str, dict[str, Any]]:
        return {key: _copied(self._plain(each)) for key, each in self._named().items()}


def report_logs(logs: Mapping[str, Any], step: int | None) -> None:
    """Show the numbers of logs in the job's panel."""
    numbers = {name: each for name, each in logs.items() if isinstance(each, (int, float))}
    if numbers:
        report(step=step, **numbers)


def by_itself() -> contextlib.AbstractContextManager[Any]:
    """Reduce the process group to this rank, while this rank alone calls a user's functions."""
    group = default_group()
    return contextlib.nullcontext() if group is None else group.alone()


class Frozen:
    """A value never changed in place, only replaced, so that a copy may be the original."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: Any) -> Frozen:
        return self


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with all that its containers hold changed."""
    if type(value) is dict:
        return {key: _mapped(each, change) for key, each in value.items()}
    if type(value) in _CONTAINERS:
        return type(value)(_mapped(each, change) for each in value)
    return change(value)


def _copied(value: Any) -> Any:
    def copied(each: Any) -> Any:
        if isinstance(each, torch.Tensor):
            return each.detach().clone()
        return each.copy() if isinstance(each, np.ndarray) else each

    return _mapped(value, copied)


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(v, other[k]) for k, v in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, torch.Tensor):
        alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        return alike and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other or (one != one and other != other))  # noqa: PLR0124 - not a number


def _is_plain(value: Any) -> bool:
    if isinstance(value, _PLAIN):
        return not (isinstance(value, np.ndarray) and value.dtype.hasobject)
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return type(value) in _CONTAINERS and all(map(_is_plain, value))
