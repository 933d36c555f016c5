"""Read the state of another process, and judge whether it is stopped.

Runs in a nanny and in a worker (:func:`read_state`), and in the scheduler's event loop
(:class:`ProbeHistory`). A process that holds the GIL sends no heartbeats, either; another process
can tell it from one that is stopped.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

import psutil

BETWEEN_PROBES_S = 0.4  # seconds for which a process must have been stopped
BUSY_SHARE = 0.05  # of a core, above which a process is busy; waiting for the GIL takes 0.007

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


def read_state(pid: int) -> ProcessState:
    """Return the state of a process of this host."""
    try:
        found = psutil.Process(pid)
        state, times = _STATES.get(found.status(), "alive"), found.cpu_times()
    except psutil.NoSuchProcess:
        return ProcessState("gone")
    except (psutil.Error, OSError):
        return ProcessState("unknown")
    return ProcessState(state, cpu=times.user + times.system, at=time.monotonic())


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
