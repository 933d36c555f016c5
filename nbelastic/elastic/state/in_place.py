"""Values of a state given back in place, because the user may refer to them, too.

In ``history = []; state = ObjectState(history=history)`` the function goes on to append to
``history``. If a restore gave the state another list, the two would part.

Lists, dicts, sets, deques, arrays, tensors, random generators and objects of plain classes are
filled again, also within each other. Anything else is replaced by a copy.
"""

from __future__ import annotations

import collections
import copy
import random
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_ROWS = (list, set, collections.deque)
_OF_PICKLE = ("__setstate__", "__deepcopy__", "__copy__")
_DEFINED_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_getstate = getattr(object, "__getstate__", None)  # new in Python 3.11


class Originals:
    """Values that a commit has copied, to be filled again from the copies."""

    def __init__(self, memo: Mapping[int, Any]) -> None:
        self._memo = memo  # of the deep copies; keeps the copies, whose ids are used here
        self._originals = {}
        for each in memo.get(id(memo), ()):
            copied = memo.get(id(each))
            if copied is not each and type(copied) is type(each):
                self._originals[id(copied)] = each

    def restored(self, saved: Any, memo: dict[int, Any]) -> Any:
        """Return the value that `saved` is a copy of, with its content again."""
        find = lambda _, copied: self._originals.get(id(copied))  # noqa: E731
        return _refill(memo, find, lambda each: copy.deepcopy(each, memo))(None, saved)


def adopt(live: Any, came: Any, memo: dict[int, Any]) -> Any:
    """Return `live` with the content of `came`, or `came` itself where that cannot be done."""

    def counterpart(mine: Any, theirs: Any) -> Any:
        return mine if mine is not theirs and type(mine) is type(theirs) else None

    return _refill(memo, counterpart, lambda each: each)(live, came)


def _refill(
    memo: dict[int, Any], find: Callable[[Any, Any], Any], replace: Callable[[Any], Any]
) -> Callable[[Any, Any], Any]:
    """Return a function that gives found values new content, and replaces all else."""

    def inner(mine: Any, came: Any) -> Any:
        if id(came) in memo:
            return memo[id(came)]
        if type(came) is tuple:
            own = [*(mine if type(mine) is tuple else ()), *[None] * len(came)]
            return memo.setdefault(id(came), tuple(map(inner, own, came)))
        live = find(mine, came)
        if live is not None:
            memo[id(came)] = live  # before its parts, which may refer to it
            if _fill(live, came, inner):
                return live
            del memo[id(came)]
        return replace(came)

    return inner


def attributes_in(value: object) -> dict[str, Any] | None:
    """Return the attributes of an object without other content; None if it may have more."""
    kind = type(value)
    if kind is types.SimpleNamespace:
        return vars(value)
    if (
        kind.__reduce_ex__ is not object.__reduce_ex__
        or kind.__reduce__ is not object.__reduce__
        or getattr(kind, "__getstate__", None) is not _getstate
        or any(hasattr(kind, name) for name in _OF_PICKLE)
        or any(vars(each).get("__slots__") for each in kind.__mro__)
        or not all(each is object or each.__flags__ & _DEFINED_IN_PYTHON for each in kind.__mro__)
    ):
        return None
    return getattr(value, "__dict__", None)


def _fill(value: Any, saved: Any, inner: Callable[[Any, Any], Any]) -> bool:
    """Give a value the content of a copy; return whether it can have it.

    Parts are made by `inner`, of a part of the value and one of the copy.
    """
    kind = type(value)
    if kind in _MAPPINGS:
        items = [(inner(None, key), inner(value.get(key), each)) for key, each in saved.items()]
        value.clear()
        for key, each in items:  # update() of a Counter would count
            value[key] = each
    elif kind in _ROWS:
        # Parts of a set have no order by which they belong to each other.
        mine = [*(() if kind is set else value), *[None] * len(saved)]
        parts = [inner(own, each) for own, each in zip(mine, saved, strict=False)]
        value.clear()
        (value.update if kind is set else value.extend)(parts)
    elif kind is random.Random:
        value.setstate(saved.getstate())
    elif _is_a(value, "numpy.random", "RandomState"):
        value.set_state(saved.get_state())
    elif _is_a(value, "numpy.random", "Generator"):
        value.bit_generator.state = saved.bit_generator.state
    elif _is_a(value, "numpy", "ndarray") or _is_a(value, "torch", "Tensor"):
        if not _is_like(value, saved):
            return False
        (value if hasattr(value, "flags") else value.detach())[...] = saved
    elif (attributes := attributes_in(value)) is not None:
        found = {name: inner(attributes.get(name), each) for name, each in vars(saved).items()}
        attributes.clear()
        attributes.update(found)
    else:
        return False
    return True


def _is_a(value: object, module: str, name: str) -> bool:
    """Return whether a value is of a class of a module that may not be imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def _is_like(value: Any, saved: Any) -> bool:
    """Return whether an array or a tensor can take the values of another in place."""
    if value.shape != saved.shape or value.dtype != saved.dtype:
        return False
    if hasattr(value, "flags"):
        return bool(value.flags.writeable) and not value.dtype.hasobject
    return bool(value.device == saved.device and value.is_contiguous() and not value.is_inference())
