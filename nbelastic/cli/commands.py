"""Commands to start scripts, and to look at jobs of a cluster and change them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import click

from nbelastic import driver
from nbelastic.cli.clusters import existing
from nbelastic.driver.options import LIMITS, OF_SCRIPTS, ROWS, OptionRow, changed_limits
from nbelastic.driver.parser import LineCommand, LineOption
from nbelastic.errors import NbelasticError, OptionError
from nbelastic.messages import CANCELLED, StopRequested
from nbelastic.render import JobSnapshot, duration, sentence, status_lines
from nbelastic.status import aligned

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
    """Return an option of the terminal's own; a flag if it has no metavar."""
    if not metavar:
        settings["is_flag"] = True
    how = {"group": group, "metavar": metavar or None, "help": meaning}
    return LineOption(flags.split(), **how | settings)


LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")  # Horovod's levels
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
    flags = (row.flag, *HOROVODS.get(row.name, ()))
    return tuple(sorted(flags, key=lambda flag: flag.startswith("--")))


class Command(LineCommand):
    """A command whose errors are a line, and whose value is the exit code; 2 for wrong options."""

    def invoke(self, ctx: click.Context) -> None:
        """Call the command's function."""
        try:
            code = super().invoke(ctx)
        except OptionError as error:
            raise click.UsageError(str(error)) from None
        except NbelasticError as error:
            raise click.ClickException(f"{type(error).__name__}: {error}") from None
        ctx.exit(code or 0)


class RunCommand(Command):
    """A command with all options of ``run``, help by group, and a script at the end."""

    def __init__(self, function: Callable[..., Any]) -> None:
        jobs = (LineOption.of(row, flags_of(row)) for row in OF_SCRIPTS)
        words = click.Argument(["command"], nargs=-1, type=click.UNPROCESSED, metavar="COMMAND …")
        super().__init__(
            "run",
            callback=function,
            help=function.__doc__,
            params=[*jobs, *TERMINAL, words],
            context_settings={"allow_interspersed_args": False},
        )


_MISSING = "the cluster is missing: --scheduler ADDRESS or --scheduler-file"


@RunCommand
def run(**options: Any) -> int:
    """Run a Python script as an elastic job.

    COMMAND is a script and its arguments, as in "python train.py --epochs 3". It runs in each rank,
    from the top, and its elastic loop goes on while ranks come and go. Without options that name
    machines, ranks run on this one.

    \b
    dask elastic run -np 4 python train.py
    dask elastic run -np 2 --min-np 2 --max-np 8 --host-discovery-script ./hosts.sh train.py
    dask elastic run --scheduler tcp://10.0.0.5:8786 --min-np 2 train.py
    """  # noqa: D301 -- click wants the character, which keeps lines apart
    from .run import run as run_script

    return run_script(options)


def _command(
    *, alone: bool = False, job: str = ""
) -> Callable[[Callable[..., int | None]], click.Command]:
    """Make a command of a function of a scheduler's address, or of None too if `alone`.

    With a `job`, ``open`` or ``ended``, the function also gets a job's name.
    """

    def make(function: Callable[..., int | None]) -> click.Command:
        @functools.wraps(function)
        def call(scheduler: str | None, scheduler_file: str | None, **given: Any) -> int | None:
            address = existing({"scheduler": scheduler, "scheduler_file": scheduler_file}) or None
            if address is None and not alone:
                raise OptionError(_MISSING)
            if job and given["name"] is None:
                given["name"] = _only_job(address, ended=job == "ended")
            return function(address, **given)

        command = click.command(name=function.__name__, cls=Command)(call)
        command.params += TERMINAL[:2]  # of the scheduler
        if job:
            command.params.insert(0, click.Argument(["name"], required=False))
        return command

    return make


def _only_job(address: str | None, *, ended: bool) -> str:
    """Return the name of the only open job, or, where `ended` will do, of the last ended job."""
    jobs = driver.jobs(address)
    found = [job.name for job in jobs if job.ended is None]
    if not found and ended:
        found = [job.name for job in jobs][-1:]
    if len(found) != 1:
        there = ", ".join(found) or "none"
        raise OptionError(f"a job's name is missing; there are: {there}")
    return found[0]


@_command()
def jobs(address: str) -> None:
    """List the jobs of a cluster."""
    rows = [("NAME", "STATE", "RANKS", "COMMITS", "AGE", "")]
    for job in driver.jobs(address):
        age = duration(time.time() - job.started)
        kernel = "" if job.attached else "without a kernel"
        if job.ended is not None:
            kernel = f"ended {duration(time.time() - job.ended)} ago"
        rows.append((job.name, job.state, f"{job.size:,}", f"{job.commits:,}", age, kernel))
    click.echo(aligned(rows))


@_command(job="ended")
def status(address: str, name: str) -> None:
    """Show a job: its state, its ranks, and its history."""
    snapshot = JobSnapshot.of(driver.look(name, cluster=address))
    for words in status_lines(snapshot):
        click.echo(words)
    for words in filter(None, (sentence(snapshot, event) for event in snapshot.history)):
        click.echo(f"  {words}")


@_command()
@click.argument("name")
@click.argument("rank", type=click.IntRange(0), required=False)
def why(address: str, name: str, rank: int | None) -> None:
    """Explain decisions on a job or a rank: the event, and the reporting process."""
    click.echo(driver.look(name, cluster=address).why(rank))


@_command(job="ended")
@click.option("--rank", type=click.IntRange(0), metavar="N", help="Only this rank's output.")
def logs(address: str, name: str, rank: int | None) -> None:
    """Show the output of ranks, or only the newest part of a large output."""
    click.echo(driver.look(name, cluster=address).logs(rank), nl=False)


@_command(job="open")
def scale(address: str, name: str, **limits: Any) -> None:
    """Change how many ranks a job may have, and its place among others.

    It holds from the next commit on.
    """
    if all(value is None for value in limits.values()):
        raise OptionError("give --min-np, --max-np, --priority or --weight")
    change = changed_limits(driver.look(name, cluster=address).status, **limits)
    driver.ask(name, change, cluster=address)
    click.echo(f"{name}: the new limits hold from the next commit on")


scale.params += [LineOption.of(ROWS[name]) for name in LIMITS]


@_command(job="open")
def stop(address: str, name: str) -> None:
    """End a job at its next commit."""
    driver.ask(name, StopRequested(), cluster=address)
    click.echo(f"{name}: ends at its next commit")


@_command(job="open")
def cancel(address: str, name: str) -> None:
    """End a job now, wherever its ranks are."""
    driver.ask(name, StopRequested(now=True, reason=CANCELLED), cluster=address)
    click.echo(f"{name}: ends now")


@_command(job="open")
def attach(address: str, name: str, **how: bool) -> int:
    """Take a job over, show it, and wait for its end.

    Ctrl-C then stops the job. The process that waited for it so far is told that it goes on here.
    """
    from . import run as running
    from .display import CommandDisplay

    display = CommandDisplay(running.view_options(how))
    driver.set_display(display)
    return running.exit_code(lambda: driver.attach(name, cluster=address, block=True), display)


attach.params += [
    each for each in TERMINAL if each.name in ("plain", "json", "quiet", "prefix_output")
]


@_command(alone=True)
def doctor(address: str | None) -> int:
    """Check a cluster, or this machine: versions, memory, ports, GPUs."""
    from .doctor import examine, findings, report

    return report(findings(*examine(address)), click.echo)
