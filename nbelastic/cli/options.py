"""Options of ``run``: those of ``fit`` from its table, and the terminal's own.

The options of a job come from :data:`nbelastic.driver.options.OF_SCRIPTS`, so a new one is an
option of the command, too. :data:`TERMINAL` lists the others. The tables in the documents are made
from both.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import click

from nbelastic.driver.options import OF_SCRIPTS, LineCommand, LineOption

if TYPE_CHECKING:
    from collections.abc import Callable

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


def _own(flags: str, metavar: str, group: str, meaning: str, **settings: Any) -> LineOption:
    """Return an option of the terminal's own; the last of its flags names the parameter."""
    words = flags.split()
    name = words[-1].partition("/")[0].lstrip("-").replace("-", "_")
    if not metavar and "default" not in settings:
        settings["is_flag"] = True
    how = {"group": group, "metavar": metavar or None, "help": meaning}
    return LineOption([*words, name], **how | settings)


LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
"""Horovod's levels."""

_FILE = click.Path(exists=True, dir_okay=False)

TERMINAL: tuple[LineOption, ...] = (
    _own("--scheduler", "ADDRESS", _CLUSTER, "a Dask cluster that exists: its scheduler's address"),
    _own("--scheduler-file", "FILE", _CLUSTER, "the same, by the scheduler's file", type=_FILE),
    _own("--cluster", "MODULE.CLASS[:FILE]", _CLUSTER,
         "a class of clusters to start one from; FILE has its arguments, as YAML"),
    _own("-H --hosts", "A:2,B:2", _HOSTS,
         "hosts and their slots; over ssh, unless it is this machine"),
    _own("--hostfile", "FILE", _HOSTS,
         "the same, a line a host: 'NAME slots=N' or 'NAME:N'", type=_FILE),
    _own("--host-discovery-script", "FILE", _HOSTS,
         "a script that prints the present hosts, a line each: NAME or NAME:SLOTS"),
    _own("--hosts-from", "NAME[:WHICH]", _HOSTS,
         "present hosts from slurm, aws-asg:GROUP, k8s:SELECTOR, or a plugin of your own"),
    _own("--discovery-interval", "TIME", _HOSTS,
         "seconds between two looks for hosts",
         type=click.FloatRange(min=0, min_open=True), default=1.0),
    _own("-p --ssh-port", "PORT", _HOSTS,
         "port of ssh on all hosts", type=click.IntRange(1, 65535)),
    _own("-i --ssh-identity-file", "FILE", _HOSTS, "private key for ssh", type=_FILE),
    _own("--remote-python", "PATH", _HOSTS, "Python on other hosts; this one's path by default"),
    _own("--shared-fs", "", _SCRIPT,
         "all hosts see the script at its path: nothing is sent, and files are used as they are"),
    _own("--alias/--no-alias", "", _SCRIPT,
         "have 'import horovod' find nbelastic; by default, where Horovod is not installed",
         default=None),
    _own("--name", "NAME", _SCRIPT, "name of the job; made up by default"),
    _own("--plain", "", _VIEW, "a line for each event, also on a terminal"),
    _own("--json", "", _VIEW, "a JSON object for each event and each output"),
    _own("-q --quiet", "", _VIEW, "the output of rank 0 alone"),
    _own("--prefix-output", "", _VIEW,
         "output of all ranks, each line with its rank: [0]<stdout>:"),
    _own("--output-filename", "DIR", _VIEW,
         "also write the output of each rank to DIR/rank.N/stdout",
         type=click.Path(file_okay=False)),
    _own("--verbose", "", _VIEW, "also show what nbelastic and Dask log"),
    _own("--log-level", "LEVEL", _VIEW, "level of nbelastic's log, here and in the ranks",
         type=click.Choice(LEVELS, case_sensitive=False)),
)  # fmt: skip
"""All options of ``run`` that ``fit`` does not have."""


def flags_of(row: OptionRow) -> tuple[str, ...]:
    """Return the names of a job's option on a command line, Horovod's among them."""
    others = HOROVODS.get(row.name, ())
    short = tuple(flag for flag in others if not flag.startswith("--"))
    return (*short, row.flag, *(flag for flag in others if flag not in short))


class RunCommand(LineCommand):
    """A command with all options of ``run``, and help by group.

    Everything from the first word on that is no option is the script's own command.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.context_settings["allow_interspersed_args"] = False
        jobs = (LineOption.of(row, flags_of(row)) for row in OF_SCRIPTS)
        words = click.Argument(["command"], nargs=-1, type=click.UNPROCESSED, metavar="COMMAND …")
        self.params = [*jobs, *TERMINAL, words]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.params:
            if record := param.get_help_record(ctx):
                groups.setdefault(getattr(param, "group", "Other"), []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records, col_max=34)


def run_command(function: Callable[..., Any]) -> RunCommand:
    """Make the command ``run`` of a function that takes all options by name."""
    text = textwrap.dedent(function.__doc__ or "")
    return RunCommand(name="run", callback=function, help=text)
