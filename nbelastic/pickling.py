"""Pickling of functions and classes with the file names of their code.

From version 3.1.3 on, cloudpickle writes ``<dynamic-code>`` instead. Then a traceback could not
show the line in which a rank has failed.
"""

from __future__ import annotations

import io
from types import CodeType
from typing import TYPE_CHECKING, Any

import cloudpickle

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Pickler", "dumps"]

_reduce_code: Callable[[CodeType], tuple[Any, ...]] = cloudpickle.Pickler.dispatch_table[CodeType]


def _reduce(code: CodeType) -> tuple[Any, ...]:
    make, arguments = _reduce_code(code)
    return _restore, (make, arguments, code.co_filename)


def _restore(make: Callable[..., CodeType], arguments: tuple[Any, ...], filename: str) -> CodeType:
    return make(*arguments).replace(co_filename=filename)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, but for the names of files. ``pickle.loads`` reads what it writes."""

    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({CodeType: _reduce})


def dumps(value: object) -> bytes:
    """Return `value` as cloudpickle writes it, the names of source files kept.

    Raises
    ------
    Exception
        Whatever the parts of `value` raise that cannot be pickled.
    """
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()
