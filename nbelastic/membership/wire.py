"""Serialization of events and plans for messages."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from . import events
from .model import Place, Plan
from .serial import plain, typed

__all__ = ["pack_event", "pack_place", "pack_plan", "unpack_event", "unpack_place", "unpack_plan"]


def pack_event(event: events.Event) -> dict[str, Any]:
    """Write an event as a dict."""
    return cast("dict[str, Any]", plain(event))


def unpack_event(data: dict[str, Any]) -> events.Event:
    """Read :func:`pack_event`'s dict. Fields that it lacks take their defaults.

    Raises
    ------
    ValueError
        It is not an event.
    """
    try:
        kind = _KINDS[data["kind"]]
        names = {field.name for field in dataclasses.fields(kind)}
        fields = {name: value for name, value in data.items() if name in names}
        return cast(events.Event, typed(kind, fields, strict=True))
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise ValueError(f"not an event of a job: {data!r:.200} ({error!r:.200})") from error


_KINDS = {
    name: kind
    for name, kind in ((name, getattr(events, name)) for name in events.__all__)
    if issubclass(kind, events.Event)
}


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
