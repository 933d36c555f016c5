"""Options by name: hints in errors of Python, and options of a line."""

from __future__ import annotations

import difflib
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

import click

from nbelastic.errors import OptionError, UnknownOption

from .options import DEFAULTS, Kind, OptionRow, shown

P = ParamSpec("P")
R = TypeVar("R")


def did_you_mean(given: str, names: Iterable[str]) -> str:
    """Return a hint at `names` like `given`, or at all of them, for the end of a sentence."""
    names = list(names)
    close = difflib.get_close_matches(given.lower(), names, n=3, cutoff=0.65)
    return f"; did you mean {' or '.join(close)}?" if close else f"; there are {', '.join(names)}"


def with_hints(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function: an unknown option has a hint, and its errors no inner lines."""
    known = [each for each in inspect.signature(function).parameters if each != "self"]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            unknown = next((each for each in kwargs if each not in known), None)
            if unknown is not None:
                hint = did_you_mean(unknown, known)
                if "kwargs" in known:
                    hint += f" (arguments of the function go into kwargs={{{unknown!r}: ...}})"
                raise UnknownOption(f"{function.__qualname__}: there is no option {unknown}{hint}")
            return function(*args, **kwargs)
        except OptionError as error:
            raise error.with_traceback(None) from error.__cause__

    return call


def call_arguments(
    fn: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a training function, if they fit its signature."""
    if not isinstance(args, (tuple, list)):  # others are one argument, or lose their values
        raise OptionError(f"args={shown(args)}: must be a tuple or list, as in args=(value,)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise OptionError(f"kwargs={shown(kwargs)}: must be a dict, as in kwargs={{'lr': 0.1}}")
    positional, named = tuple(args), dict(kwargs or {})
    # Other callables check their own arguments. What a decorator passes on is not what it takes.
    if isinstance(fn, (types.FunctionType, types.MethodType, functools.partial)):
        try:
            inspect.signature(fn, follow_wrapped=False).bind(*positional, **named)
        except TypeError as error:
            name = getattr(fn, "__name__", "fn")
            raise OptionError(
                f"{name}: {error}; fit calls it with what args= and kwargs= give"
            ) from None
        except ValueError:  # a part of it is written in C
            pass
    return positional, named


# -- on a line ------------------------------------------------------------------------------------


class LineOption(click.Option):
    """An option of a line, with a heading in help; its value is None if not given."""

    def __init__(
        self, flags: Iterable[str], kind: Kind | None = None, *, group: str = "", **settings: Any
    ) -> None:
        self.kind, self.group = kind, group
        how: dict[str, Any] = {} if kind is None else {"callback": self._read}
        if kind is not None and not kind.metavar:
            how |= {"is_flag": True, "default": None}
        elif kind is not None and kind.words < 0:
            one = kind.metavar.partition(" ")[0]
            how |= {"multiple": True, "metavar": one if kind.free_text else f"{one},…"}
        elif kind is not None:
            how |= {"metavar": kind.metavar, "nargs": kind.words}
        super().__init__(list(flags), **how | settings)

    @classmethod
    def of(cls, row: OptionRow, flags: Iterable[str] = ()) -> LineOption:
        """Return the option for a row of the table, which a line may call by other names."""
        default = DEFAULTS[row.name]
        known = "" if default in (None, False) else f" [{default}]"
        names = [*(flags or [row.flag]), row.name]
        return cls(names, row.kind, group=row.group, help=row.meaning + known)

    def _read(self, ctx: click.Context, _: click.Parameter, value: Any) -> Any:
        if value in (None, ()) or (value is False and not self.secondary_opts):
            return None
        if isinstance(value, bool):
            return value
        kind: Any = self.kind
        words = value if isinstance(value, tuple) else (value,)
        if self.multiple and not kind.free_text:
            words = tuple(word for each in words for word in each.split(",") if word)
        try:
            return kind.read(words)
        except OptionError as error:
            raise click.BadParameter(str(error).removeprefix(": "), ctx, self) from None


class LineCommand(click.Command):
    """A command with help by group."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.params:
            if record := param.get_help_record(ctx):
                groups.setdefault(getattr(param, "group", "Other"), []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records, col_max=34)
