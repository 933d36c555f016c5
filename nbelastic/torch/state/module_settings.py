"""Settings and modes of modules, and values in them that training changes.

None of it is in a ``state_dict``. A rank that joins gets settings that training has changed from
the rank that sends the state (:class:`ModuleSettings`). Values that change from commit to commit
are neither rolled back nor sent; :func:`moving_values` is for a warning of that.
"""

from __future__ import annotations

import types
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from nbelastic.errors import StateMismatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["ModuleChanges", "ModuleSettings", "moving_values"]

_BASE = frozenset(vars(torch.nn.Module())) - {"training"}
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_NAMED = (types.FunctionType, types.BuiltinFunctionType, type)

_SAMPLED = 16
"""Values of a tensor that are looked at."""

Place = tuple[int, str]
"""Number of a model, and the path of a submodule."""


class ModuleChanges(NamedTuple):
    """What has changed in a state's models since it was built.

    Attributes
    ----------
    kinds : dict
        Names of modules' classes that are others by now; None for a module that is gone.
    settings : dict
        Plain values by their attributes.
    functions : dict
        Names of functions and classes by their attributes.
    """

    kinds: dict[Place, str | None]
    settings: dict[Place, dict[str, Any]]
    functions: dict[Place, dict[str, str]]


class ModuleSettings:
    """Classes and settings of the modules of some models, as they are now."""

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        self._models = list(models)
        self._kinds: dict[Place, str | None] = {}
        self._settings: dict[Place, dict[str, Any]] = {}
        self._functions: dict[Place, dict[str, str]] = {}
        for number, model in enumerate(self._models):
            for path, module in model.named_modules():
                place = (number, path)
                if not isinstance(module, LazyModuleMixin):  # it becomes another class
                    self._kinds[place] = _name(type(module))
                held = _held_by(module)
                self._settings[place] = {n: v for n, v in held.items() if _is_plain(v)}
                self._functions[place] = {
                    n: _name(v) for n, v in held.items() if isinstance(v, _NAMED)
                }

    def changes(self) -> ModuleChanges:
        """Return what is different by now."""
        now = ModuleSettings(self._models)
        lazy = self._settings.keys() - self._kinds.keys()
        kinds = {
            place: now._kinds.get(place)
            for place in dict.fromkeys([*self._kinds, *now._kinds])
            if place not in lazy and self._kinds.get(place) != now._kinds.get(place)
        }
        return ModuleChanges(
            kinds,
            _different(self._settings, now._settings),
            _different(self._functions, now._functions),
        )

    @staticmethod
    def check(models: Sequence[torch.nn.Module], changed: ModuleChanges) -> None:
        """Refuse changes that cannot be carried over to this rank's models.

        Raises
        ------
        StateMismatch
            A module was replaced by one of another class, or a function by another.
        """
        mine = ModuleSettings(models)
        for place, kind in changed.kinds.items():
            if mine._kinds.get(place) != kind:
                raise _replaced(place[1] or "the model", mine._kinds.get(place), kind)
        for place, functions in changed.functions.items():
            for name, function in functions.items():
                own = mine._functions.get(place, {}).get(name)
                if own != function:
                    raise _replaced(f"{place[1]}.{name}".lstrip("."), own, function)

    @staticmethod
    def apply(models: Sequence[torch.nn.Module], changed: ModuleChanges) -> None:
        """Make settings of this rank's modules those of the sender that have changed there."""
        modules = [dict(model.named_modules()) for model in models]
        for (number, path), settings in changed.settings.items():
            module = modules[number].get(path)
            if module is not None:
                module.__dict__.update(settings)


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
            for name, value in _held_by(module).items():
                token = None if name == "training" else _token(value)
                if token is not None:
                    found[f"{kind.__name__}.{name}" if not path else f"{path}.{name}"] = token
    return found


def _token(value: object) -> object:
    if type(value) in (int, float):
        return value
    if isinstance(value, (list, deque, set, dict)):
        return len(value), id(value[-1]) if isinstance(value, (list, deque)) and value else 0
    if isinstance(value, torch.Tensor):
        if value.requires_grad or value.layout is not torch.strided or value.is_quantized:
            return None
        if not value.is_cpu:
            return tuple(value.shape), value._version
        return tuple(value.shape), *map(str, value.detach().flatten()[:_SAMPLED].tolist())
    return None


def _held_by(module: torch.nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _BASE}


def _is_plain(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _different(before: dict[Place, Any], now: dict[Place, Any]) -> dict[Place, Any]:
    """Return values that are new or others by now, by place and attribute."""
    found = {}
    for place, values in now.items():
        old = before.get(place, {})
        new = {n: v for n, v in values.items() if n not in old or not _same(old[n], v)}
        if new:
            found[place] = new
    return found


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or one != one)  # noqa: PLR0124 (not a number)


def _replaced(what: str, mine: str | None, theirs: str | None) -> StateMismatch:
    return StateMismatch(
        f"{what}: expected {mine or 'nothing'}, came {theirs or 'nothing'}. It was replaced after "
        "training began, and a rank that joins builds its model anew: build the model as it will "
        "be, and switch by a setting, such as a flag that forward() reads"
    )
