"""Collect all uses of Dask that its documentation does not cover.

Runs in the kernel, the scheduler and the workers, in the event loop of each. Everything here reads
or sets a private attribute of Dask's, or what only its source promises. Where an attribute is
missing, a function does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import dask.config
from distributed import Client, Future, Scheduler, Status, wait

T = TypeVar("T")

# -- streams ---------------------------------------------------------------------------------------
#
# Dask holds a message back for up to 10 ms after the one before, to send several at once. A
# recovery is a row of messages, each the answer to another, and would wait at every one.
#
# The moment is told by the wall clock. If that is set back by a minute, a stream sends nothing for
# a minute, and a worker without heartbeats counts as frozen. So the moment is in the past.

INTERVAL_S = -86400.0

MESSAGES_KEPT = 10  # sent ones, of a stream; Dask keeps a thousand, which may be a gigabyte


def hold_nothing_back(stream: Any) -> None:
    """Make a stream send messages as they come, and keep few of them."""
    if hasattr(stream, "interval"):
        stream.interval = INTERVAL_S
    log = getattr(stream, "recent_message_log", None)
    if isinstance(log, deque) and (log.maxlen is None or log.maxlen > MESSAGES_KEPT):
        stream.recent_message_log = deque(log, MESSAGES_KEPT)


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
    """Return the seconds since the last acknowledgment; 0 while no data waits for it.

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


# -- signals ---------------------------------------------------------------------------------------
#
# JupyterLab's Interrupt, like Ctrl-C in a terminal, sends SIGINT to the kernel's whole process
# group. The workers of a ``LocalCluster`` in the kernel belong to that group: each would close
# (dask/distributed#1925), whichever cell was to be interrupted. Nannies live in the kernel itself,
# or in a ``dask worker`` process with a signal handler of its own; they still stop their workers,
# by messages. So a worker under a nanny has no use for SIGINT, nor for SIGHUP of a terminal that
# goes.
#
# A nanny that gets SIGTERM closes its worker in good order. A ``dask worker`` without one only ends
# its event loop, and its ranks with it. So there, ranks leave before Dask's handler is called.

HANDLERS_OF_DASK = "distributed._signals"  # of a ``dask worker`` without a nanny


def after_shielding(probe: Callable[[], T]) -> Callable[[], T]:
    """Return a function that has a nanny's worker ignore SIGINT and SIGHUP, and calls ``probe()``.

    In any other process nothing is changed: one that was not started by ``multiprocessing`` handles
    signals itself. It travels to a process without nbelastic: a worker has its agent only when it
    has imported it, which can take seconds. ``client.run`` runs it in the worker's main thread.
    """

    def run() -> T:
        import multiprocessing
        import signal
        import threading

        in_main_thread = threading.current_thread() is threading.main_thread()
        if multiprocessing.parent_process() is not None and in_main_thread:
            for number in (signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
        return probe()

    return run


def leave_on_termination(leave: Callable[[Callable[[], None]], None]) -> Callable[[], None]:
    """Make SIGTERM call ``leave(go_on)`` in a ``dask worker`` without a nanny; return the undoing.

    It is called in the signal handler, and calls ``go_on()`` when ranks have left, in the main
    thread: what Dask does on SIGTERM. A second signal does that at once.
    """
    before: Any = signal.getsignal(signal.SIGTERM)

    def handle(signum: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, before)
        leave(lambda: before(signum, frame))

    def undo() -> None:
        if signal.getsignal(signal.SIGTERM) is handle:  # else another came
            signal.signal(signal.SIGTERM, before)

    in_main_thread = threading.current_thread() is threading.main_thread()  # no other thread can
    if in_main_thread and getattr(before, "__module__", "") == HANDLERS_OF_DASK:
        signal.signal(signal.SIGTERM, handle)
    return undo


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
