"""Kinds of options: their values from Python and on a magic's line."""

from __future__ import annotations

import contextlib
import datetime
import math
import numbers
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, cast

from dask.utils import parse_timedelta

from nbelastic.elastic.redaction import without_secrets
from nbelastic.elastic.runtime import OWN_VARIABLES
from nbelastic.errors import OptionError


class Kind:
    """What values an option may have.

    Attributes
    ----------
    expects : str
        What it must be, as the end of a sentence: ``a whole number, at least 1``.
    as_words : str
        The same for the words of a line, where it differs.
    metavar : str
        What stands for its value in the magics' help; empty for a flag.
    several : bool
        Whether its value may be several words of a line.
    """

    expects: str = ""
    as_words: ClassVar[str] = ""
    metavar: ClassVar[str] = ""
    several: ClassVar[bool] = False

    def check(self, name: str, value: Any) -> Any:
        """Return a value from Python as the job keeps it.

        Raises
        ------
        OptionError
            It cannot have this value.
        """
        raise NotImplementedError

    def read(self, name: str, words: Sequence[str]) -> Any:
        """Return what the words of a magic's line mean, as :meth:`check` does."""
        return self.check(name, words[0])

    def refuse(self, name: str, value: Any) -> NoReturn:
        """Raise the error for a value that an option cannot have."""
        raise OptionError(f"{name}={shown(value)}: must be {self.expects}")


MOST_SHOWN = 200
"""Most characters of a wrong value that an error shows."""


MOST_SECONDS = 1e9
"""The longest duration, 30 years; a longer one, also an infinite one, becomes this.

No clock, lock or socket can wait for ever.
"""

LARGEST = 2**63 - 1
"""The largest whole number; a larger one, which would not travel as it is, becomes this."""


def as_float(value: Any) -> float:
    """Return a real number as a float; not a number where it is none, or too large for one."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if cast("Any", value) > 0 else -math.inf


def shown(value: object) -> str:
    """Return a value as an error shows it."""
    try:
        text = repr(value)
    except (Exception, SystemExit):  # a __repr__ is the user's
        text = object.__repr__(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


@dataclass(frozen=True)
class Count(Kind):
    """A whole number from `least` on, or None."""

    least: int = 1
    metavar: ClassVar[str] = "N"

    @property
    def expects(self) -> str:  # type: ignore[override]
        return f"a whole number, at least {self.least}"

    def check(self, name: str, value: Any) -> int | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            self.refuse(name, value)
        if int(value) < self.least:
            self.refuse(name, value)
        return min(int(value), LARGEST)  # of Python's own type, as NumPy's cannot be sent

    def read(self, name: str, words: Sequence[str]) -> int | None:
        try:
            value: Any = int(words[0])
        except ValueError:
            value = words[0]
        return self.check(name, value)


@dataclass(frozen=True)
class Whole(Kind):
    """A whole number, also below 0."""

    expects: str = "a whole number"
    metavar: ClassVar[str] = "N"

    def check(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            self.refuse(name, value)
        return max(min(int(value), LARGEST), -LARGEST)

    def read(self, name: str, words: Sequence[str]) -> int:
        try:
            value: Any = int(words[0])
        except ValueError:
            value = words[0]
        return self.check(name, value)


@dataclass(frozen=True)
class Number(Kind):
    """A number above 0."""

    expects: str = "a number above 0"
    metavar: ClassVar[str] = "X"

    def check(self, name: str, value: Any) -> float:
        number = as_float(value)
        if not 0 < number < math.inf:
            self.refuse(name, value)
        return number

    def read(self, name: str, words: Sequence[str]) -> float:
        try:
            value: Any = float(words[0])
        except ValueError:
            value = words[0]
        return self.check(name, value)


@dataclass(frozen=True)
class Duration(Kind):
    """A time in seconds, as Dask takes it: ``60``, ``"2 minutes"``, a ``timedelta``."""

    expects: str = "a duration above 0: a number of seconds, or text such as '90 s' or '2 minutes'"
    metavar: ClassVar[str] = "TIME"

    def check(self, name: str, value: Any) -> float:
        seconds = as_float(value)
        if isinstance(value, (str, datetime.timedelta)):
            # No number, no unit that Dask knows, nothing at all, or more than a float holds.
            with contextlib.suppress(ValueError, KeyError, TypeError, IndexError, OverflowError):
                seconds = float(parse_timedelta(value, default="seconds"))
        if not seconds > 0:
            self.refuse(name, value)
        return min(seconds, MOST_SECONDS)


@dataclass(frozen=True)
class Range(Kind):
    """Two durations ``(lo, hi)``, or None."""

    expects: str = "(lo, hi), two durations with 0 < lo <= hi"
    as_words: ClassVar[str] = "LO HI, two durations with 0 < LO <= HI"
    metavar: ClassVar[str] = "LO HI"
    several: ClassVar[bool] = True

    def check(self, name: str, value: Any) -> tuple[float, float] | None:
        if value is None:
            return None
        if isinstance(value, (str, bytes)):  # two characters are no pair
            self.refuse(name, value)
        try:
            low, high = (Duration().check(name, each) for each in value)
        except (TypeError, ValueError):  # not a pair, or not of durations
            self.refuse(name, value)
        if not low <= high:
            self.refuse(name, value)
        return low, high

    def read(self, name: str, words: Sequence[str]) -> tuple[float, float] | None:
        return self.check(name, tuple(words))


@dataclass(frozen=True)
class Choice(Kind):
    """One of several words, or of what a function finds."""

    among: tuple[str, ...] | Callable[[], tuple[str, ...]]
    metavar: ClassVar[str] = "NAME"

    @property
    def choices(self) -> tuple[str, ...]:
        return self.among() if callable(self.among) else self.among

    @property
    def expects(self) -> str:  # type: ignore[override]
        return f"one of {', '.join(self.choices)}"

    def check(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in self.choices:
            self.refuse(name, value)
        return str(value)


@dataclass(frozen=True)
class Flag(Kind):
    """True or False."""

    expects: str = "True or False"

    def check(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            self.refuse(name, value)
        return value

    def read(self, name: str, words: Sequence[str]) -> bool:
        value = {"true": True, "false": False, "": True}.get(" ".join(words).lower())
        return self.check(name, " ".join(words) if value is None else value)


@dataclass(frozen=True)
class Names(Kind):
    """Addresses, names and hosts of workers; None for all."""

    expects: str = (
        "a list of addresses, names or hosts, or None for all; "
        "how many may train: np, min_np, max_np"
    )
    metavar: ClassVar[str] = "A B …"
    several: ClassVar[bool] = True

    def check(self, name: str, value: Any) -> tuple[str, ...] | None:
        if value is None:
            return None
        several = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
        names = tuple(value) if several else (value,) if isinstance(value, str) else ()
        # A search that has found none does not mean all.
        if not names or not all(map(_is_name, names)):
            self.refuse(name, value)
        return tuple(map(str, names))

    def read(self, name: str, words: Sequence[str]) -> tuple[str, ...] | None:
        return self.check(name, words)


def _is_name(value: object) -> bool:
    """Return whether a worker can be meant; Dask numbers those of a ``LocalCluster``."""
    is_number = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_number or (isinstance(value, str) and bool(value))


@dataclass(frozen=True)
class Amounts(Kind):
    """Amounts of Dask's resources by name; empty for none."""

    expects: str = "a dict, as in {'GPU': 1}"
    as_words: ClassVar[str] = "NAME=AMOUNT with an amount above 0, as in GPU=1"
    metavar: ClassVar[str] = "NAME=N …"
    several: ClassVar[bool] = True

    def check(self, name: str, value: Any) -> dict[str, float]:
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.refuse(name, value)
        for key, amount in value.items():
            if not isinstance(key, str) or not key or not 0 < as_float(amount) < math.inf:
                raise OptionError(f"{name}[{shown(key)}]={shown(amount)}: must be a number above 0")
        return {key: float(amount) for key, amount in value.items()}

    def read(self, name: str, words: Sequence[str]) -> dict[str, float]:
        amounts = {}
        for word in words:
            key, equals, amount = word.partition("=")
            try:
                amounts[key] = float(amount)
            except ValueError:
                equals = ""
            if not key or not equals or not 0 < amounts[key] < math.inf:
                raise OptionError(f"{name}: {word!r} must be {self.as_words}")
        return self.check(name, amounts)


