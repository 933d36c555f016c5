"""Options of ``%%elastic_train`` and ``%elastic``, by the names of ``fit``."""

from __future__ import annotations

import itertools
import keyword
import shlex
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import click

from nbelastic.driver.options import DEFAULTS, TABLE, Kind, OptionRow, choice, flag
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
    text = Kind(str, "text", "NAME")
    mine = (
        LineOption(["--cluster"], text),
        LineOption(["--name"], text),
        LineOption(["-o", "--out"], Kind(_variable, "a name that a variable can have", "NAME")),
        LineOption(["--log-to"], Kind(_variable, "the name of a variable", "NAME")),
        LineOption(["-b/-a", "--block/--noblock"], flag),
        LineOption(["-q", "--quiet"], flag),
        LineOption(["-v", "--verbose"], flag),
        LineOption(["--stream"], choice("rank0", "all", "none")),
    )
    return MagicCommand(magic, [*(LineOption.of(row) for row in TABLE), *mine])


def options_help(prefix: str) -> str:
    """Return the options of ``fit`` as the help of a magic lists them, by group."""
    lines = []
    for group, rows in itertools.groupby(TABLE, key=lambda row: row.group):
        lines += ["", f"        {group}", *(line for row in rows for line in _help(row, prefix))]
    return "\n".join(lines[1:])


def _help(row: OptionRow, prefix: str) -> list[str]:
    default = DEFAULTS[row.name]
    meaning = row.meaning + (f" ({default})" if default not in (None, False) else "")
    head = f"          {f'{row.flag} {row.kind.metavar}'.rstrip():<24}"
    indent = " " * 34
    wrapped = textwrap.wrap(meaning, 66)
    first = [head + wrapped[0]] if len(head) < len(indent) else [head, indent + wrapped[0]]
    return [*first, *(indent + more for more in wrapped[1:]), f"{indent}    {prefix} {row.example}"]
