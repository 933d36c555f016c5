"""The rank server: the parent of one rank's process.

A fork of the host's template (:mod:`nbelastic.rank_template`), which a worker has asked for. It
takes over what the worker's process may do, forks the rank, tells the worker of its end, and ends
what it has started. It ends with the worker, and the rank with it.

============  ====================================================================================
the server    then
============  ====================================================================================
begins        forked. A worker that has gone, or asks elsewhere meanwhile, has closed the control
              socket: no rank is forked
has a rank    ended by itself, by a signal of the worker's, or with the worker, whose process and
              control socket both tell (a fork of the worker may hold the socket)
waits         the function has returned, and the rank exited: its children go on, until they end,
              or the worker's limit is over
cleans up     the rank is reaped, and the worker told. What it has started gets SIGTERM, then
              SIGKILL, until none is left, and the server ends
is killed     the kernel kills the rank. What that has started falls to the template, which ends it
============  ====================================================================================

Where forking is not safe, the rank begins as a new interpreter (``spawn``), which takes seconds.

A server, as the template, is a subreaper: what one of its forks has started and not ended becomes
its own child, whatever process group or session that is in. So an unknown child is what a fork that
has ended has left. (A daemon's parent has ended, too; but each rank has a server of its own, which
looks for what is left when its rank has ended, and the template's forks are servers.)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Collection, Iterator

import psutil

from nbelastic.rank_template import LIMITS, receive, send
from nbelastic.system import LINUX

GROUP_LIMIT_S = 1.0  # seconds that what a rank has started may take to end after it
TRACKER_LIMIT_S = 30.0  # seconds for multiprocessing's resource tracker, on a busy machine

RETURNED = 77
"""Exit status of a rank whose function has returned. Its server waits for its children."""

exit_status = 0  # with which this process is to exit

# Options of prctl(2).
DEATH_SIGNAL, NAME, _SUBREAPER = 1, 15, 36

CLEANING_S = 5.0
"""Seconds after which a server ends although the kernel has not ended what its rank has left."""


def main(worker: int, descriptors: list[int], method: str) -> None:
    """Serve until the rank has ended, or become the rank.

    Descriptors: control socket, the rank's channel, output and crash file, and the worker's
    process, where the system has such.
    """
    control, channel, output, crash, *process = descriptors
    with contextlib.suppress(PermissionError):
        os.setsid()  # a scheduler of the kernel that groups by session gives each rank its share
    set_option(NAME, b"server %d" % worker)  # for ``ps -e``, 15 characters
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    with contextlib.suppress(OSError, ValueError):
        _take_over(worker)
    if not _serve(socket.socket(fileno=control), [*process], (channel, crash), method):
        os._exit(0)
    set_option(NAME, b"rank of %d" % worker)
    from nbelastic.cluster.worker.rank.main import main as run_rank

    try:
        run_rank(channel, crash)
    except Exception:
        traceback.print_exc()
        os._exit(1)


def _take_over(worker: int) -> None:
    """Give this process what the worker has; its hard limits, rights and groups are the same."""
    if not LINUX:
        return  # it is the worker's own template
    for limit in LIMITS:
        resource.setrlimit(limit, resource.prlimit(worker, limit))
    os.sched_setaffinity(0, os.sched_getaffinity(worker))
    with open(f"/proc/{worker}/status") as file:
        os.umask(int(next(line for line in file if line.startswith("Umask:")).split()[1], 8))
    with (
        open(f"/proc/{worker}/oom_score_adj") as theirs,
        open("/proc/self/oom_score_adj", "w") as own,
    ):
        own.write(theirs.read())


def _serve(
    control: socket.socket, process: list[int], for_rank: tuple[int, int], method: str
) -> bool:
    """Fork the rank, and end it and its descendants; return True in the rank's process."""
    children = Children()
    watched = [control.fileno(), *process]
    if set(children.wait(watched, 0.0)) & set(watched):
        return False
    server = os.getpid()
    try:
        rank = os.fork()
    except OSError as error:
        send(control, op="refused", why=str(error))
        return False
    if not rank:
        end_with(server)
        os.setpgid(0, 0)
        children.close()
        control.close()
        for each in process:
            os.close(each)
        if method == "spawn":
            _begin_anew(*for_rank)
        return True
    with contextlib.suppress(OSError):
        os.setpgid(rank, rank)  # both do it, so that a signal sent now finds the group
    for each in for_rank:
        os.close(each)
    send(control, op="forked", pid=rank, server=server)
    status: int | None = None
    while status is None or (status == RETURNED << 8 and watched and _has_group(rank)):
        ready = children.wait(watched, None if status is None else 0.05)
        status = dict(children.reap()).get(rank, status)
        if not (set(ready) <= {control.fileno()} and _obey(control, ready, rank)):
            if status is None:
                os.kill(rank, signal.SIGKILL)  # its group ends when it is reaped
            watched = []
    send(control, op="ended", status=0 if status == RETURNED << 8 else status)
    if not LINUX:  # orphans are init's
        signal_group(rank, signal.SIGTERM)
        time.sleep(GROUP_LIMIT_S)
        signal_group(rank, signal.SIGKILL)
    limit = time.monotonic() + CLEANING_S
    while children.end_left(()) and time.monotonic() < limit:
        children.wait((), 0.05)
        list(children.reap())
    return False


