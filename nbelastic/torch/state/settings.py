"""Settings of modules and optimizers, such as modes.

No ``state_dict`` has settings, and training may change them (``bn.eval()``, ``dropout.p = 0``). A
commit keeps all settings of an object. To another rank, or to a checkpoint, those are sent that
have changed since the object was captured first, so that what differs by rank stays. A module or a
function that was replaced cannot be sent, and is described, so that such a rank can be refused.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from nbelastic.torch.state.flatten import ATOMS

_Object = torch.nn.Module | torch.optim.Optimizer

COMPILED = "_orig_mod"  # name of a model in the one that ``torch.compile`` returns

_BASE = frozenset(vars(torch.nn.Module())) - {"training"}
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)

# Settings of each part by name, from its first capture.
_built: weakref.WeakKeyDictionary[_Object, Mapping[str, Any]] = weakref.WeakKeyDictionary()


@functools.cache
def attributes_of_optimizers() -> frozenset[str]:
    """Return attributes of any optimizer: torch's, ours, those of schedulers and scalers."""
    torchs = vars(torch.optim.SGD([torch.zeros(1)]))  # the first one of a process imports Dynamo
    ours = {"_reducer", "_op", "_skips"}
    return frozenset(
        {*torchs, *ours, "step", "_opt_called", "_step_count", "grad_scale", "found_inf"}
    )


def uncompiled(path: str) -> str:
    """Return a module's path without the wrappers of ``torch.compile``."""
    return ".".join(part for part in path.split(".") if part != COMPILED)


class SentSettings(NamedTuple):
    """Settings of an object that have changed since it was built, on the sending rank."""

    changed: Mapping[str, Mapping[str, Any]]  # by paths of parts
    described: Mapping[tuple[str, str], str]

    def restore(self, obj: _Object) -> None:
        """Set them on an object of this rank."""
        parts = dict(obj.named_modules()) if isinstance(obj, torch.nn.Module) else {"": obj}
        for path, part in parts.items():
            live, new = vars(part), self.changed.get(uncompiled(path), {})
            if COMPILED in live.get("_modules", ()):  # the one within has what it lacks
                new = {name: value for name, value in new.items() if name in live}
            _set(live, new)


class Settings:
    """Settings of an optimizer, or of all modules of a model by their paths, as they are now."""

    def __init__(self, parts: Mapping[str, _Object]) -> None:
        # Each part's settings, and the names of all its attributes.
        self._parts = [(p, e, _settings_of(e), frozenset(vars(e))) for p, e in parts.items()]
        for _, part, values, _ in self._parts:
            _built.setdefault(part, values)

    def places(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Return for each setting its dictionary, and its name."""
        found = [(vars(part), name) for _, part, values, _ in self._parts for name in values]
        return [live for live, _ in found], [name for _, name in found]

    @property
    def described(self) -> dict[tuple[str, str], str]:
        """Classes of modules, and functions among their attributes, by kind and path."""
        found = {}
        for raw, part, *_ in self._parts:
            path = uncompiled(raw)
            found["class of", path] = type(part).__qualname__
            for name, value in vars(part).items():
                if isinstance(value, _FUNCTIONS) and name not in _BASE:
                    found["function", f"{path}.{name}".lstrip(".")] = _describe(value)
        return found

    def restore(self, obj: _Object) -> None:
        """Set the settings of the same object again, and remove new settings."""
        del obj
        for _, part, values, names in self._parts:
            live = vars(part)
            _set(live, values)
            for name in _settings_of(part).keys() - names:
                del live[name]

    def __reduce__(self) -> tuple[Any, ...]:
        changed: dict[str, dict[str, Any]] = {}
        for path, part, values, _ in self._parts:
            built = _built.get(part, {})
            new = {n: v for n, v in values.items() if n not in built or not _same(built[n], v)}
            changed.setdefault(uncompiled(path), {}).update(new)
        return SentSettings, (changed, self.described)


def _settings_of(part: _Object) -> dict[str, Any]:
    base = _BASE if isinstance(part, torch.nn.Module) else attributes_of_optimizers()
    return {n: v for n, v in vars(part).items() if n not in base and is_plain(v)}


def is_plain(value: object) -> bool:
    """Return whether a value is a number, a string, a flag, or a tuple of them."""
    if isinstance(value, tuple):
        return type(value) in (tuple, torch.Size) and all(map(is_plain, value))
    return type(value) in ATOMS


def _set(live: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set attributes, but not in place of what is no setting by now."""
    for name, value in values.items():
        if name not in live or (live[name] is not value and is_plain(live[name])):
            live[name] = value


def _same(first: object, value: object) -> bool:
    nan = value != value  # noqa: PLR0124
    return type(first) is type(value) and (first == value or nan)


def _describe(function: Any) -> str:
    """Return a text of a function that is the same on all ranks."""
    while isinstance(function, (functools.partial, types.MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{name} (line {function.__code__.co_firstlineno})" if "<lambda>" in name else name
