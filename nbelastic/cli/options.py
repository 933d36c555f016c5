"""Options of ``run``: those of ``fit`` from its table, and the terminal's own.

The options of a job come from :data:`nbelastic.driver.options.TABLE`, so a new one is an option of
the command, too. :data:`TERMINAL` lists the others. The tables in the documents are made from both.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from nbelastic.driver.hints import did_you_mean
from nbelastic.driver.option_kinds import EnvVariables, Flag, Range
from nbelastic.driver.options import DEFAULTS, TABLE
from nbelastic.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nbelastic.driver.options import OptionRow

HOROVODS: dict[str, tuple[str, ...]] = {
    "np": ("-np", "--num-proc"),
    "min_np": ("--min-num-proc",),
    "max_np": ("--max-num-proc",),
    "reset_limit": ("--max-resets",),
    "timeline": ("--timeline-filename",),
    "blacklist_cooldown": ("--blacklist-cooldown-range",),
    "env": ("-x",),
}
"""Horovod's names of options of a job, older and newer ones."""

_CLUSTER, _HOSTS, _SCRIPT, _VIEW = "Cluster", "Hosts", "Script", "Output"


@dataclass(frozen=True)
class TerminalRow:
    """An option that only the command has.

    Attributes
    ----------
    flags : tuple of str
        Its names; the last one is that of the parameter.
    metavar : str
        What stands for its value; empty for a flag.
    group : str
        The heading that it stands under in the help.
    meaning : str
        What it means, in a line.
    settings : dict
        Further arguments of :func:`click.option`.
    """

    flags: tuple[str, ...]
    metavar: str
    group: str
    meaning: str
    settings: dict[str, Any] = field(default_factory=dict, hash=False)


TERMINAL: tuple[TerminalRow, ...] = (
    TerminalRow(
        ("--scheduler",), "ADDRESS", _CLUSTER, "a Dask cluster that exists: its scheduler's address"
    ),
    TerminalRow(
        ("--scheduler-file",), "FILE", _CLUSTER, "the same, by the scheduler's file",
        {"type": click.Path(exists=True, dir_okay=False)},
    ),
    TerminalRow(
        ("--cluster",), "MODULE.CLASS[:FILE]", _CLUSTER,
        "a class of clusters to start one from; FILE has its arguments, as YAML",
    ),
    TerminalRow(
        ("-H", "--hosts"), "A:2,B:2", _HOSTS,
        "hosts and their slots; over ssh, unless it is this machine",
    ),
    TerminalRow(
        ("--hostfile",), "FILE", _HOSTS, "the same, a line a host: 'NAME slots=N' or 'NAME:N'",
        {"type": click.Path(exists=True, dir_okay=False)},
    ),
    TerminalRow(
        ("--host-discovery-script",), "FILE", _HOSTS,
        "a script that prints the present hosts, a line each: NAME or NAME:SLOTS",
    ),
    TerminalRow(
        ("--hosts-from",), "NAME[:WHICH]", _HOSTS,
        "present hosts from slurm, aws-asg:GROUP, k8s:SELECTOR, or a plugin of your own",
    ),
    TerminalRow(
        ("--discovery-interval",), "TIME", _HOSTS, "seconds between two looks for hosts",
        {"type": click.FloatRange(min=0, min_open=True), "default": 1.0},
    ),
    TerminalRow(
        ("-p", "--ssh-port"), "PORT", _HOSTS, "port of ssh on all hosts",
        {"type": click.IntRange(1, 65535)},
    ),
    TerminalRow(
        ("-i", "--ssh-identity-file"), "FILE", _HOSTS, "private key for ssh",
        {"type": click.Path(exists=True, dir_okay=False)},
    ),
    TerminalRow(
        ("--remote-python",), "PATH", _HOSTS, "Python on other hosts; this one's path by default"
    ),
    TerminalRow(
        ("--shared-fs",), "", _SCRIPT,
        "all hosts see the script at its path: nothing is sent, and files are used as they are",
        {"is_flag": True},
    ),
    TerminalRow(
        ("--alias/--no-alias",), "", _SCRIPT,
        "have 'import horovod' find nbelastic; by default, where Horovod is not installed",
        {"default": None},
    ),
    TerminalRow(("--name",), "NAME", _SCRIPT, "name of the job; made up by default"),
    TerminalRow(
        ("--plain",), "", _VIEW, "a line for each event, also on a terminal", {"is_flag": True}
    ),
    TerminalRow(
        ("--json",), "", _VIEW, "a JSON object for each event and each output", {"is_flag": True}
    ),
    TerminalRow(("-q", "--quiet"), "", _VIEW, "the output of rank 0 alone", {"is_flag": True}),
    TerminalRow(
        ("--prefix-output",), "", _VIEW,
        "output of all ranks, each line with its rank: [0]<stdout>:", {"is_flag": True},
    ),
    TerminalRow(
        ("--output-filename",), "DIR", _VIEW,
        "also write the output of each rank to DIR/rank.N/stdout",
        {"type": click.Path(file_okay=False)},
    ),
    TerminalRow(
        ("--verbose",), "", _VIEW, "also show what nbelastic and Dask log", {"is_flag": True}
    ),
)  # fmt: skip
"""All options of ``run`` that ``fit`` does not have."""


