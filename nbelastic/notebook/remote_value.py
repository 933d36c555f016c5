"""Remote value: a cell's result as it is sent to the notebook, or a placeholder.

A job that has trained for hours must not fail because its last line is an open file, or a tensor on
a GPU that the notebook's machine does not have.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any

import cloudpickle

from nbelastic.errors import summary_of
from nbelastic.pickling import dumps

LONGEST = 4_000
"""Maximum length of a placeholder's text."""


@dataclass(frozen=True, repr=False, eq=False)
class UnavailableValue:
    """A placeholder for a value that could not be sent: its text, and the reason."""

    text: str  # its ``repr``
    kind: str  # name of its class
    reason: str

    def __repr__(self) -> str:
        return self.text

    def __str__(self) -> str:
        return f"{self.text}\n{self._why()}"

    def _why(self) -> str:
        return f"[only the text of this {self.kind} was returned: {self.reason}]"

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        printer.text(str(self))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"{name!r}: {self._why()} Return a part of it, such as a number or a state_dict."
        )


@dataclass(frozen=True)
class RemoteValue:
    """A pickled value. Unpickling it gives the value, or a placeholder."""

    data: bytes
    text: str
    kind: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (self.data, self.text, self.kind)


def pack(value: Any) -> RemoteValue | UnavailableValue:
    """Return the value of a cell's last expression as it is sent to the notebook."""
    text, kind = _text(value), type(value).__name__
    try:
        return RemoteValue(dumps(value), text, kind)
    except Exception as error:  # pickling runs code of any class
        return UnavailableValue(text, kind, f"it cannot be pickled ({_line(error)})")


def _open(data: bytes, text: str, kind: str) -> Any:
    try:
        return cloudpickle.loads(data)
    except Exception as error:  # unpickling runs code of any class
        return UnavailableValue(text, kind, f"it cannot be unpickled here ({_line(error)})")


def _line(error: Exception) -> str:
    return " ".join(summary_of(error).split())


def _text(value: Any) -> str:
    long = isinstance(value, (list, tuple, dict, set, str, bytes)) and len(value) > LONGEST
    try:
        text = reprlib.repr(value) if long else repr(value)
    except Exception as error:  # a __repr__ is the user's
        text = f"<{type(value).__name__}; its repr() failed: {_line(error)}>"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"
