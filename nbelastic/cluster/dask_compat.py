"""Collect all uses of Dask that its documentation does not cover.

Runs in the kernel, the scheduler and the workers, in the event loop of each. Everything here reads
or sets a private attribute of Dask's, or what only its source promises. Where an attribute is
missing, a function does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import dask.config
from distributed import Client, Future, Scheduler, Status, metrics, wait

# -- streams ---------------------------------------------------------------------------------------
#
# Dask holds a message back for up to 10 ms after the one before, to send several at once. A
# recovery is a row of messages, each the answer to another, and would wait at every one.
#
# The interval is measured by the wall clock. If that is set back by a minute, a stream sends
# nothing for a minute, and a worker without heartbeats counts as frozen. So every regular sender
# calls `resume` first.

INTERVAL_S = 0.001

MESSAGES_KEPT = 10  # sent ones, of a stream; Dask keeps a thousand, which may be a gigabyte
CLOCK_SLACK_S = 0.1  # seconds by which a clock that is adjusted goes back without any harm


def shorten_batching(stream: Any) -> None:
    """Make a stream hold messages back for a millisecond at most, and keep few of them."""
    interval = getattr(stream, "interval", None)
    if isinstance(interval, float | int) and interval > INTERVAL_S:
        stream.interval = INTERVAL_S
    log = getattr(stream, "recent_message_log", None)
    if isinstance(log, deque) and (log.maxlen is None or log.maxlen > MESSAGES_KEPT):
        stream.recent_message_log = deque(log, MESSAGES_KEPT)


def is_stalled(stream: Any) -> bool:
    """Return whether a stream waits longer than its interval, because the clock was set back."""
    deadline = getattr(stream, "next_deadline", None)
    if not isinstance(deadline, float):
        return False
    return bool(deadline > metrics.time() + stream.interval + CLOCK_SLACK_S)


def resume(stream: Any) -> None:
    """Make a stalled stream send its buffer. To be called in its event loop."""
    if is_stalled(stream):
        stream.next_deadline = metrics.time()
        stream.waker.set()


def unsent_bytes(stream: Any) -> int:
    """Return how many bytes wait here for the other end to read; 0 for other kinds than TCP."""
    # Dask writes without waiting, so that they are in the connection's buffer, not the stream's.
    connection = getattr(getattr(stream, "comm", None), "stream", None)
    buffer = getattr(connection, "_write_buffer", None)
    return 0 if buffer is None else len(buffer)


# -- connections -----------------------------------------------------------------------------------

LIMIT_S = 10.0  # seconds of unacknowledged data after which a worker counts as cut off

# Linux's struct tcp_info: eight bytes, then numbers of four.
_INFO = struct.Struct("=8x13I")
_UNACKED, _LAST_ACK_MS = 4, 12


def unacknowledged_s(comm: Any) -> float:
    """Return the seconds since the last acknowledgment, if data waits for one and TCP shows it.

    A worker receives nothing from a busy scheduler, either. Acknowledgments tell that from a dead
    link: the kernel of the scheduler's machine sends them, whatever its processes do.
    """
    connection = getattr(getattr(comm, "stream", None), "socket", None)
    if not isinstance(connection, socket.socket) or not hasattr(socket, "TCP_INFO"):
        return 0.0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    except OSError:
        return 0.0  # closed meanwhile; Dask notices by itself
    numbers = _INFO.unpack(info)
    return numbers[_LAST_ACK_MS] / 1000 if numbers[_UNACKED] else 0.0


# -- event loops -----------------------------------------------------------------------------------


class PeriodicCall:
    """Calls a function at regular intervals, in the event loop of ``start``.

    Unlike tornado's, it takes time from that loop alone, not from the wall clock. A late call
    shifts the next ones; none is made up for.
    """

    def __init__(self, seconds: float, function: Callable[[], None]) -> None:
        self._seconds = seconds
        self._function = function
        self._next: asyncio.TimerHandle | None = None

    @property
    def running(self) -> bool:
        """Whether there is a next call."""
        return self._next is not None

    def start(self) -> None:
        """Make the first call after one interval. Does nothing if started already."""
        if self._next is None:
            self._next = asyncio.get_running_loop().call_later(self._seconds, self._call)

    def stop(self) -> None:
        """Make no more calls. To be called in the same loop."""
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _call(self) -> None:
        self._next = None
        self.start()
        self._function()


async def until(condition: Callable[[], bool], seconds: float, interval: float) -> None:
    """Wait for a condition, for some seconds at most."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition() and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(interval)


