"""The machine as a dict of plain values, and back."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from typing import Any

from .machine import Machine
from .roster import Roster

__all__ = ["from_dict", "to_dict"]


def to_dict(machine: Machine) -> dict[str, Any]:
    """Write a machine to a dict that JSON and msgpack can carry."""
    return typing.cast("dict[str, Any]", _plain(machine.roster))


def from_dict(data: dict[str, Any]) -> Machine:
    """Read a machine back from :func:`to_dict`'s dict."""
    roster = typing.cast(Roster, _typed(Roster, data))
    machine = Machine(roster.limits)
    machine.roster = roster
    return machine


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return [[_plain(key), _plain(item)] for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _typed(kind: Any, value: Any) -> Any:
    """Build `value`, as :func:`_plain` wrote it, into the annotated type `kind`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        inner = [arg for arg in args if arg is not type(None)]
        return None if value is None else _typed(inner[0], value)
    if origin is dict:
        return {_typed(args[0], key): _typed(args[1], item) for key, item in value}
    if origin is list:
        return [_typed(args[0], item) for item in value]
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_typed(args[0], item) for item in value)
        return tuple(_typed(arg, item) for arg, item in zip(args, value, strict=True))
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        fields = {f.name: _typed(hints[f.name], value[f.name]) for f in dataclasses.fields(kind)}
        return typing.cast(Any, kind)(**fields)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    return value
