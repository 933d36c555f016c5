"""Fork, reap and end the children of a single-threaded process.

The process is a subreaper: what one of its forks has started and not ended becomes its own child,
whatever process group or session that is in. So an unknown child is what a fork that has ended has
left. (A daemon's parent has ended, too; but each rank has a server of its own, which looks for what
is left when its rank has ended, and the template's forks are servers.)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterator

import psutil

from nbelastic.system import LINUX

GROUP_LIMIT_S = 1.0  # seconds that what a rank has started may take to end after it
TRACKER_LIMIT_S = 30.0  # seconds for multiprocessing's resource tracker, on a busy machine

RETURNED = 77
"""Exit status of a rank whose function has returned. Its server waits for its children."""

exit_status = 0  # with which this process is to exit

# Options of prctl(2).
DEATH_SIGNAL, NAME, _SUBREAPER = 1, 15, 36


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
