"""Settings of modules and optimizers, such as modes; and moving values.

No ``state_dict`` has settings, and training may change them (``bn.eval()``, ``dropout.p = 0``). A
commit keeps all settings of an object. To another rank, or to a checkpoint, those are sent that
have changed since the object was captured first, so that what differs by rank stays. A module or a
function that was replaced cannot be sent, and is described, so that such a rank can be refused.

Other values in modules that change from commit to commit are neither rolled back nor sent;
:func:`moving_values` is for a warning of that.
"""

from __future__ import annotations

import functools
import operator
import types
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.weak import WeakIdKeyDictionary

from nbelastic.torch.state.flatten import ATOMS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_Object = torch.nn.Module | torch.optim.Optimizer

COMPILED = "_orig_mod"  # name of a model in the one that ``torch.compile`` returns

_BASE = frozenset(vars(torch.nn.Module())) - {"training"}
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)

_SAMPLED = 16  # values of a tensor that are looked at

_built: Any = WeakIdKeyDictionary()  # settings of each part by name, from its first capture


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


class SentSettings:
    """Settings of an object, changed since it was built, on the sending rank.

    The classes of modules, and functions among their attributes, are `described` by kind and path.
    """

    def __init__(
        self, changed: Mapping[str, Mapping[str, Any]], described: Mapping[tuple[str, str], str]
    ) -> None:
        self._changed = changed
        self.described = described

    def restore(self, obj: _Object) -> None:
        """Set them on an object of this rank."""
        for path, part in _parts_of(obj).items():
            live = vars(part)
            new = self._changed.get(uncompiled(path), {})
            if COMPILED in live.get(
                "_modules", ()
            ):  # it refers to the one within for what it lacks
                new = {name: value for name, value in new.items() if name in live}
            _set(live, new)


class Settings:
    """Settings of an optimizer, or of all modules of a model, as they are now."""

    def __init__(self, obj: _Object) -> None:
        self._obj = obj
        self._parts = _parts_of(obj)
        self._kinds = [*map(type, self._parts.values())]
        self._dicts = [part.__dict__ for part in self._parts.values()]
        self._sizes = [*map(len, self._dicts)]
        self._present = [frozenset(each) for each in self._dicts]
        self._names = [_settings_in(part) for part in self._parts.values()]
        self._readers = [*map(_reader_of, self._names)]
        self._rows = self._read()
        for part, values in zip(self._parts.values(), self._values(), strict=True):
            _built.setdefault(part, values)

    @property
    def described(self) -> dict[tuple[str, str], str]:
        """Classes of modules, and functions among their attributes, by kind and path."""
        found = {}
        for (raw, part), kind in zip(self._parts.items(), self._kinds, strict=True):
            path = uncompiled(raw)
            found["class of", path] = getattr(kind, "cls_to_become", kind).__qualname__
            for name, value in vars(part).items():
                if isinstance(value, _FUNCTIONS) and name not in _BASE:
                    found["function", f"{path}.{name}".lstrip(".")] = _describe(value)
        return found

    def renewed(self) -> Settings:
        """Return the present settings: this object, if they are the same.

        Modules must be the same.
        """
        try:
            if [*map(len, self._dicts)] == self._sizes and self._read() == self._rows:
                return self
        except Exception:  # an attribute is gone, or is a tensor by now
            pass
        return Settings(self._obj)

    def restore(self, obj: _Object) -> None:
        """Set the settings of the same object again, and remove new settings."""
        base = _base_of(obj)
        for live, present, values in zip(self._dicts, self._present, self._values(), strict=True):
            _set(live, values)
            new = [name for name in live if name not in present and name not in base]
            for name in [each for each in new if is_plain(live[each])]:
                del live[name]

    def __reduce__(self) -> tuple[Any, ...]:
        changed: dict[str, dict[str, Any]] = {}
        for (path, part), values in zip(self._parts.items(), self._values(), strict=True):
            built = _built.get(part, {})
            new = {n: v for n, v in values.items() if n not in built or not _same(built[n], v)}
            if new:
                changed.setdefault(uncompiled(path), {}).update(new)
        return SentSettings, (changed, self.described)

    def _read(self) -> list[tuple[Any, ...]]:
        return [read(each) for read, each in zip(self._readers, self._dicts, strict=True)]

    def _values(self) -> Iterator[dict[str, Any]]:
        for names, row in zip(self._names, self._rows, strict=True):
            yield dict(zip(names, row, strict=True))


def moving_values(models: Iterable[torch.nn.Module]) -> dict[str, object]:
    """Return tokens of values in users' modules that no ``state_dict`` has, by attribute.

    A token is different if its value has probably changed. Values with a gradient belong to a step.
    """
    found: dict[str, object] = {}
    for model in models:
        for path, module in model.named_modules():
            kind = type(module)
            own_state = kind.get_extra_state is not torch.nn.Module.get_extra_state
            if own_state or kind.__module__.partition(".")[0] in ("torch", "torchvision"):
                continue
            for name, value in vars(module).items():
                token = None if name in _BASE else _token(value)
                if token is not None:
                    found[f"{kind.__name__}.{name}" if not path else f"{path}.{name}"] = token
    return found


def _token(value: object) -> object:
    if isinstance(value, (list, deque, set, dict)):
        return len(value), id(value[-1]) if isinstance(value, (list, deque)) and value else 0
    if isinstance(value, torch.Tensor):
        if value.requires_grad or value.layout is not torch.strided or value.is_quantized:
            return None
        if not value.is_cpu:
            return tuple(value.shape), value._version
        return tuple(value.shape), *map(str, value.detach().flatten()[:_SAMPLED].tolist())
    return None


def _parts_of(obj: _Object) -> dict[str, Any]:
    return dict(obj.named_modules()) if isinstance(obj, torch.nn.Module) else {"": obj}


def _base_of(obj: _Object) -> frozenset[str]:
    return _BASE if isinstance(obj, torch.nn.Module) else attributes_of_optimizers()


def _settings_in(part: _Object) -> list[str]:
    if isinstance(part, LazyModuleMixin):  # it sets some of them together with its parameters
        return []
    base = _base_of(part)
    return [name for name, value in vars(part).items() if name not in base and is_plain(value)]


def _reader_of(names: list[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Return a function that reads attributes, in C for several names."""
    if len(names) > 1:
        return operator.itemgetter(*names)
    return lambda live: tuple(live[name] for name in names)


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


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or one != one)  # noqa: PLR0124 (not a number)


def _describe(function: Any) -> str:
    """Return a text of a function that is the same on all ranks."""
    while isinstance(function, (functools.partial, types.MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{name} (line {function.__code__.co_firstlineno})" if "<lambda>" in name else name
