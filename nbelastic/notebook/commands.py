"""Subcommands of ``%elastic``: inspect and control a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbelastic.driver.options import LIMITS, ROWS, count
from nbelastic.driver.parser import LineOption, did_you_mean
from nbelastic.errors import OptionError
from nbelastic.render import JobSnapshot, status_lines

from .options import MagicCommand, MagicOptionError, split

MAGIC = "%elastic"
CHANGES = frozenset({"stop", "cancel", "scale"})  # a job that has ended is left alone


def run_command(words: str, job: Any) -> str:
    """Run the words after ``%elastic`` on a job, or on none; return the lines to show."""
    name, *given = split(words, MAGIC) or [""]
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or f"; there are {', '.join(COMMANDS)}"
        what = f"there is no command {name!r}" if name else "a command is missing"
        raise MagicOptionError(f"{MAGIC}: {what}{hint} (every command: {MAGIC}?)")
    command, options = COMMANDS[name]
    values = MagicCommand(f"{MAGIC} {name}", options).read(given)
    if job is None:
        raise MagicOptionError(
            f"{MAGIC}: there is no job yet; run a cell with %%elastic_train --noblock, "
            "or nbelastic.fit(..., block=False), first"
        )
    if name in CHANGES and job.done():
        return f"{job.name} has ended already: {job.status.state}"
    try:
        return command(job, **values)
    except OptionError as error:
        raise MagicOptionError(f"{MAGIC} {name}: {error} (more: {MAGIC}?)") from None


def _status(job: Any) -> str:
    return "\n".join(status_lines(JobSnapshot.of(job)))


def _stop(job: Any) -> str:
    job.stop()
    return f"{job.name} stops at its next commit ({MAGIC} cancel stops it at once)"


def _cancel(job: Any) -> str:
    job.cancel()
    return f"{job.name} stops now"


def _scale(job: Any, **limits: Any) -> str:
    if not limits:
        raise OptionError(f"a limit is missing, as in {MAGIC} scale --min-np 2 --max-np 6")
    job.scale(**limits)
    changes = ", ".join(f"{name}={value}" for name, value in limits.items())
    return f"{job.name}: {changes} from its next commit on"


def _logs(job: Any, rank: int | None = None) -> str:
    text: str = job.logs(rank).removesuffix("\n")
    subject = "its ranks have" if rank is None else f"rank {rank} has"
    return text or f"{job.name}: {subject} printed nothing yet"


def _why(job: Any, rank: int | None = None) -> str:
    text: str = job.why(rank)
    return text


_RANK = LineOption(["--rank"], count(0))

COMMANDS: dict[str, tuple[Callable[..., str], list[LineOption]]] = {
    "status": (_status, []),
    "stop": (_stop, []),
    "cancel": (_cancel, []),
    "scale": (_scale, [LineOption.of(ROWS[name]) for name in LIMITS]),
    "logs": (_logs, [_RANK]),
    "why": (_why, [_RANK]),
}
"""The function and the options of each command."""
