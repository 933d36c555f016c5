"""Fork the processes of a worker's ranks.

The main program of a rank server. It has imported what every rank needs, has one thread, so that
forking is safe, and never initialises CUDA, so that its forks can. The worker starts it and speaks
to it (:mod:`nbelastic.cluster.worker.rank_process`).

Where forking is not safe, each rank begins as a new interpreter (``spawn``), which takes seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any

MESSAGE_BYTES = 4096
"""Longest message on the control socket."""

PRELOAD = ("nbelastic.torch", "nbelastic.cluster.worker.rank.main", "torch._dynamo")
"""What every rank needs, imported once. The first optimizer of a process imports Dynamo."""

# Options of prctl(2).
_DEATH_SIGNAL, _SUBREAPER = 1, 36

# The kernel sends it to the server when its worker ends. Batch systems send others to all
# processes of a job, also where a worker is to leave in good order.
_ORPHANED = getattr(signal, "SIGRTMIN", signal.SIGTERM) + 1


GROUP_LIMIT_S = 1.0
"""Seconds that what a rank has started may take to end after it."""


class _Forked(Exception):
    """Leaves the server's loop in a rank's process."""


def main() -> None:
    """Serve until the worker ends, or become a rank."""
    atexit.register(_skip_teardown)  # first, so that it is called last
    descriptor, parent, method = sys.argv[1:]
    control = socket.socket(fileno=int(descriptor))
    with contextlib.suppress(PermissionError):
        os.setsid()  # a console's signals reach neither the server nor its ranks
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, _ignore)
    _set(_SUBREAPER, 1)  # orphans of a rank are reaped here, and leave no zombies
    server = _Server(control)
    end_with(int(parent), _ORPHANED)
    if method == "fork":
        for name in PRELOAD:
            with contextlib.suppress(Exception):  # a rank that needs it raises the error again
                importlib.import_module(name)
        gc.collect()
        gc.freeze()  # a search for garbage would copy the pages of all that ranks share
    if method == "fork" and _threads() > 1:
        method = "spawn"
    try:
        server.serve(method)
    except _Forked as rank:
        channel, partitions, crash = rank.args
    else:
        return
    from nbelastic.cluster.worker.rank.main import main as run_rank

    try:
        run_rank(channel, partitions, crash)
    except Exception:
        traceback.print_exc()
        os._exit(1)


class _Server:
    """The one thread of a rank server.

    Messages from the worker: ``fork`` (with the descriptors of a rank's channel, partitions,
    output and crash file) and ``signal``. Messages to it: ``ready``, ``forked``, ``refused`` and
    ``ended``. All name a rank by the worker's number of it.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._ranks: dict[int, int] = {}  # by process id
        self._left: list[tuple[float, int]] = []  # groups of ranks that have ended, and until when
        self._orphaned = False
        self._wakeup, self._wakes = socket.socketpair()
        for each in (self._wakeup, self._wakes):
            each.setblocking(False)
        # A signal is written to the descriptor only if it has a handler.
        signal.signal(signal.SIGCHLD, _ignore)
        signal.signal(_ORPHANED, self._note_orphaned)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)

    def _note_orphaned(self, *_: object) -> None:
        self._orphaned = True

    def serve(self, method: str) -> None:
        """Fork, signal and reap ranks; end them all when the worker has ended."""
        self._send(op="ready", pid=os.getpid(), method=method)
        poll = select.poll()
        for each in (self._control, self._wakeup):
            poll.register(each, select.POLLIN)
        while not self._orphaned:
            ready = {descriptor for descriptor, _ in poll.poll(self._end_groups())}
            if self._wakeup.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wakeup.recv(1 << 12)
                self._reap()
            if self._control.fileno() in ready and not self._obey(method):
                break
        for pid in self._ranks:
            os.kill(pid, signal.SIGKILL)
            self._end_group(pid)
        with contextlib.suppress(ChildProcessError):  # all have ended
            while self._end_groups() is not None:
                if not os.wait4(-1, os.WNOHANG)[0]:
                    time.sleep(0.01)

    def _end_group(self, pid: int) -> None:
        """End the processes that a rank has started: by SIGTERM, after a moment by SIGKILL.

        The resource tracker of multiprocessing ends by itself, when it has removed what the rank
        has left in shared memory.
        """
        signal_group(pid, signal.SIGTERM)
        self._left.append((time.monotonic() + GROUP_LIMIT_S, pid))

    def _end_groups(self) -> float | None:
        """Kill the groups whose time is over; return the milliseconds until the next."""
        now = time.monotonic()
        while self._left and self._left[0][0] <= now:
            signal_group(self._left.pop(0)[1], signal.SIGKILL)
        return 1000 * (self._left[0][0] - now) if self._left else None

    def _obey(self, method: str) -> bool:
        """Do what the worker asks for; return False if it has closed the socket."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 4)
        except ConnectionError:
            return False
        if not data:
            return False
        message: dict[str, Any] = json.loads(data)
        if message["op"] == "fork":
            self._fork(message["rank"], descriptors, method)
            for each in descriptors:
                os.close(each)
        elif message["op"] == "signal":
            for pid, rank in self._ranks.items():
                if rank == message["rank"]:  # else it is reaped, and its number may be another's
                    if message["signal"] == signal.SIGKILL:
                        os.kill(pid, signal.SIGKILL)  # its group ends when it is reaped
                    else:
                        signal_group(pid, message["signal"])
        return True

    def _fork(self, rank: int, descriptors: list[int], method: str) -> None:
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._send(op="refused", rank=rank, why=str(error))
            return
        if pid:
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)  # both do it, so that a signal sent now finds the group
            self._ranks[pid] = rank
            self._send(op="forked", rank=rank, pid=pid)
            return
        end_with(server, signal.SIGKILL)
        os.setpgid(0, 0)
        self._let_go()
        channel, partitions, output, crash = descriptors
        for standard in (1, 2):
            os.dup2(output, standard)
        os.close(output)
        if method == "spawn":
            for each in (channel, partitions, crash):
                os.set_inheritable(each, True)
            code = "import sys; from nbelastic.cluster.worker.rank.main import main; "
            code += "main(*map(int, sys.argv[1:]))"
            numbers = map(str, (channel, partitions, crash))
            os.execv(sys.executable, [sys.executable, "-c", code, *numbers])
        raise _Forked(channel, partitions, crash)

    def _let_go(self) -> None:
        """Close the server's descriptors and undo its signal handlers in a rank."""
        signal.set_wakeup_fd(-1)
        ours = (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, _ORPHANED)
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for each in (self._control, self._wakeup, self._wakes):
            each.close()
        _set(_SUBREAPER, 0)

    def _reap(self) -> None:
        """Report ranks that have ended; end what each has left in its process group."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            rank = self._ranks.pop(pid, None)
            if rank is not None:
                self._end_group(pid)
                self._send(op="ended", rank=rank, status=status, peak_kib=usage.ru_maxrss)

    def _send(self, **message: Any) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except OSError:
            pass  # the worker has ended: the next read says so


def end_with(parent: int, number: int) -> None:
    """Make the system send this process a signal when its parent ends in any way."""
    _set(_DEATH_SIGNAL, number)
    if os.getppid() != parent:  # it has ended before
        os._exit(1)


def signal_group(pid: int, number: int) -> None:
    """Send a signal to a process and all in its group, as far as they are there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _set(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def _skip_teardown() -> None:
    """End without taking down all modules one by one, which takes a quarter of a second."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # of any class
            stream.flush()
    os._exit(0)


def _ignore(*_: object) -> None:
    """Do nothing."""