def flags_of(row: OptionRow) -> tuple[str, ...]:
    """Return the names of a job's option on a command line, Horovod's among them."""
    short = tuple(flag for flag in HOROVODS.get(row.name, ()) if not flag.startswith("--"))
    others = tuple(flag for flag in HOROVODS.get(row.name, ()) if flag.startswith("--"))
    return (*short, row.flag, *others)


class _JobOption(click.Option):
    """An option of ``fit``, with the values that its kind allows."""

    def __init__(self, row: OptionRow) -> None:
        self.row = row
        how: dict[str, Any] = {"metavar": row.kind.metavar or None}
        if isinstance(row.kind, Flag):
            how |= {"is_flag": True, "default": None}
        elif isinstance(row.kind, Range):
            how |= {"nargs": 2}
        elif isinstance(row.kind, EnvVariables):  # values may have commas
            how |= {"multiple": True, "metavar": "NAME[=VALUE]"}
        elif row.kind.several:
            how |= {"multiple": True, "metavar": row.kind.metavar.partition(" ")[0] + ",…"}
        default = DEFAULTS[row.name]
        known = "" if default in (None, False) else f" [{default}]"
        super().__init__(
            [*flags_of(row), row.name],
            help=row.meaning + known,
            callback=self._read,
            **how,
        )

    def _read(self, ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        """Return the value as ``fit`` takes it; None where it was not given."""
        if value is None or value == () or value is False:
            return None
        if value is True:
            return True
        if self.row.kind.several and not isinstance(self.row.kind, (Range, EnvVariables)):
            words = [word for each in value for word in each.split(",") if word]
        else:
            words = list(value) if isinstance(value, tuple) else [value]
        try:
            return self.row.kind.read(self.row.name, words)
        except OptionError as error:
            if isinstance(self.row.kind, EnvVariables):  # without values: some are secret
                raise click.BadParameter(str(error), ctx=ctx, param=self) from None
            expected = self.row.kind.as_words or self.row.kind.expects
            raise click.BadParameter(
                f"{' '.join(words)!r} must be {expected}", ctx=ctx, param=self
            ) from None


def job_options() -> list[click.Option]:
    """Return the options of a job, from ``fit``'s table."""
    return [_JobOption(row) for row in TABLE]


class _TerminalOption(click.Option):
    """An option of the terminal's own."""

    def __init__(self, row: TerminalRow) -> None:
        self.row = row
        name = row.flags[-1].partition("/")[0].lstrip("-").replace("-", "_")
        how = {"metavar": row.metavar or None, "help": row.meaning} | row.settings
        super().__init__([*row.flags, name], **how)


class RunCommand(click.Command):
    """A command with all options of ``run``, and help by group.

    Everything from the first word on that is no option is the script's own command.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.context_settings["allow_interspersed_args"] = False
        mine = [_TerminalOption(row) for row in TERMINAL]
        words = click.Argument(["command"], nargs=-1, type=click.UNPROCESSED, metavar="COMMAND …")
        self.params = [*job_options(), *mine, words]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse a line; an unknown option is an error that says what was probably meant."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            names = [name for param in self.params for name in param.opts if name.startswith("--")]
            hint = did_you_mean(error.option_name, names)
            raise click.UsageError(f"there is no option {error.option_name}{hint}", ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings."""
        for group, options in _by_group(self.params).items():
            rows = [record for option in options if (record := option.get_help_record(ctx))]
            with formatter.section(group):
                formatter.write_dl(rows, col_max=34)


def _by_group(params: Iterable[click.Parameter]) -> dict[str, list[click.Parameter]]:
    groups: dict[str, list[click.Parameter]] = {}
    for param in params:
        if isinstance(param, click.Option):
            row = getattr(param, "row", None)
            groups.setdefault(row.group if row else "Other", []).append(param)
    return groups


def run_command(function: Callable[..., Any]) -> RunCommand:
    """Make the command ``run`` of a function that takes all options by name."""
    text = textwrap.dedent(function.__doc__ or "")
    return RunCommand(name="run", callback=function, help=text)
