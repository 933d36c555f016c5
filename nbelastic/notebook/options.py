"""Options of ``%%elastic_train`` and ``%elastic``, by the names of ``fit``."""

from __future__ import annotations

import keyword
import shlex
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import click

from nbelastic.driver.options import TABLE, Kind, choice, flag
from nbelastic.driver.parser import LineCommand, LineOption
from nbelastic.errors import Headline, OptionError


class MagicOptionError(Headline, OptionError):
    """An option of a magic is wrong; the message names it, its range and the help."""


class MagicCommand(LineCommand):
    """The options of a magic: ``%%elastic_train``, or ``%elastic`` with a subcommand."""

    def __init__(self, magic: str, options: Iterable[LineOption]) -> None:
        super().__init__(
            magic,
            params=list(options),
            add_help_option=False,
            context_settings={"allow_extra_args": True},
        )
        self.magic = magic

    def read(self, words: Iterable[str]) -> dict[str, Any]:
        """Return the options given by a line, and no others, under ``fit``'s names."""
        try:
            context = self.make_context(self.magic, list(self._repeated(words)))
        except click.BadParameter as error:
            flags = error.param.opts if error.param is not None else []
            self.fail(f"{'/'.join(flags)}: {error.message}")
        except click.UsageError as error:
            self.fail(error.format_message().removesuffix("."))
        if context.args:
            self.fail(self._about_word(context.args[0]))
        return {name: value for name, value in context.params.items() if value is not None}

    def fail(self, message: str) -> NoReturn:
        """Raise an error that refers to the help."""
        help_at = f"{self.magic.split(maxsplit=1)[0]}?"
        raise MagicOptionError(f"{self.magic}: {message} (every option: {help_at})")

    def options_help(self) -> str:
        """Return the options by group, for the help of the magic."""
        formatter = click.HelpFormatter(width=100)
        self.format_options(click.Context(self), formatter)
        return formatter.getvalue().rstrip("\n")

    def _repeated(self, words: Iterable[str]) -> Iterator[str]:
        """Yield words with a flag before each value: ``--workers a b`` is twice ``--workers``."""
        several = {flag for param in self.params if param.multiple for flag in param.opts}
        flag, values = "", 0
        for word in words:
            if word.startswith("-"):
                flag, values = (word if word in several else ""), 0
            elif flag:
                values += 1
                if values > 1:
                    yield flag
            yield word

    def _about_word(self, word: str) -> str:
        typed, _, value = word.partition("=")
        flag = f"--{typed.replace('_', '-')}"
        if any(flag in param.opts for param in self.params):
            return f"{word!r} is no option; did you mean {f'{flag} {value}'.rstrip()}?"
        return f"{word!r} belongs to no option; options begin with --"


def split(line: str, magic: str) -> list[str]:
    """Split the words after a magic's name as a shell does."""
    try:
        return shlex.split(line)
    except ValueError as error:
        raise MagicOptionError(f"{magic}: {str(error).lower()} in {line!r}") from None


def _variable(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise ValueError
    return text


def train_command(magic: str = "%%elastic_train") -> MagicCommand:
    """Return the options of a cell: those of ``fit``, and its own."""
    text, name = Kind(str, "text", "NAME"), Kind(_variable, "the name of a variable", "NAME")
    mine = {
        "--cluster": (
            text,
            "variable with a Dask client or cluster, or an address [current client]",
        ),
        "--name": (text, "name of the job; made up by default"),
        "-o --out": (name, "keep the Job in a variable, from the start and whatever happens"),
        "--log-to": (name, "variable with a function that gets each step and its metrics"),
        "-b/-a --block/--noblock": (flag, "wait for the end, or show the Job at once [block]"),
        "-q --quiet": (flag, "show only the result: no panel, no output, no last line"),
        "-v --verbose": (flag, "list the modules of yours that travel with the cell"),
        "--stream": (choice("rank0", "all", "none"), "ranks whose output is shown [rank0]"),
    }
    own = [
        LineOption(flags.split(), kind, group="This cell", help=meaning)
        for flags, (kind, meaning) in mine.items()
    ]
    return MagicCommand(magic, [*own, *(LineOption.of(row) for row in TABLE)])
