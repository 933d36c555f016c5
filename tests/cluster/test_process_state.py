"""Looks at real processes, and what is made of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from nbelastic.cluster.process_state import (
    ProbeHistory,
    ProcessState,
    Verdict,
    own_process_id,
    read_state,
)
from nbelastic.messages import ProcessId
from tests.support.clusters import until

if TYPE_CHECKING:
    from collections.abc import Iterator

STOPPED, BUSY_NOW = Verdict.STOPPED, Verdict.BUSY
AWAKE = [(1.0, 5.0), (1.01, 5.25), (1.1, 5.25)]
ASLEEP = "input()"
BUSY = "sum(range(10**12))"
DESCRIBE = "from nbelastic.cluster.process_state import *; print(own_process_id(), flush=True); "


@contextlib.contextmanager
def a_process(code: str) -> Iterator[ProcessId]:
    """Run Python code in a process of its own, from when it has said who it is."""
    child = subprocess.Popen(
        [sys.executable, "-c", DESCRIBE + code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        try:
            yield eval(child.stdout.readline())
        finally:
            child.kill()


def judged(*states: ProcessState) -> list[Verdict | None]:
    history = ProbeHistory()
    return [history.add(state) for state in states]


def test_a_process_sees_itself() -> None:
    assert read_state(own_process_id()).state in ("alive", "disk")


def test_a_process_that_waits_is_alive_and_not_busy() -> None:
    with a_process(ASLEEP) as process:
        history = ProbeHistory()
        state = until(lambda: read_state(process), "a read_state")
        assert state.state in ("alive", "disk")
        until(lambda: history.add(read_state(process)) is None, "it does nothing")


def test_a_process_that_computes_is_seen_to_use_the_processor() -> None:
    with a_process(BUSY) as process:
        first = read_state(process)
        until(lambda: read_state(process).cpu > first.cpu, "it computes")
        history = ProbeHistory()
        until(lambda: history.add(read_state(process)) is BUSY_NOW, "it is judged busy")


@pytest.mark.parametrize("code", [ASLEEP, BUSY])
def test_a_process_that_was_sent_sigstop_is_stopped_until_it_is_continued(code: str) -> None:
    with a_process(code) as process:
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: read_state(process).state == "stopped", "it is stopped")
        history = ProbeHistory()
        until(lambda: history.add(read_state(process)) is STOPPED, "it is judged stopped")
        os.kill(process.pid, signal.SIGCONT)
        until(lambda: read_state(process).state != "stopped", "it goes on")
        assert history.add(read_state(process)) is not STOPPED


def test_a_dead_process_is_gone_buried_or_not() -> None:
    with a_process(ASLEEP) as process:
        os.kill(process.pid, signal.SIGKILL)
        until(lambda: read_state(process).state == "gone", "it is a zombie")
    assert read_state(process).state == "gone"


def test_another_process_with_the_same_number_is_not_taken_for_it() -> None:
    assert read_state(replace(own_process_id(), started=1.0)).state == "gone"


def test_a_process_of_another_namespace_is_unknown() -> None:
    assert read_state(replace(own_process_id(), namespace="pid:[1]")).state == "unknown"


def test_it_takes_two_looks_some_time_apart_to_call_a_process_stopped() -> None:
    at = [ProcessState("stopped", 1.0, moment) for moment in (5.0, 5.2, 5.5)]
    assert judged(*at) == [None, None, STOPPED]


def test_a_process_that_did_something_between_two_looks_was_not_stopped() -> None:
    stopped, later = ProcessState("stopped", 1.0, 5.0), ProcessState("stopped", 1.1, 5.5)
    assert judged(stopped, later) == [None, None]
    resumed, again = ProcessState("alive", 1.0, 5.2), ProcessState("stopped", 1.0, 5.5)
    assert judged(stopped, resumed, again) == [None, None, None]


def test_who_cannot_see_the_process_takes_nothing_back() -> None:
    stopped, blind, later = (
        ProcessState("stopped", 1.0, 5.0),
        ProcessState("unknown"),
        ProcessState("stopped", 1.0, 5.5),
    )
    assert judged(stopped, blind, later) == [None, None, STOPPED]


def test_an_answer_that_was_overtaken_changes_nothing() -> None:
    late = ProcessState("alive", 1.0, 4.0)
    first, last = (ProcessState("stopped", 1.0, at) for at in (5.0, 5.5))
    assert judged(first, late, last)[-1] is STOPPED


def test_to_wait_for_the_gil_is_not_to_be_busy() -> None:
    before, slow, fast = (
        ProcessState("alive", cpu, at) for cpu, at in ((1.0, 5.0), (1.01, 5.25), (1.1, 5.25))
    )
    assert judged(before, slow) == [None, None]
    assert judged(before, fast) == [None, BUSY_NOW]


def test_a_debugged_process_is_neither_stopped_nor_busy() -> None:
    with a_process(ASLEEP) as process, a_tracer(process.pid):
        state = until(lambda: _traced(process.pid) and read_state(process), "it is traced")
        assert state.state == "alive"


TRACER = """
import ctypes, os, sys
libc, pid = ctypes.CDLL(None, use_errno=True), int(sys.argv[1])
failed = libc.ptrace(16, pid, None, None)
print(os.strerror(ctypes.get_errno()) if failed else "", flush=True)
input()
"""


@contextlib.contextmanager
def a_tracer(pid: int) -> Iterator[None]:
    """Stop a process as a debugger does."""
    command = [sys.executable, "-c", TRACER, str(pid)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as tracer:
        try:
            problem = tracer.stdout.readline().strip()
            if problem:
                pytest.skip(f"this machine allows no debugger: {problem}")
            yield
        finally:
            tracer.kill()


def _traced(pid: int) -> bool:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        return file.read().rpartition(")")[2].split()[0] == "t"
