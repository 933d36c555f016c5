"""Events and plans as plain values, for messages: dicts, lists, strings and numbers only."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from . import events
from .model import Place, Plan
from .serial import plain, typed

__all__ = ["pack_event", "pack_place", "pack_plan", "unpack_event", "unpack_place", "unpack_plan"]


def pack_event(event: events.Event) -> dict[str, Any]:
    """Write an event as a dict."""
    return {"kind": type(event).__name__, **cast("dict[str, Any]", plain(event))}


def unpack_event(data: dict[str, Any]) -> events.Event:
    """Read :func:`pack_event`'s dict. Fields that it lacks take their defaults."""
    kind = getattr(events, data["kind"])
    names = {field.name for field in dataclasses.fields(kind)}
    fields = {name: value for name, value in data.items() if name in names}
    return cast(events.Event, typed(kind, fields))


def pack_plan(plan: Plan) -> dict[str, Any]:
    """Write a plan as a dict."""
    return cast("dict[str, Any]", plain(plan))


def unpack_plan(data: dict[str, Any]) -> Plan:
    """Read :func:`pack_plan`'s dict."""
    return cast(Plan, typed(Plan, data))


def pack_place(place: Place) -> dict[str, int]:
    """Write a place as a dict."""
    return dataclasses.asdict(place)


def unpack_place(data: dict[str, int]) -> Place:
    """Read :func:`pack_place`'s dict."""
    return Place(**data)
