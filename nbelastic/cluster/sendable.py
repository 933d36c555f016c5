"""Replace values that Dask's connections cannot carry.

Runs in the kernel and in workers, in the thread that sends. A message that msgpack cannot write
makes Dask close the whole stream, and with it the worker, or the kernel's connection. So a message
that may hold a user's value is made safe where it leaves.
"""

from __future__ import annotations

import numbers
from typing import Any

LEAST, MOST = -(2**63), 2**64 - 1
"""The integers that msgpack writes; a greater or smaller one becomes the nearest of them."""

DEEPEST = 32
"""Collections within each other; what is deeper is left out."""

MOST_BYTES = 2**32 - 1
"""Bytes that travel as one value; msgpack writes no more."""

LONGEST = 2**30 - 2
"""Characters of a text that travel."""


def sendable(value: Any, depth: int = DEEPEST) -> Any:
    """Return `value` with all that a message cannot carry replaced by the next best thing.

    Text that is not UTF-8 is escaped, integers are cut to what msgpack writes (64 bits), and what
    is no plain value becomes its number or its name. No code of a user's class runs.
    """
    kind = type(value)
    if value is None or kind in (bool, float, bytes):
        return value
    if kind is str:
        return _text(value)
    if kind is int:
        return min(max(value, LEAST), MOST)
    if kind in (dict, list, tuple) and not depth:
        return "…"
    if kind is dict:
        return {_key(key): sendable(item, depth - 1) for key, item in value.items()}
    if kind in (list, tuple):
        return [sendable(item, depth - 1) for item in value]
    return sendable(_plain(value), depth)


def _text(text: str) -> str:
    text = text if len(text) <= LONGEST else text[:LONGEST] + "…"
    if text.isascii():
        return text
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _key(key: Any) -> Any:
    key = sendable(key)
    return str(key) if isinstance(key, (dict, list)) else key


def _plain(value: Any) -> Any:
    """Return what a value of another type is a kind of, or else its name."""
    kind = type(value)
    if issubclass(kind, int):
        return int.__int__(value)
    if issubclass(kind, float):
        return float.__float__(value)
    if issubclass(kind, str):
        return str.__str__(value)
    if issubclass(kind, (bytes, bytearray)):
        return bytes(memoryview(value))
    if issubclass(kind, dict):
        return dict(dict.items(value))
    if issubclass(kind, (list, tuple)):
        return list(list.__iter__(value) if issubclass(kind, list) else tuple.__iter__(value))
    if kind.__module__ == "numpy" and issubclass(kind, numbers.Integral):
        return int(value)
    if kind.__module__ == "numpy" and issubclass(kind, numbers.Real):
        return float(value)
    return object.__repr__(value)
