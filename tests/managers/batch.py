"""A batch system on this machine, with SLURM's commands."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

from tests.support.clusters import until

if TYPE_CHECKING:
    from pathlib import Path

SUBMIT = """#!/bin/sh
set -e
number=1
until mkdir "{folder}/$number" 2>/dev/null; do number=$((number + 1)); done
cp "$1" "{folder}/$number/script"
SLURM_JOB_ID=$number setsid sh "{folder}/$number/script" </dev/null >"{folder}/$number/log" 2>&1 &
echo $! >"{folder}/$number/pid"
echo "Submitted batch job $number"
"""

CANCEL = """#!/bin/sh
kill -TERM "-$(cat "{folder}/$1/pid")" && touch "{folder}/$1/cancelled"
"""


class BatchSystem:
    """Runs each job at once, in a session of its own. Cancelled, all its processes get SIGTERM."""

    def __init__(self, folder: Path) -> None:
        self.commands = folder / "commands"
        self._jobs = folder / "jobs"
        for directory in (self.commands, self._jobs):
            directory.mkdir()
        for name, text in (("sbatch", SUBMIT), ("scancel", CANCEL)):
            path = self.commands / name
            path.write_text(text.format(folder=self._jobs))
            path.chmod(0o700)

    def numbers(self, mark: str = "pid") -> list[int]:
        """Return the jobs that were submitted, or those with a mark."""
        return sorted(int(path.parent.name) for path in self._jobs.glob(f"*/{mark}"))

    def script(self, number: int) -> str:
        return (self._jobs / str(number) / "script").read_text()

    def end(self) -> None:
        """Kill what is left, and wait until nothing is."""
        for number in self.numbers():
            pid = int((self._jobs / str(number) / "pid").read_text())
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            until(lambda pid=pid: not _lives(pid), f"the end of batch job {number}")


def _lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
