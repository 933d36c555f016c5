"""The options of ``%%elastic_train`` and ``%elastic``: those of ``fit``, under the same names.

IPython's own ``UsageError`` prints a line and lets the cell pass, so that a notebook that is run
as a test would not notice. Here a wrong option is an error like any other.
"""

from __future__ import annotations

import argparse
import keyword
import math
import shlex
from typing import TYPE_CHECKING, Any, NoReturn

from nbelastic.collectives import BACKENDS
from nbelastic.driver.hints import did_you_mean
from nbelastic.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "FIT_OPTIONS",
    "MagicOptionError",
    "OptionParser",
    "count",
    "parse_setting",
    "split",
    "train_parser",
]

STREAMS = ("rank0", "all", "none")

PER_CELL = frozenset({"out", "name"})
"""Options that make sense for one cell only, so that no default can be set for them."""


class MagicOptionError(OptionError):
    """An option of a magic is wrong; the message names it, its range and where help is."""

    def _render_traceback_(self) -> list[str]:
        """Show the message alone: the frames are all of the magic's own code."""
        return [f"{type(self).__name__}: {self}"]


class OptionParser(argparse.ArgumentParser):
    """A parser whose errors are exceptions with a hint, and that takes no abbreviations.

    Parameters
    ----------
    magic : str
        What the user has typed, with its percent signs: ``%%elastic_train``.
    """

    def __init__(self, magic: str) -> None:
        super().__init__(prog=magic, add_help=False, allow_abbrev=False, exit_on_error=False)
        self.help_at = f"{magic.split(maxsplit=1)[0]}?"

    def parse_line(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the options that were given, and only those.

        Parameters
        ----------
        words : sequence of str
            The line, split into words.

        Raises
        ------
        MagicOptionError
            An option is unknown, or has a value it cannot have.
        """
        try:
            found, unknown = self.parse_known_args(list(words))
        except argparse.ArgumentError as error:
            name = f"{error.argument_name}: " if error.argument_name else ""
            self.error(f"{name}{error.message}")
        if unknown:
            self.error(self._about_unknown(unknown[0]))
        return vars(found)

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong, with where to read more."""
        raise MagicOptionError(f"{self.prog}: {message} (every option: {self.help_at})")

    def _about_unknown(self, word: str) -> str:
        names = [name for name in self._option_string_actions if name.startswith("--")]
        typed, _, value = word.partition("=")
        given = typed.replace("_", "-")
        if word.startswith("-"):
            return f"there is no option {typed}{did_you_mean(given, names)}"
        meant = next((name for name in names if name == f"--{given}"), None)
        if meant is not None:
            return f"{word!r} is no option; did you mean {meant} {value}?"
        return f"{word!r} belongs to no option; options begin with --"


def split(line: str, magic: str) -> list[str]:
    """Split a magic's line into words as a shell does.

    Parameters
    ----------
    line : str
        What stands behind the magic's name.
    magic : str
        The magic, for the error.
    """
    try:
        return shlex.split(line)
    except ValueError as error:
        raise MagicOptionError(f"{magic}: {str(error).lower()} in {line!r}") from None


# -- values ------------------------------------------------------------------------------------


def count(least: int) -> Callable[[str], int]:
    """Return a converter for whole numbers from `least` on."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least {least}")
        return value

    return convert


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds above 0")
    return value


def _choice(choices: Sequence[str]) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text not in choices:
            hint = did_you_mean(text, choices)
            raise argparse.ArgumentTypeError(f"{text!r} must be one of {', '.join(choices)}{hint}")
        return text

    return convert


def _variable(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise argparse.ArgumentTypeError(f"{text!r} must be a name that a variable can have")
    return text


def _resource(text: str) -> tuple[str, float]:
    name, equals, amount = text.partition("=")
    try:
        value = float(amount)
    except ValueError:
        value = math.nan
    if not name or not equals or not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be NAME=AMOUNT with an amount above 0, as in GPU=1"
        )
    return name, value


# -- the options -------------------------------------------------------------------------------

FIT_OPTIONS: dict[str, dict[str, Any]] = {
    "cluster": {"metavar": "NAME"},
    "np": {"type": count(1)},
    "min_np": {"type": count(1)},
    "max_np": {"type": count(1)},
    "workers": {"nargs": "+"},
    "resources": {"nargs": "+", "type": _resource},
    "slots_per_host": {"type": count(1)},
    "reset_limit": {"type": count(0)},
    "elastic_timeout": {"type": _seconds},
    "stall_timeout": {"type": _seconds},
    "heartbeat_timeout": {"type": _seconds},
    "blacklist_cooldown": {"nargs": 2, "type": _seconds},
    "lease": {"type": _seconds},
    "checkpoint": {"metavar": "PLACE"},
    "checkpoint_every": {"type": count(1)},
    "resume": {"action": "store_true"},
    "backend": {"type": _choice(BACKENDS)},
    "name": {},
}
"""The options of :func:`nbelastic.fit` that can stand on a line, and how each is read."""


class _TrainParser(OptionParser):
    """Puts options of several values into the shape that ``fit`` takes."""

    def parse_line(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the options that were given, as ``fit`` takes them."""
        found = super().parse_line(words)
        if "resources" in found:
            found["resources"] = dict(found["resources"])
        if "blacklist_cooldown" in found:
            low, high = found["blacklist_cooldown"]
            if not low <= high < math.inf:
                self.error(f"--blacklist-cooldown: {low:g} {high:g} must be LO HI with LO <= HI")
            found["blacklist_cooldown"] = (low, high)
        return found


def train_parser(magic: str = "%%elastic_train") -> OptionParser:
    """Return the parser of ``%%elastic_train``.

    Parameters
    ----------
    magic : str
        What its errors call it.
    """
    parser = _TrainParser(magic)
    for name, how in FIT_OPTIONS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", dest=name, default=argparse.SUPPRESS, **how
        )
    only_given: dict[str, Any] = {"default": argparse.SUPPRESS}
    parser.add_argument("-o", "--out", type=_variable, **only_given)
    wait = parser.add_mutually_exclusive_group()
    wait.add_argument("-b", "--block", dest="block", action="store_true", **only_given)
    wait.add_argument("-a", "--noblock", dest="block", action="store_false", **only_given)
    parser.add_argument("-q", "--quiet", action="store_true", **only_given)
    parser.add_argument("--stream", type=_choice(STREAMS), **only_given)
    return parser


