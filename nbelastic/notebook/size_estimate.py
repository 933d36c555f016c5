"""Estimate of the size of captured variables, without pickling them."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LARGE = 16 * 2**20
"""Bytes from which the user is warned of a variable."""

MOST_ITEMS = 1_000
DEEPEST = 4


def large_variables(captured: Mapping[str, Any], least: int = LARGE) -> list[tuple[str, int]]:
    """Return the variables of at least `least` bytes with their sizes, the largest first."""
    sizes = [(name, estimated_size(value)) for name, value in captured.items()]
    return sorted((s for s in sizes if s[1] >= least), key=lambda s: (-s[1], s[0]))


def estimated_size(value: Any) -> int:
    """Return an estimate of the bytes in arrays, tensors, models and containers of them."""
    return _estimate(value, DEEPEST, set())


def _estimate(value: Any, depth: int, seen: set[int]) -> int:
    if id(value) in seen or isinstance(value, type) or inspect.ismodule(value):
        return 0
    seen.add(id(value))
    try:
        known = _known(value)
        if known is not None:
            return known
        own = sys.getsizeof(value)
        return own + (_parts(value, depth - 1, seen) if depth else 0)
    except Exception:  # attributes of any class may raise; the estimate must not
        return 0


def _known(value: Any) -> int | None:
    """Return the size that arrays, tensors and tables report."""
    if hasattr(value, "__dask_graph__"):
        return 0  # a task graph, not data
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
    """Add up the items, extrapolated from the first thousand."""
    found = sum(_estimate(item, depth, seen) for item, _ in zip(values, range(MOST_ITEMS)))  # noqa: B905  # the first thousand
    return found if total <= MOST_ITEMS else found * total // MOST_ITEMS
