"""Identity and life of objects: the same ones, and calls that outlive theirs."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any


def same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Return whether two sequences are of the same objects; comparing tensors yields tensors."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


class WhileAlive:
    """Call of a method as long as its object lives; a copy of the call does nothing."""

    def __init__(self, method: Callable[[], Any] | None) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)

    def __call__(self, *_: object) -> Any:
        method = None if self._method is None else self._method()
        return None if method is None else method()

    def __reduce__(self) -> tuple[Any, ...]:
        return WhileAlive, (None,)
