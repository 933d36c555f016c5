"""Kinds of options: their values from Python and on a line."""

from __future__ import annotations

import contextlib
import datetime
import math
import numbers
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from dask.utils import parse_timedelta

from nbelastic.elastic.ranks.runtime import OWN_VARIABLES
from nbelastic.elastic.redaction import without_secrets
from nbelastic.errors import OptionError

MOST_SHOWN = 200
"""Most characters of a wrong value that an error shows."""

MOST_SECONDS = 1e9
"""The longest duration, 30 years; a longer one, also an infinite one, becomes this.

No clock, lock or socket can wait for ever.
"""

LARGEST = 2**63 - 1
"""The largest whole number; a larger one, which would not travel as it is, becomes this."""


@dataclass(frozen=True)
class Kind:
    """What values an option may have."""

    convert: Callable[[Any], Any]  # to what the job keeps; ValueError where it cannot be the value
    expects: str  # the end of "must be …"
    metavar: str = ""  # stands for the value in help; empty for a flag
    optional: bool = False  # whether None is a value, too
    from_words: Callable[[Any], Any] = lambda given: given  # gets one word, or the tuple of several
    as_words: str = ""  # `expects` for the words of a line, where it differs
    words: int = 1  # of a line; -1 for one or more
    free_text: bool = False  # may have commas, and may be secret
    choices: tuple[str, ...] = ()

    def check(self, name: str, value: Any) -> Any:
        """Return a value from Python as the job keeps it, or raise an OptionError."""
        if value is None and self.optional:
            return None
        try:
            return self.convert(value)
        except OptionError as error:  # says more than that the value is wrong
            raise OptionError(f"{name}{error}") from None
        except ValueError:
            raise OptionError(f"{name}={shown(value)}: must be {self.expects}") from None

    def read(self, words: tuple[str, ...]) -> Any:
        """Return what the words of a line mean, or raise an OptionError."""
        try:
            return self.convert(self.from_words(words[0] if self.words == 1 else words))
        except ValueError as error:
            if self.free_text:
                raise OptionError(str(error)) from None
            expected = self.as_words or self.expects
            raise OptionError(f"{' '.join(words)!r} must be {expected}") from None