# -- the scheduler's process -----------------------------------------------------------------------


def runs_here(client: Client) -> bool:
    """Return whether the scheduler of a client runs in this process."""
    here = [each for each in getattr(Scheduler, "_instances", ()) if each.status == Status.running]
    return client.scheduler is not None and client.scheduler.address in [s.address for s in here]


# -- memory ----------------------------------------------------------------------------------------


def memory_limit(worker: Any) -> float | None:
    """Return above how many bytes a nanny ends its worker; None if none does."""
    if worker.nanny is None:
        return None
    limit = getattr(getattr(worker, "memory_manager", None), "memory_limit", None)
    fraction = dask.config.get("distributed.worker.memory.terminate", default=None)
    return None if not limit or not fraction else float(limit) * float(fraction)


# -- keys ------------------------------------------------------------------------------------------
#
# Dask keeps a value for as long as a client wants it. The partitions that a job reads are wanted by
# a client that exists by name only, as Dask's own variables and published data sets do it. So they
# stay when the kernel goes, and a value that is lost with its worker is computed again.


def key_of(text: str) -> Any:
    """Return a key of Dask's from its text in JSON, which has no tuples."""
    key = json.loads(text)
    return tuple(key) if isinstance(key, list) else key


FORGOTTEN_CHECK_S = 5.0  # seconds between two questions whether a key is still known


def value_of(client: Client, key: Any) -> Any:
    """Return the value of a key, held or recomputed by any worker; LookupError if forgotten."""
    # A future waits for messages on its key; of a key that the scheduler does not know none comes.
    future: Future[Any] = Future(key, client)
    wish = {"op": "client-desires-keys", "keys": [key], "client": client.id}
    client._send_to_scheduler(wish)
    scheduler: Any = client.scheduler
    while not future.done():
        states = client.sync(scheduler.get_task_status, keys=[key])
        if states[key] is None:
            raise LookupError(
                "the scheduler has forgotten its key, as after client.restart(), so that no "
                "worker can compute it; start the job again"
            )
        with contextlib.suppress(asyncio.TimeoutError):
            wait(future, timeout=FORGOTTEN_CHECK_S)
    return future.result()


def hold_keys(scheduler: Scheduler, holder: str, texts: Iterable[str]) -> None:
    """Make the scheduler keep values, by the texts of their keys."""
    known = [key for key in map(key_of, texts) if key in scheduler.tasks]
    scheduler.client_desires_keys(keys=known, client=holder)


def release_keys(scheduler: Scheduler, holder: str) -> None:
    """Release all values that are kept for `holder`."""
    client = scheduler.clients.get(holder)
    if client is not None:
        keys = [task.key for task in client.wants_what]
        scheduler.client_releases_keys(keys=keys, client=holder)
        scheduler.clients.pop(holder, None)


# -- nannies ---------------------------------------------------------------------------------------

LOG_INTERVAL_S = 0.05  # seconds between two reads: a nanny knows a little later
LOG_READS = 20  # reads of the log, at most
LOG_MESSAGES = 50  # messages of the log that are searched

_MEMORY = re.compile(r"\(pid=(\d+)\) exceeded (\d+ ?%) memory budget")
_DEATH = re.compile(r"Worker process (\d+) (?:was killed by signal (\d+)|exited with status (\d+))")


async def cause_of_death(scheduler: Scheduler, nanny: str, pid: int) -> str:
    """Return in words what a worker's process has died of, from its nanny's log; else nothing."""
    for _ in range(LOG_READS):
        await asyncio.sleep(LOG_INTERVAL_S)
        lines = [line for _, line in await scheduler.rpc(nanny).get_logs(n=LOG_MESSAGES)]
        by_memory, died = (
            [each for each in map(pattern.search, lines) if each and int(each[1]) == pid]
            for pattern in (_MEMORY, _DEATH)
        )
        if died and by_memory:
            budget = by_memory[0][2]
            return f"was ended by its nanny, because it exceeded {budget} of its memory limit"
        if died and died[0][2] is None:
            return f"exited with status {died[0][3]}"
        if died:
            number, name = int(died[0][2]), ""
            with contextlib.suppress(ValueError):  # a real-time signal
                name = f" ({signal.Signals(number).name})"
            return f"was killed by signal {number}{name}"
    return ""
