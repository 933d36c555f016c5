"""Settings of modules, such as modes, rates and flags; and values that move.

No ``state_dict`` has settings, and training may change them (``bn.eval()``, ``dropout.p = 0``). A
commit keeps all of a model's settings. To another rank, or to a checkpoint, those are sent that
have changed since the model was captured first, so that what differs by rank stays. A module or a
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
    from collections.abc import Iterable, Iterator, Mapping

COMPILED = "_orig_mod"  # name of a model in the one that ``torch.compile`` returns

_BASE = frozenset(vars(torch.nn.Module())) - {"training"}
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)

_SAMPLED = 16  # values of a tensor that are looked at

_built: Any = WeakIdKeyDictionary()  # settings of each module by name, from its first capture

_ANY = ("_modules",)  # attribute that all modules have


def uncompiled(path: str) -> str:
    """Return a module's path without the modules that ``torch.compile`` has put around others."""
    return ".".join(part for part in path.split(".") if part != COMPILED)


class SentSettings:
    """Settings that have changed since a model was built, on the rank that sends them.

    The classes of modules, and functions among their attributes, are `described` by kind and path.
    """

    def __init__(
        self, changed: Mapping[str, Mapping[str, Any]], described: Mapping[tuple[str, str], str]
    ) -> None:
        self._changed = changed
        self.described = described

    def restore(self, model: torch.nn.Module) -> None:
        """Set them on a model of this rank."""
        for path, module in model.named_modules():
            live = vars(module)
            new = self._changed.get(uncompiled(path), {})
            if COMPILED in module._modules:  # it refers to the module within for what it lacks
                new = {name: value for name, value in new.items() if name in live}
            _set(live, new)


class ModuleSettings:
    """Settings of all modules of a model as they are now."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._modules = dict(model.named_modules())
        self._kinds = [*map(type, self._modules.values())]
        self._dicts = [module.__dict__ for module in self._modules.values()]
        self._sizes = [*map(len, self._dicts)]
        self._present = [frozenset(each) for each in self._dicts]
        self._names = [_settings_in(module) for module in self._modules.values()]
        # Of one name an itemgetter would make no tuple.
        self._readers = [operator.itemgetter(*(names or _ANY), *_ANY) for names in self._names]
        self._rows = self._read()
        for module, values in zip(self._modules.values(), self._values(), strict=True):
            _built.setdefault(module, values)

    @property
    def described(self) -> dict[tuple[str, str], str]:
        """Classes of modules, and functions among their attributes, by kind and path."""
        found = {}
        for (raw, module), kind in zip(self._modules.items(), self._kinds, strict=True):
            path = uncompiled(raw)
            found["class of", path] = getattr(kind, "cls_to_become", kind).__qualname__
            for name, value in vars(module).items():
                if isinstance(value, _FUNCTIONS) and name not in _BASE:
                    found["function", f"{path}.{name}".lstrip(".")] = _describe(value)
        return found

    def renewed(self) -> ModuleSettings:
        """Return the present settings: this object, if they are the same.

        The modules must be the same.
        """
        try:
            if [*map(len, self._dicts)] == self._sizes and self._read() == self._rows:
                return self
        except Exception:  # an attribute is gone, or is a tensor by now
            pass
        return ModuleSettings(self._model)

    def restore(self, model: torch.nn.Module) -> None:
        """Set the settings of the same model again, and remove those that are new."""
        del model
        for live, present, values in zip(self._dicts, self._present, self._values(), strict=True):
            _set(live, values)
            for name in [n for n, v in live.items() if n not in present and _is_setting(n, v)]:
                del live[name]

    def __reduce__(self) -> tuple[Any, ...]:
        changed: dict[str, dict[str, Any]] = {}
        for (path, module), values in zip(self._modules.items(), self._values(), strict=True):
            built = _built.get(module, {})
            new = {n: v for n, v in values.items() if n not in built or not _same(built[n], v)}
            if new:
                changed.setdefault(uncompiled(path), {}).update(new)
        return SentSettings, (changed, self.described)

    def _read(self) -> list[tuple[Any, ...]]:
        return [read(each) for read, each in zip(self._readers, self._dicts, strict=True)]

    def _values(self) -> Iterator[dict[str, Any]]:
        for names, row in zip(self._names, self._rows, strict=True):
            yield dict(zip(names, row, strict=False))


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


def _settings_in(module: torch.nn.Module) -> list[str]:
    if isinstance(module, LazyModuleMixin):  # it sets some of them together with its parameters
        return []
    return [name for name, value in vars(module).items() if _is_setting(name, value)]


def _is_setting(name: str, value: object) -> bool:
    return name not in _BASE and _is_plain(value)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return type(value) in (tuple, torch.Size) and all(map(_is_plain, value))
    return type(value) in ATOMS


def _set(live: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set attributes, but not in place of what is no setting by now."""
    for name, value in values.items():
        if name not in live or (live[name] is not value and _is_plain(live[name])):
            live[name] = value


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or one != one)  # noqa: PLR0124 (not a number)


def _describe(function: Any) -> str:
    """Return a text of a function that is the same on all ranks."""
    while isinstance(function, (functools.partial, types.MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{name} (line {function.__code__.co_firstlineno})" if "<lambda>" in name else name
