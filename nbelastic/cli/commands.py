"""Commands to start scripts, and to look at jobs of a cluster and change them.

``attach`` takes a job over. All others leave it to the process that waits for it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nbelastic import driver
from nbelastic.driver.options import LIMITS, ROWS, LineOption
from nbelastic.errors import NbelasticError, OptionError
from nbelastic.render import JobSnapshot, duration, line, rank_line, sentence

from .clusters import existing
from .options import run_command

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")

_SCHEDULER = click.option(
    "--scheduler", metavar="ADDRESS", help="The scheduler's address, as in tcp://10.0.0.5:8786."
)
_SCHEDULER_FILE = click.option(
    "--scheduler-file",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="The scheduler's file.",
)
_NAME = click.argument("name", required=False)


def _with_scheduler(function: F) -> F:
    return _SCHEDULER(_SCHEDULER_FILE(function))


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


def _exit(call: Callable[[], int]) -> None:
    """Exit with the code of a command; errors are a line, and wrong options exit with 2."""
    try:
        code = call()
    except OptionError as error:
        raise click.UsageError(str(error)) from None
    except NbelasticError as error:
        raise click.ClickException(f"{type(error).__name__}: {error}") from None
    raise SystemExit(code)


def _address(scheduler: str | None, scheduler_file: str | None) -> str:
    try:
        found = existing({"scheduler": scheduler, "scheduler_file": scheduler_file})
    except OptionError as error:
        raise click.UsageError(str(error)) from None
    if found is None:
        raise click.UsageError("the cluster is missing: --scheduler ADDRESS or --scheduler-file")
    return found


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


@click.command()
@_with_scheduler
def jobs(scheduler: str | None, scheduler_file: str | None) -> None:
    """List the jobs of a cluster."""
    address = _address(scheduler, scheduler_file)

    def show() -> int:
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
        return 0

    _exit(show)


@click.command()
@_NAME
@_with_scheduler
def status(name: str | None, scheduler: str | None, scheduler_file: str | None) -> None:
    """Show a job: its state, its ranks, and what has happened to it."""
    address = _address(scheduler, scheduler_file)

    def show() -> int:
        job = driver.look(_job_name(name, address, ended=True), cluster=address)
        snapshot = JobSnapshot.of(job)
        click.echo(line(snapshot))
        if snapshot.status.reason:
            click.echo(f"  {snapshot.status.reason}")
        for rank in snapshot.status.ranks:
            click.echo(rank_line(rank))
        for words in filter(None, (sentence(snapshot, event) for event in snapshot.history)):
            click.echo(f"  {words}")
        return 0

    _exit(show)


@click.command()
@click.argument("name")
@click.argument("rank", type=click.IntRange(0), required=False)
@_with_scheduler
def why(name: str, rank: int | None, scheduler: str | None, scheduler_file: str | None) -> None:
    """Explain what was decided on a job or a rank: what was seen, by which process, and the rule.

    NAME is a job, or the file of a journal (nbelastic.debug.journal), which is replayed.
    """
    from_file = name.endswith(".jsonl")
    address = "" if from_file else _address(scheduler, scheduler_file)

    def show() -> int:
        if from_file:
            click.echo(driver.explain_journal(name, rank))
        else:
            click.echo(driver.look(name, cluster=address).why(rank))
        return 0

    _exit(show)


@click.command()
@_NAME
@click.option("--rank", type=click.IntRange(0), metavar="N", help="Only this rank's output.")
@_with_scheduler
def logs(
    name: str | None, rank: int | None, scheduler: str | None, scheduler_file: str | None
) -> None:
    """Show what ranks have printed; where that is a lot, the newest of it."""
    address = _address(scheduler, scheduler_file)

    def show() -> int:
        job = driver.look(_job_name(name, address, ended=True), cluster=address)
        click.echo(job.logs(rank), nl=False)
        return 0

    _exit(show)


@click.command()
@_NAME
@_with_scheduler
def scale(
    name: str | None, scheduler: str | None, scheduler_file: str | None, **limits: Any
) -> None:
    """Change how many ranks a job may have, and its place among others.

    It holds from the next commit on.
    """
    address = _address(scheduler, scheduler_file)
    if all(value is None for value in limits.values()):
        raise click.UsageError("give --min-np, --max-np, --priority or --weight")

    def ask() -> int:
        found = _job_name(name, address)
        driver.ask_to_scale(found, cluster=address, **limits)
        click.echo(f"{found}: the new limits hold from the next commit on")
        return 0

    _exit(ask)


scale.params += [LineOption.of(ROWS[name]) for name in LIMITS]


@click.command()
@_NAME
@_with_scheduler
def stop(name: str | None, scheduler: str | None, scheduler_file: str | None) -> None:
    """End a job at its next commit."""
    _stop(name, _address(scheduler, scheduler_file), now=False)


@click.command()
@_NAME
@_with_scheduler
def cancel(name: str | None, scheduler: str | None, scheduler_file: str | None) -> None:
    """End a job now, wherever its ranks are."""
    _stop(name, _address(scheduler, scheduler_file), now=True)


def _stop(name: str | None, address: str, *, now: bool) -> None:
    def ask() -> int:
        found = _job_name(name, address)
        driver.ask_to_stop(found, cluster=address, now=now)
        click.echo(f"{found}: ends {'now' if now else 'at its next commit'}")
        return 0

    _exit(ask)


@click.command()
@_NAME
@click.option("--plain", is_flag=True, help="A line for each event, also on a terminal.")
@click.option("--json", is_flag=True, help="A JSON object for each event and each output.")
@click.option("-q", "--quiet", is_flag=True, help="The output of rank 0 alone.")
@click.option("--prefix-output", is_flag=True, help="Output of all ranks, with their numbers.")
@_with_scheduler
def attach(
    name: str | None, scheduler: str | None, scheduler_file: str | None, **how: bool
) -> None:
    """Take a job over, show it, and wait for its end.

    Ctrl-C then stops the job. The process that waited for it so far is told that it goes on here.
    """
    from . import run as running
    from .view import CommandDisplay

    address = _address(scheduler, scheduler_file)

    def wait() -> int:
        found = _job_name(name, address)
        display = CommandDisplay(running.view_options(how))
        driver.set_display(display)
        return running.exit_code(lambda: driver.attach(found, cluster=address, block=True), display)

    _exit(wait)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="A JSON object for each finding.")
@_with_scheduler
def doctor(as_json: bool, scheduler: str | None, scheduler_file: str | None) -> None:
    """Check a cluster, or this machine: versions, memory, ports, clocks, GPUs."""
    from .doctor import examine, report

    address = None
    if scheduler or scheduler_file:
        address = _address(scheduler, scheduler_file)
    _exit(lambda: report(examine(address), as_json=as_json, write=click.echo))