def shown(value: object) -> str:
    """Return a value as an error shows it."""
    try:
        text = repr(value)
    except (Exception, SystemExit):  # a __repr__ is the user's
        text = object.__repr__(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


# -- numbers -----------------------------------------------------------------------------------


def whole(least: int | None = None, *, optional: bool = False) -> Kind:
    """Return the kind of whole numbers, from `least` on."""
    expects = "a whole number" if least is None else f"a whole number, at least {least}"

    def convert(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise ValueError
        number = int(value)  # of Python's own type, as NumPy's cannot be sent
        if least is not None and number < least:
            raise ValueError
        return max(min(number, LARGEST), -LARGEST)

    return Kind(convert, expects, "N", optional, int)


def count(least: int = 1) -> Kind:
    """Return the kind of whole numbers from `least` on, or None."""
    return whole(least, optional=True)


def _as_float(value: Any) -> float:
    """Return a real number as a float, infinite if too large; NaN for any other value."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if cast("Any", value) > 0 else -math.inf


def _above_0(value: Any) -> float:
    number = _as_float(value)
    if not 0 < number < math.inf:
        raise ValueError
    return number


NUMBER = Kind(_above_0, "a number above 0", "X", from_words=float)


# -- times -------------------------------------------------------------------------------------


def _seconds(value: Any) -> float:
    seconds = _as_float(value)
    if isinstance(value, (str, datetime.timedelta)):
        # No number, no unit that Dask knows, nothing at all, or more than a float holds.
        with contextlib.suppress(ValueError, KeyError, TypeError, IndexError, OverflowError):
            seconds = float(parse_timedelta(value, default="seconds"))
    if not seconds > 0:
        raise ValueError
    return min(seconds, MOST_SECONDS)


DURATION = Kind(
    _seconds,
    "a duration above 0: a number of seconds, or text such as '90 s' or '2 minutes'",
    "TIME",
)
"""A time in seconds, as Dask takes it: ``60``, ``"2 minutes"``, a ``timedelta``."""


def _low_and_high(value: Any) -> tuple[float, float]:
    if isinstance(value, (str, bytes)):  # two characters are no pair
        raise ValueError
    try:
        low, high = map(_seconds, value)
    except TypeError:
        raise ValueError from None
    if not low <= high:
        raise ValueError
    return low, high


RANGE = Kind(
    _low_and_high,
    "(lo, hi), two durations with 0 < lo <= hi",
    "LO HI",
    optional=True,
    as_words="LO HI, two durations with 0 < LO <= HI",
    words=2,
)


# -- words -------------------------------------------------------------------------------------


def choice(*choices: str, more: Callable[[], tuple[str, ...]] = tuple) -> Kind:
    """Return the kind of an option with several choices, or with choices found by `more`."""

    def convert(value: Any) -> str:
        if not isinstance(value, str) or value not in (*choices, *more()):
            raise ValueError
        return str(value)

    return Kind(convert, f"one of {', '.join(choices)}", "NAME", choices=choices)


def _true_or_false(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


FLAG = Kind(_true_or_false, "True or False")


def _names(value: Any) -> tuple[str, ...]:
    several = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
    names = tuple(value) if several else (value,) if isinstance(value, str) else ()
    for name in names:  # Dask numbers the workers of a LocalCluster
        if isinstance(name, bool) or not isinstance(name, (str, numbers.Integral)) or name == "":
            raise ValueError
    if not names:  # a search without a result does not mean all
        raise ValueError
    return tuple(map(str, names))


NAMES = Kind(
    _names,
    "a list of addresses, names or hosts, or None for all; how many may train: np, min_np, max_np",
    "A B …",
    optional=True,
    words=-1,
)
"""Addresses, names and hosts of workers; None for all."""


def _variable_names(value: Any) -> tuple[str, ...]:
    names = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    names = tuple(each for name in names for each in name.split(","))
    if not all(name.isidentifier() for name in names):
        raise ValueError
    return names


VARIABLE_NAMES = Kind(
    _variable_names,
    "names of variables, as in ('model', 'history')",
    "NAME …",
    words=-1,
)
"""Names of variables of the function."""


def _amounts(value: Any) -> dict[str, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError
    for key, amount in value.items():
        if not isinstance(key, str) or not key or not 0 < _as_float(amount) < math.inf:
            raise OptionError(f"[{shown(key)}]={shown(amount)}: must be a number above 0")
    return {key: float(amount) for key, amount in value.items()}


AMOUNTS = Kind(
    _amounts,
    "a dict, as in {'GPU': 1}",
    "NAME=N …",
    from_words=lambda words: {
        name: float(amount) for name, _, amount in (word.partition("=") for word in words)
    },
    as_words="NAME=AMOUNT with an amount above 0, as in GPU=1",
    words=-1,
)
"""Amounts of Dask's resources by name; empty for none."""


def _variables(value: Any) -> dict[str, str]:
    """Return environment variables. Errors do not show their values, which may be secret."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise OptionError(": must be a dict of text, as in {'NCCL_DEBUG': 'INFO'}")
    for key, text in value.items():
        if not isinstance(key, str) or not key or "=" in key or "\0" in key:
            raise OptionError(f": {shown(key)} must be the name of a variable")
        if not isinstance(text, str) or "\0" in text:
            raise OptionError(f"[{key!r}]: must be text, not {type(text).__name__}")
        if key in OWN_VARIABLES:
            raise OptionError(f"[{key!r}]: nbelastic sets this variable itself")
    return {str(key): str(text) for key, text in value.items()}


def _variables_of(words: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals and key not in os.environ:
            raise OptionError(f": {key!r} is not set here; give {key}=VALUE")
        found[key] = text if equals else os.environ[key]
    return found


VARIABLES = Kind(
    _variables,
    "a dict of text, as in {'NCCL_DEBUG': 'INFO'}",
    "NAME[=VALUE] …",
    from_words=_variables_of,
    words=-1,
    free_text=True,
)
"""Environment variables by name; empty for none."""


# -- places ------------------------------------------------------------------------------------


def _path(value: Any) -> str:
    """Return an absolute path; a relative path starts at the kernel's directory."""
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise ValueError
    return os.path.abspath(os.path.expanduser(os.fspath(value)))


def _path_or_url(value: Any) -> str:
    path = _path(value)
    text = str(os.fspath(value))
    if "://" not in text and "::" not in text:
        return path
    from fsspec import available_protocols  # noqa: PLC0415 - only who wants it waits for it
    from fsspec.utils import get_protocol  # noqa: PLC0415

    protocol = get_protocol(text)
    if protocol not in available_protocols():
        raise OptionError(
            f"={without_secrets(text)!r}: fsspec knows no protocol {protocol!r}; "
            "must be a path or a URL such as s3://bucket/directory"
        )
    return text


LOCATION = Kind(_path_or_url, "a path or a URL", "PLACE", optional=True)
"""A path, or a URL that fsspec knows."""


def _file(value: Any) -> str:
    path = _path(value)
    if os.path.isdir(path) or not os.path.isdir(os.path.dirname(path)):
        raise ValueError
    return path


FILE = Kind(_file, "a path in a directory that exists", "FILE", optional=True)
