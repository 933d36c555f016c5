"""Values of a function's variables that go back to the notebook: ``fit(pull=…)``.

Rank 0 packs them when its function ends, or when the job is stopped. They travel with its result.
The kernel puts them into the objects that have the names there. The classes are the user's, so
nothing here imports torch or Keras: an object shows what it is by its methods.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import cloudpickle

from nbelastic.errors import OptionError, summary_of
from nbelastic.pickling import dumps

LARGE = 1e9  # bytes of a value from which its size is said

WHOLE = "whole"
_WAYS = {"set_weights": "get_weights", "load_state_dict": "state_dict"}
"""How an object takes its values again, and how it gives them: Keras' classes, and torch's.

A Keras model on the back end torch has both, and names its parameters anew in each process.
"""


@dataclass(frozen=True)
class Pulled:
    """A variable of rank 0: pickled, with the method to load it; or the reason for its absence."""

    way: str
    data: bytes
    problem: str = ""


@dataclass(frozen=True)
class Returned:
    """What a function returned, with variables to bring back."""

    value: Any
    pulled: Mapping[str, Pulled]
    trained: tuple[str, ...] = ()  # names of the notebook's models whose copies were trained


def variables_of(function: Callable[..., Any]) -> MutableMapping[str, Any]:
    """Return a function's variables from outside, or a cell's own."""
    own = getattr(type(function), "variables", None)
    if own is not None:
        return own(function)  # type: ignore[no-any-return]
    function = inspect.unwrap(getattr(function, "func", function))
    return _Variables(function) if isinstance(function, types.FunctionType) else {}


class _Variables(MutableMapping[str, Any]):
    """Variables of the scopes around a function, and of its module."""

    def __init__(self, function: types.FunctionType) -> None:
        self._globals = function.__globals__
        names = function.__code__.co_freevars
        self._cells = dict(zip(names, function.__closure__ or (), strict=True))

    def __getitem__(self, name: str) -> Any:
        return self._cells[name].cell_contents if name in self._cells else self._globals[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._cells:
            self._cells[name].cell_contents = value
        else:
            self._globals[name] = value

    def __delitem__(self, name: str) -> None:
        raise TypeError("variables of a function stay")

    def __iter__(self) -> Any:
        return iter({**self._cells, **self._globals})

    def __len__(self) -> int:
        return len({**self._cells, **self._globals})


def check_pulled(function: Callable[..., Any], names: Iterable[str]) -> None:
    """Refuse names that a function cannot have; a cell may assign any name."""
    if getattr(type(function), "variables", None) is not None:
        return
    variables = variables_of(function)
    for name in names:
        if name not in variables:
            raise OptionError(
                f"pull={name!r}: {getattr(function, '__name__', 'the function')}() has no variable "
                "of this name from outside; one that it assigns can be returned instead"
            )


# -- on rank 0 -------------------------------------------------------------------------------------


def pack_variables(
    function: Callable[..., Any], names: Iterable[str], most: int
) -> dict[str, Pulled]:
    """Return variables of a function as they travel, `most` bytes together."""
    variables, packed = variables_of(function), {}
    for name in names:
        try:
            # A cell may have made it, and the notebook have no such object to fill.
            here = name in getattr(function, "captured", variables)
            way, data = _pack(variables[name], here)
            problem = "" if len(data) <= most else f"it takes {len(data) / 1e9:,.1f} GB"
        except KeyError:
            way, data, problem = "", b"", "rank 0 has no variable of this name"
        except Exception as error:  # code of the user's classes
            way, data, problem = "", b"", f"it cannot be sent: {summary_of(error)}"
        most -= 0 if problem else len(data)
        packed[name] = Pulled(way, b"" if problem else data, problem)
    return packed


def _pack(value: Any, here: bool) -> tuple[str, bytes]:
    for way, source in _WAYS.items():
        if here and callable(getattr(value, way, None)) and callable(getattr(value, source, None)):
            return way, dumps(_on_host(getattr(value, source)()))
    return WHOLE, dumps(value)


def _on_host(value: Any) -> Any:
    """Copy tensors to the host: the notebook's machine may have no such device."""
    if isinstance(value, Mapping):
        return {key: _on_host(each) for key, each in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(map(_on_host, value))
    return value.detach().cpu() if hasattr(value, "detach") and hasattr(value, "cpu") else value


def trained_models(captured: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of models among variables whose parameters were written to."""
    found = []
    for name, value in captured.items():
        try:
            if hasattr(value, "load_state_dict") and hasattr(value, "named_parameters"):
                written = any(each._version > 0 for _, each in value.named_parameters())
            else:
                steps = getattr(getattr(value, "optimizer", None), "iterations", 0)
                written = hasattr(value, "set_weights") and int(steps) > 0
        except Exception:  # code of the user's classes
            written = False
        if written:
            found.append(name)
    return tuple(found)


# -- in the kernel ---------------------------------------------------------------------------------


def put(variables: MutableMapping[str, Any], name: str, pulled: Pulled) -> None:
    """Put a value that has come into the object of its name."""
    if pulled.problem:
        raise OptionError(f"pull={name!r}: {pulled.problem}")
    value = cloudpickle.loads(pulled.data)
    there: Any = variables.get(name)
    if pulled.way != WHOLE:
        load = getattr(there, pulled.way, None)
        if not callable(load):
            kind = type(there).__name__
            raise OptionError(
                f"pull={name!r}: what is {name!r} here now ({kind}) has no {pulled.way}"
            )
        load(value)
    elif type(there) is type(value) and isinstance(there, list):
        there[:] = value
    elif type(there) is type(value) and isinstance(there, dict | set):
        there.clear()
        there.update(value)
    else:
        variables[name] = value
