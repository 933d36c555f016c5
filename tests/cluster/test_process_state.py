"""Looks at real processes, and what is made of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
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

STOPPED, BUSY_NOW = Verdict.STOPPED, Verdict.BUSY
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


@pytest.mark.parametrize(("code", "verdict"), [(ASLEEP, None), (BUSY, BUSY_NOW)])
def test_a_process_waits_or_computes_is_stopped_goes_on_and_dies(
    code: str, verdict: Verdict | None
) -> None:
    with a_process(code) as process:
        history = ProbeHistory()
        history.add(read_state(process))
        until(lambda: history.add(read_state(process)) is verdict, "it waits, or computes")
        assert read_state(process).state in ("alive", "disk")
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: history.add(read_state(process)) is STOPPED, "it is stopped")
        os.kill(process.pid, signal.SIGCONT)
        until(lambda: read_state(process).state != "stopped", "it goes on")
        assert history.add(read_state(process)) is not STOPPED
        os.kill(process.pid, signal.SIGKILL)
        until(lambda: read_state(process).state == "gone", "it is a zombie")
    assert read_state(process).state == "gone"


@pytest.mark.parametrize(
    ("other", "state"), [({"started": 1.0}, "gone"), ({"namespace": "pid:[1]"}, "unknown")]
)
def test_a_process_of_this_number_elsewhere_is_another(other: dict[str, Any], state: str) -> None:
    assert read_state(replace(own_process_id(), **other)).state == state


@pytest.mark.parametrize(
    ("states", "verdicts"),
    [
        # Two looks some time apart, between which it did nothing.
        ([("stopped", 1.0, 5.0), ("stopped", 1.0, 5.2), ("stopped", 1.0, 5.5)], "  S"),
        ([("stopped", 1.0, 5.0), ("stopped", 1.1, 5.5)], "  "),
        ([("stopped", 1.0, 5.0), ("alive", 1.0, 5.2), ("stopped", 1.0, 5.5)], "   "),
        # Who cannot see the process, or an answer that was overtaken, takes nothing back.
        ([("stopped", 1.0, 5.0), ("unknown",), ("alive", 1.0, 4.0), ("stopped", 1.0, 5.5)], "   S"),
        # To wait for the GIL is not to be busy.
        ([("alive", 1.0, 5.0), ("alive", 1.01, 5.25)], "  "),
    ],
)
def test_several_looks_are_judged(states: list[tuple[Any, ...]], verdicts: str) -> None:
    history = ProbeHistory()
    found = [history.add(ProcessState(*each)) for each in states]
    assert found == [{"S": STOPPED, "B": BUSY_NOW}.get(each) for each in verdicts]


def test_a_debugged_process_is_neither_stopped_nor_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "status", lambda self: psutil.STATUS_TRACING_STOP)
    assert read_state(own_process_id()).state == "alive"
