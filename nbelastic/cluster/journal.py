"""Save the journal of a job as JSON lines, and replay it.

The scheduler writes it (``nbelastic.debug.journal``); any process can read it. The first line has
the membership machine, each other line one event with its time and chance, and the effects.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import getpass
import json
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import dask.config
import msgspec

from nbelastic.errors import OptionError
from nbelastic.membership import Machine, pack_machine, unpack_machine
from nbelastic.messages import AnyEvent, Effect, Event

logger = logging.getLogger(__name__)

MOST_BYTES = 32 * 2**20  # of a file; then it begins anew, and the old is ``NAME.old.jsonl``


class JournalFile:
    """Journal of a job on the scheduler's disk, at most twice MOST_BYTES."""

    def __init__(self, path: Path, job: str, machine: Machine) -> None:
        self.path = path
        self._job = job
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._begin(machine)

    def _begin(self, machine: Machine) -> None:
        # Users' errors are in it, as in the scheduler's log: only its own user may read them.
        self._file = create(self.path)
        self._write({"job": self._job, "machine": base64.b64encode(pack_machine(machine)).decode()})

    def write(
        self, event: Event, now: float, chance: float, effects: list[Effect], machine: Machine
    ) -> None:
        """Add an event and the machine's effects."""
        done = msgspec.to_builtins({"event": event, "effects": effects})
        self._write({"time": time.time(), "now": now, "chance": chance, **done})
        if self._file.tell() > MOST_BYTES:  # the newest part must be one that can be replayed
            self._file.close()
            self.path.replace(self.path.with_suffix(".old.jsonl"))
            self._begin(machine)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def open_journal(job: str, uid: str, machine: Machine) -> JournalFile | None:
    """Begin the journal of a job, if Dask's configuration of this process asks for one."""
    where = dask.config.get("nbelastic.debug.journal", None)
    if not where:
        return None
    name = re.sub(r"[^\w.-]", "_", f"{job}-{uid}.jsonl")
    try:
        if not isinstance(where, str):
            parent = dask.config.get("temporary-directory", None) or tempfile.gettempdir()
            where = os.path.join(parent, f"nbelastic-journals-{getpass.getuser()}")
            own_directory(Path(where))  # in a directory of all users
        journal = JournalFile(Path(where) / name, job, machine)
    except OSError as error:
        logger.warning("job %r has no journal: %s", job, error)
        return None
    logger.info("the journal of job %r is written to %s", job, journal.path)
    return journal


# -- files readable by this user alone -------------------------------------------------------------
#
# Another user may have made a directory there first, or put a link in a file's place.


def own_directory(path: Path) -> None:
    """Make a private directory of this user; raise PermissionError for another user's."""
    # Its parents are not looked at: they belong to this user, or are sticky as /tmp is.
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{path} is a link or a file, and must be a directory")
    if hasattr(os, "geteuid") and found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user (number {found.st_uid})")
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)


def create(path: Path) -> TextIO:
    """Create a new file for this user alone; FileExistsError for a link, too."""
    opener = functools.partial(os.open, mode=0o600)
    return open(path, "x", buffering=1, encoding="utf-8", opener=opener)


@dataclasses.dataclass(frozen=True)
class ReplayedStep:
    """A line of a journal, handled again."""

    time: float
    event: Event
    effects: list[Effect]
    machine: Machine


def replay(path: str | os.PathLike[str]) -> tuple[str, Iterator[ReplayedStep]]:
    """Read a journal; return the job's name, and each step as a new machine decides it.

    Raises
    ------
    OptionError
        The file is no journal, or this version of nbelastic decides otherwise.
    """
    try:
        *lines, _ = Path(path).read_text(encoding="utf-8").split("\n")  # the last may be cut
        first = json.loads(lines[0])
        machine = unpack_machine(base64.b64decode(first["machine"]))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise OptionError(f"{os.fspath(path)}: no journal of a job ({error!r})") from error
    return first["job"], _steps(os.fspath(path), lines[1:], machine)


def _steps(path: str, lines: list[str], machine: Machine) -> Iterator[ReplayedStep]:
    for number, line in enumerate(map(json.loads, lines), 2):
        event: Event = msgspec.convert(line["event"], AnyEvent)
        effects = machine.handle(event, line["now"], line["chance"])
        if json.loads(json.dumps(msgspec.to_builtins(effects))) != line["effects"]:
            raise OptionError(f"{path}, line {number}: another version of nbelastic decided this")
        yield ReplayedStep(line["time"], event, effects, machine)