def parse_setting(text: str) -> tuple[str, Any]:
    """Read one ``option=value`` of ``%elastic config``.

    Parameters
    ----------
    text : str
        ``max-np=8``; ``workers=alice,bob`` for several values; ``max-np=`` for no default.

    Returns
    -------
    tuple of (str, object)
        The option as ``fit`` names it, and its value; None for no default.
    """
    parser = train_parser("%elastic config")
    option, equals, value = text.partition("=")
    name = option.lstrip("-").replace("-", "_")
    known = sorted({*FIT_OPTIONS, "block", "quiet", "stream"} - PER_CELL)
    if name in PER_CELL:
        parser.error(f"{option} belongs to one cell and can have no default")
    if name not in known:
        dashed = [each.replace("_", "-") for each in known]
        hint = did_you_mean(name.replace("_", "-"), dashed) or f"; there are {', '.join(dashed)}"
        parser.error(f"there is no option {option!r}{hint}")
    if not equals:
        parser.error(f"{text!r} must be OPTION=VALUE, as in max-np=8")
    if not value:
        return name, None
    if name in ("block", "quiet", "resume"):
        if value.lower() not in ("true", "false"):
            parser.error(f"{option}={value} must be true or false")
        return name, value.lower() == "true"
    several = FIT_OPTIONS.get(name, {}).get("nargs") is not None
    words = value.split(",") if several else [value]
    return name, parser.parse_line([f"--{name.replace('_', '-')}", *words])[name]