@dataclass(frozen=True)
class EnvVariables(Kind):
    """Environment variables by name; empty for none."""

    expects: str = "a dict of text, as in {'NCCL_DEBUG': 'INFO'}"
    as_words: ClassVar[str] = (
        "NAME=VALUE, or NAME of a variable that is set here; nbelastic sets some itself"
    )
    metavar: ClassVar[str] = "NAME=VALUE …"
    several: ClassVar[bool] = True

    def check(self, name: str, value: Any) -> dict[str, str]:
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise OptionError(f"{name}: must be {self.expects}")  # without values: some are secret
        for key, text in value.items():
            if not isinstance(key, str) or not key or "=" in key or "\0" in key:
                raise OptionError(f"{name}: {shown(key)} must be the name of a variable")
            if not isinstance(text, str) or "\0" in text:
                raise OptionError(f"{name}[{key!r}]: must be text, not {type(text).__name__}")
            if key in OWN_VARIABLES:
                raise OptionError(f"{name}[{key!r}]: nbelastic sets this variable itself")
        return {str(key): str(text) for key, text in value.items()}

    def read(self, name: str, words: Sequence[str]) -> dict[str, str]:
        found = {}
        for word in words:
            key, equals, text = word.partition("=")
            if not equals and key not in os.environ:
                raise OptionError(f"{name}: {key!r} is not set here; give {key}=VALUE")
            found[key] = text if equals else os.environ[key]
        return self.check(name, found)


@dataclass(frozen=True)
class Location(Kind):
    """A path or a URL that fsspec knows; a path may be relative to the kernel's directory."""

    expects: str = "a path or a URL"
    metavar: ClassVar[str] = "PLACE"

    def check(self, name: str, value: Any) -> str | None:
        if value is None:
            return None
        if not isinstance(value, (str, os.PathLike)) or not str(value):
            self.refuse(name, value)
        text = str(os.fspath(value))
        if "://" not in text and "::" not in text:
            return os.path.abspath(os.path.expanduser(text))
        from fsspec import available_protocols  # noqa: PLC0415 - only who wants it waits for it
        from fsspec.utils import get_protocol  # noqa: PLC0415

        protocol = get_protocol(text)
        if protocol not in available_protocols():
            raise OptionError(
                f"{name}={without_secrets(text)!r}: fsspec knows no protocol {protocol!r}; "
                "must be a path or a URL such as s3://bucket/directory"
            )
        return text


@dataclass(frozen=True)
class File(Kind):
    """A path; it may be relative to the kernel's directory."""

    expects: str = "a path in a directory that exists"
    metavar: ClassVar[str] = "FILE"

    def check(self, name: str, value: Any) -> str | None:
        if value is None:
            return None
        if not isinstance(value, (str, os.PathLike)) or not str(value):
            self.refuse(name, value)
        path = os.path.abspath(os.path.expanduser(os.fspath(value)))
        if os.path.isdir(path) or not os.path.isdir(os.path.dirname(path)):
            self.refuse(name, value)
        return path
