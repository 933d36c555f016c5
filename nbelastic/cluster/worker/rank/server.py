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
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import time
import traceback

from nbelastic.rank_template import LIMITS, receive, send
from nbelastic.system import LINUX

from .children import GROUP_LIMIT_S, NAME, RETURNED, Children, end_with, set_option, signal_group

CLEANING_S = 5.0
"""Seconds after which a server ends although the kernel has not ended what its rank has left."""


def main(worker: int, descriptors: list[int]) -> None:
    """Serve until the rank has ended, or become the rank.

    Descriptors: control socket, the rank's channel and output, and the worker's process, where the
    system has such.
    """
    control, channel, output, *process = descriptors
    with contextlib.suppress(PermissionError):
        os.setsid()  # a scheduler of the kernel that groups by session gives each rank its share
    set_option(NAME, b"server %d" % worker)  # for ``ps -e``, 15 characters
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    with contextlib.suppress(OSError, ValueError):
        _take_over(worker)
    if not _serve(socket.socket(fileno=control), process, channel):
        os._exit(0)
    set_option(NAME, b"rank of %d" % worker)
    from nbelastic.cluster.worker.rank.main import main as run_rank

    try:
        run_rank(channel)
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


def _serve(control: socket.socket, process: list[int], channel: int) -> bool:
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
        return True
    with contextlib.suppress(OSError):
        os.setpgid(rank, rank)  # both do it, so that a signal sent now finds the group
    os.close(channel)
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
