"""Ranks that are killed and stopped: who has died is known from the segment itself."""

import json
import os
import signal
import subprocess
import sys

import pytest

from nbelastic.native import core
from tests.support.clusters import until
from tests.support.processes import Process


def leave(here):
    here.group.close()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["killed", "stopped", "left"])
def test_only_a_killed_process_is_known_to_be_dead(end):
    descriptor = core.create(2)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"

    def join(here):
        its = os.open(path, os.O_RDWR)
        here.group = core.Group(its, 1, 2, 30.0)
        os.close(its)

    child = Process()
    group = core.Group(descriptor, 0, 2, 30.0)
    try:
        child.ask(join).result(20)
        os.close(descriptor)
        assert group.dead == []
        if end == "killed":
            child.send_signal(signal.SIGKILL)
            until(lambda: group.failure is not None, "the failure")
            assert group.failure == "the process of rank 1 of this host is gone"
            assert group.dead == [1]
            return
        if end == "stopped":
            child.send_signal(signal.SIGSTOP)
            with open(f"/proc/{child.pid}/stat", encoding="utf-8") as file:
                until(lambda: file.seek(0) == 0 and ") T " in file.read(), "the stop")
        else:
            child.ask(leave).result(20)
            assert child.leave() == 0
        assert group.dead == []
        assert group.failure is None
    finally:
        group.close()
        child.kill()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("faults", [24, pytest.param(2000, marks=pytest.mark.nightly)])
def test_ranks_that_are_killed_or_stopped_hang_or_corrupt_no_other(faults):
    """All others hear of it, no sum is wrong, no two ranks are apart by more than a step."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.native.campaign", str(faults), "100"],
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    print(told)
    assert sum(told["faults"].values()) == faults
    assert told["steps"] >= faults