def _obey(control: socket.socket, ready: list[int], rank: int) -> bool:
    """Send a signal on the worker's request; return False if the rank is to be killed."""
    if not ready:
        return True
    numbers = [message["signal"] for message in receive(control)]
    for number in filter(signal.SIGKILL.__ne__, numbers):
        signal_group(rank, number)
    return bool(numbers) and signal.SIGKILL not in numbers


def _has_group(rank: int) -> bool:
    """Whether processes of a rank's function are left in its group."""
    with contextlib.suppress(OSError):
        os.killpg(rank, 0)
        return LINUX
    return False


def _begin_anew(channel: int, crash: int) -> None:
    for each in (channel, crash):
        os.set_inheritable(each, True)
    code = "import atexit, sys; from nbelastic.cluster.worker.rank.server import skip_teardown; "
    code += "atexit.register(skip_teardown); from nbelastic.cluster.worker.rank.main import main; "
    code += "main(*map(int, sys.argv[1:]))"
    numbers = map(str, (channel, crash))
    os.execv(sys.executable, [sys.executable, "-c", code, *numbers])


# -- children of a single-threaded process ---------------------------------------------------------


class Children:
    """The children of this process; SIGCHLD wakes it."""

    def __init__(self) -> None:
        self._wakeup, self._wakes = socket.socketpair()
        for each in (self._wakeup, self._wakes):
            each.setblocking(False)
        self._told: dict[int, float] = {}  # what is left, and until when it may end by itself
        # A signal is written to the descriptor only if it has a handler.
        signal.signal(signal.SIGCHLD, _ignore)
        # Batch systems and consoles send these to all processes, also where ranks are to go on.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, _ignore)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        set_option(_SUBREAPER, 1)

    def close(self) -> None:
        """Undo that in a fork, whose own signals and children these are not."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for each in (self._wakeup, self._wakes):
            each.close()
        set_option(_SUBREAPER, 0)

    def wait(self, descriptors: Collection[int], timeout: float | None) -> list[int]:
        """Wait for a child's end, descriptors that are ready or a time; return the descriptors."""
        poll = select.poll()
        for each in (*descriptors, self._wakeup.fileno()):
            poll.register(each, select.POLLIN)
        ready = [each for each, _ in poll.poll(None if timeout is None else 1000 * timeout)]
        with contextlib.suppress(BlockingIOError):
            self._wakeup.recv(1 << 12)
        return [each for each in ready if each in descriptors]

    def reap(self) -> Iterator[tuple[int, int]]:
        """Yield the process and status of each child that has ended."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                yield found

    def end_left(self, known: Collection[int]) -> bool:
        """End forks' leftover processes by SIGTERM, then SIGKILL; return whether any is left.

        To be called again until none is. What ends leaves its own children here. The resource
        tracker of multiprocessing ends by itself, when it has removed what a rank has left in
        shared memory.
        """
        now, told = time.monotonic(), self._told
        self._told = {}
        with contextlib.suppress(psutil.Error, OSError):
            for child in psutil.Process().children():
                if child.pid not in known:
                    for each in (child, *child.children(recursive=True)):
                        end = self._told[each.pid] = told.get(each.pid) or now + _limit_s(each)
                        if each.pid not in told or now >= end:
                            with contextlib.suppress(psutil.Error):
                                each.send_signal(signal.SIGKILL if now >= end else signal.SIGTERM)
        return bool(self._told)


def _limit_s(process: psutil.Process) -> float:
    """Return how long a process may take to end by itself."""
    with contextlib.suppress(psutil.Error):
        if any("multiprocessing.resource_tracker" in word for word in process.cmdline()):
            return TRACKER_LIMIT_S
    return GROUP_LIMIT_S


def end_with(parent: int) -> None:
    """Have the system kill this process when its parent ends in any way."""
    set_option(DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os._exit(1)


def signal_group(pid: int, number: int) -> None:
    """Send a signal to a process and all in its group, as far as they are there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def set_option(option: int, value: int | bytes) -> None:
    """Set an option by prctl(2), which is Linux's."""
    if LINUX:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def skip_teardown() -> None:
    """Exit without the teardown of all modules, which takes a quarter of a second."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # of any class
            stream.flush()
    os._exit(exit_status)


def _ignore(*_: object) -> None:
    """Do nothing."""
