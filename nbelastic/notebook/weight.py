"""How heavy a captured variable is, roughly, without pickling it."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["LARGE", "heavy", "weight"]

LARGE = 16 * 2**20
"""Bytes from which on a variable is named to its user."""

MOST_ITEMS = 1_000
DEEPEST = 4


def heavy(captured: Mapping[str, Any], least: int = LARGE) -> list[tuple[str, int]]:
    """Return the variables of at least `least` bytes with their sizes, the heaviest first.

    Parameters
    ----------
    captured : mapping of str to object
        What would travel.
    least : int, default 16 MiB
        Bytes.
    """
    sizes = [(name, weight(value)) for name, value in captured.items()]
    return sorted((s for s in sizes if s[1] >= least), key=lambda s: (-s[1], s[0]))


def weight(value: Any) -> int:
    """Return about how many bytes a value holds.

    Parameters
    ----------
    value : object
        Anything; arrays, tensors, models and containers of them are looked into.
    """
    return _weight(value, DEEPEST, set())


def _weight(value: Any, depth: int, seen: set[int]) -> int:
    if id(value) in seen or isinstance(value, type) or inspect.ismodule(value):
        return 0
    seen.add(id(value))
    try:
        known = _known(value)
        if known is not None:
            return known
        own = sys.getsizeof(value)
        return own + (_parts(value, depth - 1, seen) if depth else 0)
    except Exception:  # attributes of any class may raise; a size is no reason to fail
        return 0


def _known(value: Any) -> int | None:
    """Return what a value says of itself: arrays, tensors, tables."""
    if hasattr(value, "__dask_graph__"):
        return 0  # a plan, not data
    if callable(getattr(value, "element_size", None)) and callable(value.nelement):
        return int(value.element_size() * value.nelement())
    if callable(getattr(value, "memory_usage", None)) and hasattr(value, "columns"):
        return int(value.memory_usage(index=True).sum())
    size = getattr(value, "nbytes", None)
    return int(size) if isinstance(size, int) else None


def _parts(value: Any, depth: int, seen: set[int]) -> int:
    if isinstance(value, dict):
        return _sample(value.values(), len(value), depth, seen)
    if isinstance(value, (list, tuple, set, frozenset)):
        return _sample(value, len(value), depth, seen)
    inner = getattr(value, "__dict__", None)
    return _sample(inner.values(), len(inner), depth, seen) if isinstance(inner, dict) else 0


def _sample(values: Iterable[Any], total: int, depth: int, seen: set[int]) -> int:
    """Add up the items; of very many, the first stand for all."""
    found = sum(_weight(item, depth, seen) for item, _ in zip(values, range(MOST_ITEMS)))  # noqa: B905  # the first thousand
    return found if total <= MOST_ITEMS else found * total // MOST_ITEMS
