"""Options on a line of a magic or of the terminal: click reads them by the table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from nbelastic.errors import OptionError

from .hints import did_you_mean
from .table import DEFAULTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .kinds import Kind
    from .table import OptionRow


class LineOption(click.Option):
    """An option of a line, which may have a kind and stands in help under a heading.

    The value of an option that is not given is None.
    """

    def __init__(
        self, flags: Iterable[str], kind: Kind | None = None, *, group: str = "", **settings: Any
    ) -> None:
        self.kind, self.group = kind, group
        how: dict[str, Any] = {}
        if kind is not None:
            how = {"metavar": kind.metavar or None, "callback": self._read}
            if not kind.metavar:
                how |= {"is_flag": True, "default": None}
            elif kind.words < 0:
                one = kind.metavar.partition(" ")[0]
                how |= {"multiple": True, "metavar": one if kind.free_text else f"{one},…"}
            else:
                how |= {"nargs": kind.words}
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
            hint = did_you_mean(words[0], kind.choices) if kind.choices else ""
            raise click.BadParameter(f"{error}{hint}".removeprefix(": "), ctx, self) from None


class LineCommand(click.Command):
    """A command that answers an unknown option with the one that was probably meant."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse a line."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            given = error.option_name
            if not given.startswith("--"):  # click names the first letter alone
                given = next((word for word in args if word.startswith(given)), given)
            names = [name for param in self.params for name in param.opts if name.startswith("--")]
            hint = did_you_mean(given.replace("_", "-"), names)
            raise click.UsageError(f"there is no option {given}{hint}", ctx) from None
