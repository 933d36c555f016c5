"""Looking at a process from another one on its host, and judging by what is seen there.

A process that is stopped cannot say so, and one that holds the GIL cannot either; both fall
silent. Who looks from outside can tell them apart: :func:`look` runs in a nanny, or in another
worker of the same host, and :class:`Suspicion` judges by what several looks have shown.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TypedDict

__all__ = ["Process", "Sight", "Suspicion", "look", "own_process"]

BETWEEN_LOOKS = 0.4
"""Seconds for which a process must have been stopped before it counts as stopped."""

BUSY_SHARE = 0.05
"""Share of a core from which on a process is busy; one that waits for its GIL uses 0.007."""

_STATES = {"T": "stopped", "D": "disk", "Z": "gone", "X": "gone"}


class Process(TypedDict):
    """How another process on the host recognizes a process; plain values, for the wire.

    `started` is in the kernel's own units, `namespace` the name of its process id namespace; both
    are empty where the system does not tell.
    """

    pid: int
    started: str
    namespace: str


@dataclass(frozen=True)
class Sight:
    """What a look has shown.

    Attributes
    ----------
    state : str
        ``stopped`` by a signal (not by a debugger), ``disk`` while it waits for one, ``gone``,
        ``unknown``, or else ``alive``.
    cpu : float
        Seconds of processor time that the process has used.
    at : float
        When that was, in seconds, on a clock that all processes of the host share.
    """

    state: str
    cpu: float = 0.0
    at: float = 0.0


def own_process() -> Process:
    """Return how others recognize this process."""
    try:
        return {"pid": os.getpid(), "started": _read("self")[19], "namespace": _namespace()}
    except OSError:  # no /proc
        return {"pid": os.getpid(), "started": "", "namespace": ""}


def look(process: Process) -> Sight:
    """Look at a process of this host; ``unknown`` if it cannot be seen from here."""
    try:
        if not process["started"] or _namespace() != process["namespace"]:
            return Sight("unknown")
        fields = _read(str(process["pid"]))
    except (FileNotFoundError, ProcessLookupError):
        return Sight("gone")
    except OSError:
        return Sight("unknown")
    if fields[19] != process["started"]:
        return Sight("gone")
    ticks = int(fields[11]) + int(fields[12])
    state = _STATES.get(fields[0], "alive")
    return Sight(state, cpu=ticks / os.sysconf("SC_CLK_TCK"), at=time.monotonic())


def _read(pid: str) -> list[str]:
    """Return the fields of a process's ``stat``, from its state on (the third in ``man proc``)."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


@dataclass
class Suspicion:
    """What has been seen of a silent process since it fell silent."""

    _last: Sight | None = field(default=None, init=False)
    _stopped_since: float | None = field(default=None, init=False)

    def judge(self, sight: Sight) -> str:
        """Take in what a look has shown; return ``stopped``, ``busy``, or nothing if unclear.

        Stopped is what was stopped in all looks of some time, and did nothing in between: a
        process that is stopped and resumed in turns, to slow it down, is not. That it runs at the
        moment says nothing: one that sleeps with the GIL has a thread that asks for it all the
        time, and on a machine with much to do that thread is often about to run.
        """
        last = self._last
        if sight.state in ("unknown", "gone") or (last is not None and sight.at < last.at):
            return ""
        self._last = sight
        used, passed = 0.0, 0.0
        if last is not None:
            used, passed = sight.cpu - last.cpu, sight.at - last.at
        if sight.state != "stopped":
            self._stopped_since = None
            return "busy" if sight.state == "disk" or used > BUSY_SHARE * passed else ""
        if self._stopped_since is None or used > 0:
            self._stopped_since = sight.at
        return "stopped" if sight.at >= self._stopped_since + BETWEEN_LOOKS else ""
