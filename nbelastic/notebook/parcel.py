"""How a cell's value comes home: as itself where it can, else as a stand-in that says why not.

A job that has trained for hours must not fail because its last line was an open file, or a tensor
on a GPU that the notebook's machine does not have.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any

import cloudpickle

from nbelastic.pickling import dumps

__all__ = ["Parcel", "StandIn", "pack"]

LONGEST = 4_000
"""Characters of a stand-in's text."""


@dataclass(frozen=True, repr=False, eq=False)
class StandIn:
    """In place of a value that could not travel: it looks like it, and says why it isn't.

    Attributes
    ----------
    text : str
        The value's ``repr``.
    kind : str
        Name of its class.
    reason : str
        Why it is not here.
    """

    text: str
    kind: str
    reason: str

    def __repr__(self) -> str:
        return self.text

    def __str__(self) -> str:
        return f"{self.text}\n{self._why()}"

    def _why(self) -> str:
        return f"[only the text of this {self.kind} has come back: {self.reason}]"

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        printer.text(str(self))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"{name!r}: {self._why()} Return what you need of it, such as a number or a state_dict."
        )


@dataclass(frozen=True)
class Parcel:
    """A pickled value. Unpickling the parcel gives the value, or a stand-in for it."""

    data: bytes
    text: str
    kind: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (self.data, self.text, self.kind)


def pack(value: Any) -> Parcel | StandIn:
    """Make a value ready for its way to the notebook.

    Parameters
    ----------
    value : object
        What the cell's last expression was.
    """
    text, kind = _text(value), type(value).__name__
    try:
        return Parcel(dumps(value), text, kind)
    except Exception as error:  # pickling runs code of any class
        return StandIn(text, kind, f"it cannot be pickled ({_line(error)})")


def _open(data: bytes, text: str, kind: str) -> Any:
    try:
        return cloudpickle.loads(data)
    except Exception as error:  # unpickling runs code of any class
        return StandIn(text, kind, f"it cannot be made here ({_line(error)})")


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _text(value: Any) -> str:
    long = isinstance(value, (list, tuple, dict, set, str, bytes)) and len(value) > LONGEST
    try:
        text = reprlib.repr(value) if long else repr(value)
    except Exception as error:  # a __repr__ is the user's
        text = f"<{type(value).__name__}, whose repr() failed: {_line(error)}>"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"
