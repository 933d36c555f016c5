"""Who has died is known from the segment itself, whatever keeps its sockets open."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from nbelastic.native import core
from tests.support.clusters import until

CHILD = """
import mmap, os, sys, time
from nbelastic.native import core
descriptor = int(sys.argv[1])
group = core.Group(descriptor, 1, 2, 30.0)
group.watch([])
words = memoryview(mmap.mmap(descriptor, 1 << 16)).cast("I")
while not {word & 0x3FFFFFFF for word in words} & {*map(int, os.listdir("/proc/self/task"))}:
    time.sleep(0.001)  # its thread does not hold its word yet
print("here", flush=True)
if sys.stdin.readline() == "leave":
    group.close()
    print("left", flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def two_ranks():
    """Yield a group of two, and the process of its other rank; no socket is watched."""
    descriptor = core.create(2)
    try:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(descriptor)],
            pass_fds=[descriptor],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        group = core.Group(descriptor, 0, 2, 30.0)
        group.watch([])
        try:
            assert child.stdout.readline() == "here\n"
            yield group, child
        finally:
            group.close()
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                pipe.close()
    finally:
        os.close(descriptor)


@pytest.mark.slow
def test_a_killed_process_is_known_to_be_dead():
    with two_ranks() as (group, child):
        assert group.dead == []
        child.kill()
        until(lambda: group.failure is not None, "the failure")
        assert group.failure == "the process of rank 1 of this host is gone"
        assert group.dead == [1]


@pytest.mark.slow
def test_a_stopped_process_is_not_dead():
    with two_ranks() as (group, child):
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert group.dead == []
        assert group.failure is None


@pytest.mark.slow
def test_who_has_left_is_not_dead():
    with two_ranks() as (group, child):
        child.stdin.write("leave")
        child.stdin.flush()
        child.stdin.close()
        child.wait(20)
        assert group.dead == []
        assert group.failure is None
