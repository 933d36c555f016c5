"""Subcommands of ``%elastic``: inspect and control jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nbelastic.driver import Job
from nbelastic.driver.options import LIMITS, ROWS, Kind, count
from nbelastic.driver.parser import LineOption, did_you_mean
from nbelastic.errors import OptionError
from nbelastic.render import JobSnapshot, line, status_lines

from .options import MagicCommand, MagicOptionError, split

MAGIC = "%elastic"
REMEMBERED = 5  # ended jobs kept although no variable holds them, with their results
_JOB = LineOption(["--job"], Kind(str, "text", "NAME"))
_RANK = LineOption(["--rank"], count(0))

OPTIONS: dict[str, list[LineOption]] = {
    "status": [_JOB],
    "stop": [_JOB],
    "cancel": [_JOB],
    "scale": [_JOB, *(LineOption.of(ROWS[name]) for name in LIMITS)],
    "logs": [_JOB, _RANK],
    "why": [_JOB, _RANK],
    "jobs": [],
}
"""The options of each command."""

CHANGES = frozenset({"stop", "cancel", "scale"})  # a job that has ended is left alone


class Commands:
    """The subcommands of ``%elastic`` for one notebook."""

    def __init__(self, namespace: Mapping[str, Any], write: Callable[[str], object]) -> None:
        self._namespace = namespace
        self._write = write
        self._jobs: list[Any] = []

    def remember(self, job: Any) -> None:
        """Keep a job, for commands without a variable of the job."""
        ended = [each for each in self._jobs if each.done()]
        forgotten = {id(each) for each in ended[: -REMEMBERED + 1]}
        self._jobs = [each for each in self._jobs if id(each) not in forgotten] + [job]

    def run(self, words: str) -> None:
        """Run the words after ``%elastic``."""
        command, *options = split(words, MAGIC) or [""]
        if command not in OPTIONS:
            hint = did_you_mean(command, OPTIONS) or f"; there are {', '.join(OPTIONS)}"
            what = f"there is no command {command!r}" if command else "a command is missing"
            raise MagicOptionError(f"{MAGIC}: {what}{hint} (every command: {MAGIC}?)")
        given = MagicCommand(f"{MAGIC} {command}", OPTIONS[command]).read(options)
        if command == "jobs":
            self._say(*[line(JobSnapshot.of(job)) for job in self.jobs()] or ["no job yet"])
            return
        job = self.find(given.pop("job", None))
        if command in CHANGES and job.done():
            self._say(f"{job.name} has ended already: {job.status.state}")
            return
        try:
            getattr(self, f"_{command}")(job, **given)
        except MagicOptionError:
            raise
        except OptionError as error:  # raised by the job
            raise MagicOptionError(f"{MAGIC} {command}: {error} (more: {MAGIC}?)") from None

    # -- jobs ----------------------------------------------------------------------------------

    def jobs(self) -> list[Any]:
        """Return the jobs of this notebook, the latest first."""
        held = [value for value in list(self._namespace.values()) if isinstance(value, Job)]
        known = {id(job): job for job in (*self._jobs, *held)}
        return sorted(known.values(), key=lambda job: -job.started)

    def find(self, name: str | None) -> Any:
        """Return the job with a name or in a variable; the latest by default."""
        jobs = self.jobs()
        if not jobs:
            raise MagicOptionError(
                f"{MAGIC}: there is no job yet; run a cell with %%elastic_train --noblock, "
                "or nbelastic.fit(..., block=False), first"
            )
        if name is None:
            return jobs[0]
        held = self._namespace.get(name)
        found = [job for job in jobs if job is held or job.name == name]
        if not found:
            names = ", ".join(job.name for job in jobs[:5])
            raise MagicOptionError(
                f"{MAGIC}: --job {name}: no job and no variable with a job has this name; "
                f"the latest jobs are {names}"
            )
        return found[0]

    # -- commands ------------------------------------------------------------------------------

    def _status(self, job: Any) -> None:
        self._say(*status_lines(JobSnapshot.of(job)))

    def _stop(self, job: Any) -> None:
        job.stop()
        self._say(f"{job.name} stops at its next commit ({MAGIC} cancel stops it at once)")

    def _cancel(self, job: Any) -> None:
        job.cancel()
        self._say(f"{job.name} stops now")

    def _scale(self, job: Any, **limits: Any) -> None:
        if not limits:
            raise MagicOptionError(
                f"{MAGIC} scale: a limit is missing, as in {MAGIC} scale --min-np 2 --max-np 6"
            )
        job.scale(**limits)
        changes = ", ".join(f"{name}={value}" for name, value in limits.items())
        self._say(f"{job.name}: {changes} from its next commit on")

    def _logs(self, job: Any, rank: int | None = None) -> None:
        subject = "its ranks have" if rank is None else f"rank {rank} has"
        text = job.logs(rank).removesuffix("\n")
        self._say(text or f"{job.name}: {subject} printed nothing yet")

    def _why(self, job: Any, rank: int | None = None) -> None:
        self._say(job.why(rank))

    def _say(self, *lines: str) -> None:
        self._write("\n".join(lines) + "\n")
