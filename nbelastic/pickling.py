"""Pickling of functions and classes with the file names of their code.

From version 3.1.3 on, cloudpickle writes ``<dynamic-code>`` instead. Then a traceback could not
show the line in which a rank has failed.

Functions of ``functools.lru_cache`` in ``__main__`` or within functions are sent like others there,
by value, with empty caches; cloudpickle would send their names only. A ``cached_property`` has a
lock up to Python 3.11, which is left out.
"""

from __future__ import annotations

import collections
import functools
import io
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, ModuleType
from typing import Any

import cloudpickle

_DEEPEST = 10  # levels that are searched for what cannot be pickled

_reduce_code: Callable[[CodeType], tuple[Any, ...]] = cloudpickle.Pickler.dispatch_table[CodeType]


def _reduce(code: CodeType) -> tuple[Any, ...]:
    make, arguments = _reduce_code(code)
    return _restore, (make, arguments, code.co_filename)


def _restore(make: Callable[..., CodeType], arguments: tuple[Any, ...], filename: str) -> CodeType:
    return make(*arguments).replace(co_filename=filename)


_Cached = type(functools.lru_cache(lambda: None))


def _reduce_cached(function: Any) -> str | tuple[Any, ...]:
    name = str(function.__qualname__)
    if function.__module__ != "__main__" and "<" not in name:
        return name
    parameters = function.cache_parameters()
    return _cached, (function.__wrapped__, parameters["maxsize"], parameters["typed"])


def _cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> object:
    return functools.lru_cache(maxsize, typed)(function)


def _reduce_property(found: functools.cached_property[Any]) -> tuple[Any, ...]:
    named = {name: vars(found)[name] for name in ("attrname", "__doc__")}
    return functools.cached_property, (found.func,), named  # without its lock


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, but for the names of files; for ``pickle.loads``."""

    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child(
        {
            CodeType: _reduce,
            _Cached: _reduce_cached,
            functools.cached_property: _reduce_property,
        }
    )


def dumps(value: object) -> bytes:
    """Return `value` as cloudpickle writes it, the names of source files kept."""
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def failing_part(
    value: object,
    use: Callable[[Any], object],
    parts: Callable[[Any], Iterable[tuple[str, Any]]] = lambda _: (),
) -> tuple[str, object]:
    """Return the innermost part of a value with which `use` raises, and its path.

    `use` is a function such as :func:`dumps`. `parts` returns further parts of a value, with what
    they are called.
    """
    where = ""
    seen = {id(value)}
    for _ in range(_DEEPEST):
        for step, part in (*parts(value), *parts_of(value)):
            if id(part) not in seen and not _works(use, part):
                seen.add(id(part))
                where, value = where + step, part
                break
        else:
            break
    return where, value


def parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield attributes and items of a value, each with the code that leads to it."""
    if isinstance(value, ModuleType):
        return
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple, collections.deque)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    for name, item in (getattr(value, "__dict__", None) or {}).items():
        yield f".{name}", item
    kind = type(value)
    if kind.__module__ == "__main__":  # its class is sent, too
        yield from ((f".{name}", item) for name, item in vars(kind).items() if name[:2] != "__")


def _works(use: Callable[[Any], object], value: object) -> bool:
    try:
        use(value)
    except Exception:  # pickling and copying run code of any class
        return False
    return True
