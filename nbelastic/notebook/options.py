"""Options of ``%%elastic_train`` and ``%elastic``, by the names of ``fit``.

IPython's own ``UsageError`` prints a line and lets the cell pass, so a test that runs a notebook
would not notice it. A wrong option is an ordinary error here.
"""

from __future__ import annotations

import argparse
import keyword
import re
import shlex
import textwrap
from typing import TYPE_CHECKING, Any, NoReturn, cast

from nbelastic.driver.hints import did_you_mean
from nbelastic.driver.option_kinds import Choice, Count, EnvVariables, Flag, Range
from nbelastic.driver.options import DEFAULTS, TABLE, OptionRow
from nbelastic.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STREAMS = ("rank0", "all", "none")

_TAKES_NONE = re.compile("^ignored explicit argument")
"""How argparse says that a flag was given a value."""

PER_CELL = frozenset({"out", "name"})
"""Options of one cell only; no default can be set for them."""


class MagicOptionError(OptionError):
    """An option of a magic is wrong; the message names it, its range and the help."""

    def _render_traceback_(self) -> list[str]:
        """Show the message alone, because all frames are the magic's own."""
        return [f"{type(self).__name__}: {self}"]


class OptionParser(argparse.ArgumentParser):
    """A parser that raises errors with a hint, and accepts no abbreviations.

    Parameters
    ----------
    magic : str
        The magic's name with its percent signs: ``%%elastic_train``.
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
            An option is unknown, or its value is out of range.
        """
        try:
            found, unknown = self.parse_known_args(list(words))
        except argparse.ArgumentError as error:
            name = f"{error.argument_name}: " if error.argument_name else ""
            self.error(f"{name}{_TAKES_NONE.sub('takes no value, not even', error.message)}")
        if unknown:
            self.error(self._about_unknown(unknown[0]))
        return vars(found)

    def error(self, message: str) -> NoReturn:
        """Raise an error that refers to the help."""
        raise MagicOptionError(f"{self.prog}: {message} (every option: {self.help_at})")

    def _about_unknown(self, word: str) -> str:
        names = [name for name in self._option_string_actions if name.startswith("--")]
        typed, _, value = word.partition("=")
        given = typed.replace("_", "-")
        if word.startswith("-"):
            return f"there is no option {typed}{did_you_mean(given, names)}"
        meant = next((name for name in names if name == f"--{given}"), None)
        if meant is not None:
            return f"{word!r} is no option; did you mean {f'{meant} {value}'.rstrip()}?"
        return f"{word!r} belongs to no option; options begin with --"


def split(line: str, magic: str) -> list[str]:
    """Split a magic's line into words as a shell does.

    Parameters
    ----------
    line : str
        The words after the magic's name.
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
            return cast(int, Count(least).read("", [text]))
        except OptionError:
            message = f"{text!r} must be a whole number, at least {least}"
            raise argparse.ArgumentTypeError(message) from None

    return convert


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


# -- the options -------------------------------------------------------------------------------

OF_FIT = {row.name: row for row in TABLE}
"""The options of :func:`nbelastic.fit` that all cells can share."""


class _TrainParser(OptionParser):
    """A parser that converts values by the table of ``fit``'s options."""

    def parse_line(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the options that were given, as ``fit`` takes them."""
        found = super().parse_line(words)
        for name, row in OF_FIT.items():
            if name in found:
                found[name] = self.read(row, found[name])
        return found

    def read(self, row: OptionRow, words: Any) -> Any:
        """Return the value of an option, from its words."""
        words = words if isinstance(words, list) else [words]
        try:
            return row.kind.read(row.name, words)
        except OptionError as error:
            if isinstance(row.kind, EnvVariables):  # without values: some are secret
                self.error(f"{row.flag}: {error}")
            hint = ""
            if isinstance(row.kind, Choice):
                hint = did_you_mean(words[0], row.kind.choices)
            given, expected = " ".join(words), row.kind.as_words or row.kind.expects
            self.error(f"{row.flag}: {given!r} must be {expected}{hint}")


def train_parser(magic: str = "%%elastic_train") -> OptionParser:
    """Return the parser of ``%%elastic_train``.

    Parameters
    ----------
    magic : str
        The magic's name in error messages.
    """
    parser = _TrainParser(magic)
    only_given: dict[str, Any] = {"default": argparse.SUPPRESS}
    for row in TABLE:
        how = dict(only_given)
        if isinstance(row.kind, Flag):
            how |= {"action": "store_const", "const": ""}
        elif isinstance(row.kind, Range):
            how |= {"nargs": 2}
        elif row.kind.several:
            how |= {"nargs": "+"}
        parser.add_argument(row.flag, dest=row.name, **how)
    parser.add_argument("--cluster", **only_given)
    parser.add_argument("--name", **only_given)
    parser.add_argument("-o", "--out", type=_variable, **only_given)
    wait = parser.add_mutually_exclusive_group()
    wait.add_argument("-b", "--block", dest="block", action="store_true", **only_given)
    wait.add_argument("-a", "--noblock", dest="block", action="store_false", **only_given)
    parser.add_argument("-q", "--quiet", action="store_true", **only_given)
    parser.add_argument("-v", "--verbose", action="store_true", **only_given)
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
    known = sorted({*OF_FIT, "cluster", "block", "quiet", "stream", "verbose"})
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
    row = OF_FIT.get(name)
    flags = ("block", "quiet", "verbose")
    if name in flags or (row is not None and isinstance(row.kind, Flag)):
        if value.lower() not in ("true", "false"):
            parser.error(f"{option}={value} must be true or false")
        return name, value.lower() == "true"
    words = value.split(",") if row is not None and row.kind.several else [value]
    return name, parser.parse_line([f"--{name.replace('_', '-')}", *words])[name]


def options_help(prefix: str) -> str:
    """Return the options of ``fit`` as the help of a magic lists them, by group.

    Parameters
    ----------
    prefix : str
        The prefix of an example: ``%%elastic_train``.
    """
    lines = []
    for group in dict.fromkeys(row.group for row in TABLE):
        lines += ["", f"        {group}"]
        for row in TABLE:
            if row.group == group:
                lines += _help(row, prefix)
    return "\n".join(lines[1:])


def _help(row: OptionRow, prefix: str) -> list[str]:
    metavar = row.kind.metavar
    default = DEFAULTS[row.name]
    meaning = row.meaning + (f" ({default})" if default not in (None, False) else "")
    head = f"          {f'{row.flag} {metavar}'.rstrip():<24}"
    indent = " " * 34
    wrapped = textwrap.wrap(meaning, 66)
    first = [head + wrapped[0]] if len(head) < len(indent) else [head, indent + wrapped[0]]
    return [*first, *(indent + more for more in wrapped[1:]), f"{indent}    {prefix} {row.example}"]
