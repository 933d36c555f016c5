"""Serialization of the machine to a dict of plain values, and back."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import types
import typing
from typing import TYPE_CHECKING, Any

from . import events, reasons
from .events import Event
from .machine import Machine
from .reasons import Reason
from .roster import Roster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def to_dict(machine: Machine) -> dict[str, Any]:
    """Write a machine as a dict that JSON and msgpack can carry."""
    return typing.cast("dict[str, Any]", plain(machine.roster))


def from_dict(data: dict[str, Any]) -> Machine:
    """Read a machine back from :func:`to_dict`'s dict."""
    roster = typing.cast(Roster, typed(Roster, data))
    machine = Machine(roster.limits)
    machine.roster = roster
    return machine


def tag(base: type, key: str, classes: Iterable[type]) -> None:
    """Write the subclasses of a base with their name under a key, and read them by it."""
    _TAGS[base] = (key, {each.__name__: each for each in classes})


_TAGS: dict[type, tuple[str, dict[str, type]]] = {}

_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})


def plain(value: object) -> object:
    """Write dataclasses, enums and collections of them as plain values.

    An event has its class in the item ``kind``, a reason in the item ``code``.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if dataclasses.is_dataclass(kind):
        data = {name: plain(getattr(value, name)) for name in _names(kind)}
        key = _key(kind)
        return data if key is None else {key: kind.__name__, **data}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return [[plain(key), plain(item)] for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(each.name for each in dataclasses.fields(kind))


@functools.cache
def _key(kind: type) -> str | None:
    """Return the key under which instances of a class carry its name, if they do."""
    return next((_TAGS[base][0] for base in kind.__mro__ if base in _TAGS), None)


def typed(kind: Any, value: Any, *, strict: bool = False) -> Any:
    """Read `value`, as :func:`plain` wrote it, as the annotated type `kind`.

    With `strict`, a plain value of another type raises a :class:`TypeError`.
    """
    return _reader(kind, strict)(value)


@functools.cache
def _reader(kind: Any, strict: bool) -> Callable[[Any], Any]:
    """Return the function that reads a type. Messages are many, and their types few."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        inner = _reader(next(arg for arg in args if arg is not type(None)), strict)
        return lambda value: None if value is None else inner(value)
    if origin is dict:
        key, item = _reader(args[0], strict), _reader(args[1], strict)
        return lambda value: {key(k): item(v) for k, v in value}
    if origin is list or (origin is tuple and len(args) == 2 and args[1] is Ellipsis):
        element = _reader(args[0], strict)
        return lambda value: origin(map(element, _sequence(value)))
    if origin is tuple:
        parts = [_reader(arg, strict) for arg in args]
        return lambda value: tuple(
            part(each) for part, each in zip(parts, _sequence(value), strict=True)
        )
    if origin is typing.Annotated:
        return _any_number
    if dataclasses.is_dataclass(kind):
        return functools.partial(_instance, kind, strict)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind
    if strict and kind is not Any:
        return functools.partial(_checked, kind)
    return lambda value: value


def _instance(kind: Any, strict: bool, value: Any) -> Any:
    """Read a dataclass, or one of the classes of a tagged base."""
    key = _key(kind)
    if kind in _TAGS:
        kind = _TAGS[kind][1][value[key]]
    readers = _field_readers(kind, strict)
    return kind(**{name: readers[name](item) for name, item in value.items() if name != key})


@functools.cache
def _field_readers(kind: type, strict: bool) -> dict[str, Callable[[Any], Any]]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: _reader(hints[name], strict) for name in _names(kind)}


def _sequence(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{value!r:.80} is not a list")
    return value


def _any_number(value: Any) -> Any:
    if type(value) not in (int, float):
        raise TypeError(f"{value!r:.80} is not a number")
    return value


def _checked(kind: type, value: Any) -> Any:
    if not _is(value, kind):
        raise TypeError(f"{value!r:.80} is not of type {kind.__name__}")
    return value


def _is(value: object, kind: type) -> bool:
    """Return whether a plain value is of a type; an int is a float, a bool is neither."""
    if kind is float:
        return type(value) is int or (type(value) is float and math.isfinite(value))
    return type(value) is kind


def _subclasses(module: Any, base: type) -> Iterable[type]:
    found = [each for each in vars(module).values() if isinstance(each, type)]
    return [each for each in found if issubclass(each, base) and each.__module__ == module.__name__]


tag(Reason, "code", _subclasses(reasons, Reason))
tag(Event, "kind", _subclasses(events, Event))
