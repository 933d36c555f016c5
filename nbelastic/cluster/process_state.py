"""Read the state of another process, and judge whether it is stopped.

Runs in a nanny or in another worker of the host (:func:`read_state`), and in the scheduler's event
loop (:class:`ProbeHistory`). A process that holds the GIL sends no heartbeats, either; another
process can tell it from one that is stopped.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Literal

import psutil

from nbelastic.messages import ProcessId

BETWEEN_PROBES_S = 0.4  # seconds for which a process must have been stopped
BUSY_SHARE = 0.05  # of a core, above which a process is busy; waiting for the GIL takes 0.007
SAME_START_S = 1.5  # seconds by which two readings of a process's start may differ

_STATES = {
    psutil.STATUS_STOPPED: "stopped",
    psutil.STATUS_DISK_SLEEP: "disk",
    psutil.STATUS_ZOMBIE: "gone",
    psutil.STATUS_DEAD: "gone",
}


@dataclass(frozen=True)
class ProcessState:
    """State of a process at one moment."""

    # ``stopped`` by a signal (not a debugger), ``disk``: waits for it, ``gone``, ``unknown``, or
    # else ``alive``
    state: str
    cpu: float = 0.0  # seconds of processor time that it has used
    at: float = 0.0  # in seconds, on a clock that all processes of the host share


def process_id(pid: int) -> ProcessId:
    """Return the identity of a process by its number here."""
    return ProcessId(pid, _started(psutil.Process(pid)), _namespace())


def read_state(process: ProcessId) -> ProcessState:
    """Return the state of a process of this host; ``unknown`` if it cannot be read from here."""
    try:
        if _namespace() != process.namespace:
            return ProcessState("unknown")
        found = psutil.Process(process.pid)
        if abs(_started(found) - process.started) > SAME_START_S:
            return ProcessState("gone")
        state, times = _STATES.get(found.status(), "alive"), found.cpu_times()
    except psutil.NoSuchProcess:
        return ProcessState("gone")
    except (psutil.Error, OSError):
        return ProcessState("unknown")
    return ProcessState(state, cpu=times.user + times.system, at=time.monotonic())


def _started(process: psutil.Process) -> float:
    # Older versions of psutil add the boot time that they have read first. The difference does
    # not depend on the wall clock.
    booted = psutil.boot_time()
    return float(process.create_time() - booted)


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


@dataclass
class ProbeHistory:
    """States of a silent process since its last heartbeat."""

    _last: ProcessState | None = field(default=None, init=False)
    _stopped_since: float | None = field(default=None, init=False)

    def add(self, state: ProcessState) -> Literal["stopped", "busy"] | None:
        """Add a state; return a verdict on the process, None if that is unclear."""
        last = self._last or state
        if state.state in ("unknown", "gone") or state.at < last.at:
            return None
        self._last = state
        used, passed = state.cpu - last.cpu, state.at - last.at
        # That it runs at the moment shows nothing: one that sleeps with the GIL has a thread that
        # asks for it all the time, and on a busy machine that thread is often about to run.
        if state.state != "stopped":
            self._stopped_since = None
            busy = state.state == "disk" or used > BUSY_SHARE * passed
            return "busy" if busy else None
        if self._stopped_since is None or used > 0:  # stopped and resumed in turns is slowed down
            self._stopped_since = state.at
        return "stopped" if state.at >= self._stopped_since + BETWEEN_PROBES_S else None
