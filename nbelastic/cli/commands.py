"""Commands to start scripts, and to look at jobs of a cluster and change them.

``attach`` takes a job over. All others leave it to the process that waits for it.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import click

from nbelastic import driver
from nbelastic.driver.options import LIMITS, ROWS, LineOption
from nbelastic.errors import NbelasticError, OptionError
from nbelastic.render import JobSnapshot, duration, line, rank_line, sentence

from .clusters import existing
from .options import run_command

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = click.argument("name", required=False)
_SCHEDULER = "The scheduler's address, as in tcp://10.0.0.5:8786."
_MISSING = "the cluster is missing: --scheduler ADDRESS or --scheduler-file"


def _run(**options: Any) -> None:
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

    _exit(lambda: run_script(options))


run = run_command(_run)


def _exit(call: Callable[[], int | None]) -> None:
    """Exit with the code of a command; errors are a line, and wrong options exit with 2."""
    try:
        code = call()
    except OptionError as error:
        raise click.UsageError(str(error)) from None
    except NbelasticError as error:
        raise click.ClickException(f"{type(error).__name__}: {error}") from None
    raise SystemExit(code or 0)


def _command(*, alone: bool = False) -> Callable[[Callable[..., int | None]], click.Command]:
    """Make a command of a function that gets a scheduler's address; None only if it works alone."""

    def make(function: Callable[..., int | None]) -> click.Command:
        @functools.wraps(function)
        def call(scheduler: str | None, scheduler_file: str | None, **given: Any) -> None:
            def run_it() -> int | None:
                file = {"scheduler": scheduler, "scheduler_file": scheduler_file}
                address = existing(file) or None
                if address is None and not alone:
                    raise OptionError(_MISSING)
                return function(address, **given)

            _exit(run_it)

        command = click.command(name=function.__name__)(call)
        command.params += [
            click.Option(["--scheduler"], metavar="ADDRESS", help=_SCHEDULER),
            click.Option(
                ["--scheduler-file"],
                metavar="FILE",
                type=click.Path(exists=True, dir_okay=False),
                help="The scheduler's file.",
            ),
        ]
        return command

    return make


def _job_name(name: str | None, address: str, *, ended: bool = False) -> str:
    """Return a job's name; by default that of the only job there, or of the last that ended."""
    if name is not None:
        return name
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
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


@_command()
@_NAME
def status(address: str, name: str | None) -> None:
    """Show a job: its state, its ranks, and what has happened to it."""
    snapshot = JobSnapshot.of(driver.look(_job_name(name, address, ended=True), cluster=address))
    click.echo(line(snapshot))
    if snapshot.status.reason:
        click.echo(f"  {snapshot.status.reason}")
    for rank in snapshot.status.ranks:
        click.echo(rank_line(rank))
    for words in filter(None, (sentence(snapshot, event) for event in snapshot.history)):
        click.echo(f"  {words}")


@_command(alone=True)
@click.argument("name")
@click.argument("rank", type=click.IntRange(0), required=False)
def why(address: str | None, name: str, rank: int | None) -> None:
    """Explain what was decided on a job or a rank: what was seen, by which process, and the rule.

    NAME is a job, or the file of a journal (nbelastic.debug.journal), which is replayed.
    """
    if name.endswith(".jsonl"):
        click.echo(driver.explain_journal(name, rank))
    elif address is None:
        raise OptionError(_MISSING)
    else:
        click.echo(driver.look(name, cluster=address).why(rank))


@_command()
@_NAME
@click.option("--rank", type=click.IntRange(0), metavar="N", help="Only this rank's output.")
def logs(address: str, name: str | None, rank: int | None) -> None:
    """Show what ranks have printed; where that is a lot, the newest of it."""
    click.echo(
        driver.look(_job_name(name, address, ended=True), cluster=address).logs(rank), nl=False
    )


@_command()
@_NAME
def scale(address: str, name: str | None, **limits: Any) -> None:
    """Change how many ranks a job may have, and its place among others.

    It holds from the next commit on.
    """
    if all(value is None for value in limits.values()):
        raise OptionError("give --min-np, --max-np, --priority or --weight")
    found = _job_name(name, address)
    driver.ask_to_scale(found, cluster=address, **limits)
    click.echo(f"{found}: the new limits hold from the next commit on")


scale.params += [LineOption.of(ROWS[name]) for name in LIMITS]


@_command()
@_NAME
def stop(address: str, name: str | None) -> None:
    """End a job at its next commit."""
    found = _job_name(name, address)
    driver.ask_to_stop(found, cluster=address)
    click.echo(f"{found}: ends at its next commit")


@_command()
@_NAME
def cancel(address: str, name: str | None) -> None:
    """End a job now, wherever its ranks are."""
    found = _job_name(name, address)
    driver.ask_to_stop(found, cluster=address, now=True)
    click.echo(f"{found}: ends now")


@_command()
@_NAME
@click.option("--plain", is_flag=True, help="A line for each event, also on a terminal.")
@click.option("--json", is_flag=True, help="A JSON object for each event and each output.")
@click.option("-q", "--quiet", is_flag=True, help="The output of rank 0 alone.")
@click.option("--prefix-output", is_flag=True, help="Output of all ranks, with their numbers.")
def attach(address: str, name: str | None, **how: bool) -> int:
    """Take a job over, show it, and wait for its end.

    Ctrl-C then stops the job. The process that waited for it so far is told that it goes on here.
    """
    from . import run as running
    from .view import CommandDisplay

    found = _job_name(name, address)
    display = CommandDisplay(running.view_options(how))
    driver.set_display(display)
    return running.exit_code(lambda: driver.attach(found, cluster=address, block=True), display)


@_command(alone=True)
@click.option("--json", "as_json", is_flag=True, help="A JSON object for each finding.")
def doctor(address: str | None, as_json: bool) -> int:
    """Check a cluster, or this machine: versions, memory, ports, clocks, GPUs."""
    from .doctor import examine, report

    return report(examine(address), as_json=as_json, write=click.echo)
