"""The machine as a dict of plain values, and back."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from typing import Any

from .machine import Machine
from .roster import Roster

__all__ = ["from_dict", "plain", "to_dict", "typed"]


def to_dict(machine: Machine) -> dict[str, Any]:
    """Write a machine to a dict that JSON and msgpack can carry."""
    return typing.cast("dict[str, Any]", plain(machine.roster))


def from_dict(data: dict[str, Any]) -> Machine:
    """Read a machine back from :func:`to_dict`'s dict."""
    roster = typing.cast(Roster, typed(Roster, data))
    machine = Machine(roster.limits)
    machine.roster = roster
    return machine


def plain(value: object) -> object:
    """Write dataclasses, enums and collections of them as dicts, lists and plain values."""
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return [[plain(key), plain(item)] for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def typed(kind: Any, value: Any) -> Any:
    """Build `value`, as :func:`plain` wrote it, into the annotated type `kind`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        inner = [arg for arg in args if arg is not type(None)]
        return None if value is None else typed(inner[0], value)
    if origin is dict:
        return {typed(args[0], key): typed(args[1], item) for key, item in value}
    if origin is list:
        return [typed(args[0], item) for item in value]
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(typed(args[0], item) for item in value)
        return tuple(typed(arg, item) for arg, item in zip(args, value, strict=True))
    if dataclasses.is_dataclass(kind):
        hints = _hints(typing.cast(Any, kind))
        fields = {name: typed(hints[name], item) for name, item in value.items()}
        return typing.cast(Any, kind)(**fields)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    return value


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)
