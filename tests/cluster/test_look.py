"""Looks at real processes, and what is made of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from nbelastic.cluster.look import Process, Sight, Suspicion, look, own_process
from tests.support.clusters import until

if TYPE_CHECKING:
    from collections.abc import Iterator

ASLEEP = "input()"
BUSY = "sum(range(10**12))"
DESCRIBE = "from nbelastic.cluster.look import own_process; print(own_process(), flush=True); "


@contextlib.contextmanager
def a_process(code: str) -> Iterator[Process]:
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


def judged(*sights: Sight) -> list[str]:
    suspicion = Suspicion()
    return [suspicion.judge(sight) for sight in sights]


def test_a_process_sees_itself() -> None:
    assert look(own_process()).state in ("alive", "disk")


def test_a_process_that_waits_is_alive_and_not_busy() -> None:
    with a_process(ASLEEP) as process:
        suspicion = Suspicion()
        sight = until(lambda: look(process), "a look")
        assert sight.state in ("alive", "disk")
        until(lambda: suspicion.judge(look(process)) == "", "it does nothing")


def test_a_process_that_computes_is_seen_to_use_the_processor() -> None:
    with a_process(BUSY) as process:
        first = look(process)
        until(lambda: look(process).cpu > first.cpu, "it computes")
        suspicion = Suspicion()
        until(lambda: suspicion.judge(look(process)) == "busy", "it is judged busy")


@pytest.mark.parametrize("code", [ASLEEP, BUSY])
def test_a_process_that_was_sent_sigstop_is_stopped_until_it_is_continued(code: str) -> None:
    with a_process(code) as process:
        os.kill(process["pid"], signal.SIGSTOP)
        until(lambda: look(process).state == "stopped", "it is stopped")
        suspicion = Suspicion()
        until(lambda: suspicion.judge(look(process)) == "stopped", "it is judged stopped")
        os.kill(process["pid"], signal.SIGCONT)
        until(lambda: look(process).state != "stopped", "it goes on")
        assert suspicion.judge(look(process)) != "stopped"


def test_a_dead_process_is_gone_buried_or_not() -> None:
    with a_process(ASLEEP) as process:
        os.kill(process["pid"], signal.SIGKILL)
        until(lambda: look(process).state == "gone", "it is a zombie")
    assert look(process).state == "gone"


def test_another_process_with_the_same_number_is_not_taken_for_it() -> None:
    assert look({**own_process(), "started": "1"}).state == "gone"


@pytest.mark.parametrize("field", ["started", "namespace"])
def test_a_process_that_cannot_be_told_from_others_is_unknown(field: str) -> None:
    assert look({**own_process(), field: ""}).state == "unknown"  # type: ignore[misc]


def test_a_process_of_another_namespace_is_unknown() -> None:
    assert look({**own_process(), "namespace": "pid:[1]"}).state == "unknown"


def test_it_takes_two_looks_some_time_apart_to_call_a_process_stopped() -> None:
    at = [Sight("stopped", 1.0, moment) for moment in (5.0, 5.2, 5.5)]
    assert judged(*at) == ["", "", "stopped"]


def test_a_process_that_did_something_between_two_looks_was_not_stopped() -> None:
    stopped, later = Sight("stopped", 1.0, 5.0), Sight("stopped", 1.1, 5.5)
    assert judged(stopped, later) == ["", ""]
    assert judged(stopped, Sight("alive", 1.0, 5.2), Sight("stopped", 1.0, 5.5)) == ["", "", ""]


def test_who_cannot_see_the_process_takes_nothing_back() -> None:
    stopped, blind, later = Sight("stopped", 1.0, 5.0), Sight("unknown"), Sight("stopped", 1.0, 5.5)
    assert judged(stopped, blind, later) == ["", "", "stopped"]


def test_an_answer_that_was_overtaken_changes_nothing() -> None:
    late = Sight("alive", 1.0, 4.0)
    assert judged(Sight("stopped", 1.0, 5.0), late, Sight("stopped", 1.0, 5.5))[-1] == "stopped"


def test_to_wait_for_the_gil_is_not_to_be_busy() -> None:
    assert judged(Sight("alive", 1.0, 5.0), Sight("alive", 1.01, 5.25)) == ["", ""]
    assert judged(Sight("alive", 1.0, 5.0), Sight("alive", 1.1, 5.25)) == ["", "busy"]


def test_a_debugged_process_is_neither_stopped_nor_busy() -> None:
    with a_process(ASLEEP) as process, a_tracer(process["pid"]):
        sight = until(lambda: _traced(process["pid"]) and look(process), "it is traced")
        assert sight.state == "alive"


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
