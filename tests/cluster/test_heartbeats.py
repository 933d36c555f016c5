"""What the scheduler makes of silence, in virtual time, and of looks at a process.

Real processes are in ``tests/jobs/test_faults.py``.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from nbelastic.cluster.process_state import ProbeHistory, ProcessState, read_state
from nbelastic.cluster.scheduler.heartbeats import HeartbeatMonitor
from nbelastic.cluster.scheduler.records import WorkerRecord
from nbelastic.messages import Beat, Beats, LossReason, Slot, SlotSilent
from tests.support.records import a_record
from tests.support.virtual_time import run  # noqa: F401 - conftest runs the tests by it


def now() -> float:
    return asyncio.get_running_loop().time()


class Scheduler:
    """A scheduler with workers, and the monitor of one job."""

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(stream_comms={}, client_comms={}, broadcast=self.broadcast)
        self.workers: dict[str, WorkerRecord] = {}
        self.told: list[tuple[float, Any]] = []
        self.asked = 0
        self.states: dict[int, Callable[[], ProcessState]] = {}
        self.delay = 0.0
        self.jobs = {"job": a_record()}
        self.jobs["job"].take_in = self.tell
        self.monitor = HeartbeatMonitor(self.scheduler, self.jobs, self.workers)

    def add(self, name: str, *, nanny: bool) -> None:
        number = len(self.workers)
        slot, holder = Slot(name, name, name, "A"), ("job", number)
        self.workers[name] = WorkerRecord(slot, {}, number, "nanny" * nanny, holder=holder)
        self.states[number] = lambda: ProcessState("alive", 0.0, now())

    def tell(self, event: Any) -> None:
        self.told.append((now(), event))

    async def broadcast(
        self, *, msg: dict[str, Any], workers: list[str], nanny: bool, on_error: str
    ) -> dict[str, Any]:
        assert nanny
        (address,) = workers
        self.asked += 1
        (pid,) = pickle.loads(msg["args"])
        sight = self.states[pid]()
        await asyncio.sleep(self.delay)
        return {address: {"status": "OK", "result": sight}}

    async def beat(self, name: str, seconds: float, *, waiting: bool = False) -> None:
        """Send heartbeats every half second."""
        doing = "an operation" if waiting else ""
        beat = ("job", Beat(self.workers[name].holder[1], 1, 7, waiting, 3, 4, doing))
        for _ in range(int(seconds / 0.5)):
            self.monitor.take(self.workers[name], (beat,))
            await asyncio.sleep(0.5)

    async def all_beat(self, seconds: float, *but: str) -> None:
        self.monitor.start()
        await asyncio.gather(
            *(self.beat(name, seconds) for name in self.workers if name not in but)
        )

    def blamed(self) -> list[tuple[float, str, LossReason]]:
        return [(t, e.slot, e.reason) for t, e in self.told if isinstance(e, SlotSilent)]

    def stop(self, name: str) -> None:
        """Have others see from now on that a process is stopped."""
        self.states[self.workers[name].pid] = lambda: ProcessState("stopped", 1.0, now())

    def keep_busy(self, name: str) -> None:
        """Have others see from now on that a process uses the processor."""
        self.states[self.workers[name].pid] = lambda: ProcessState("alive", now() / 2, now())


@pytest.fixture
def scene() -> Scheduler:
    return Scheduler()


@pytest.mark.parametrize(
    ("offset", "beats"), [*((each, 3.0) for each in (0.0, 0.1, 0.2, 0.3, 0.4)), (0.0, 0.0)]
)
async def test_a_stopped_process_is_blamed_within_two_seconds(scene, offset, beats):
    """Also before its first heartbeat."""
    scene.add("a", nanny=True)
    scene.monitor.start()
    await asyncio.sleep(offset)
    await scene.beat("a", beats)
    scene.stop("a")  # at once after a heartbeat it would be half a second more
    await asyncio.sleep(5.0)
    ((when, slot, reason),) = scene.blamed()
    assert (slot, reason) == ("a", LossReason.PROCESS_STOPPED)
    assert beats + offset < when <= max(beats - 0.5, 0.0) + offset + 2.0


async def test_a_verdict_that_comes_after_a_heartbeat_does_not_count(scene: Scheduler) -> None:
    scene.add("a", nanny=True)
    scene.delay = 0.45
    await scene.all_beat(2.0)
    scene.stop("a")
    await asyncio.sleep(1.35)
    assert scene.asked == 2, "an answer is on its way"
    await scene.beat("a", 5.0)
    assert scene.blamed() == []


@pytest.mark.parametrize("nanny", [False, True])
async def test_where_nobody_sees_more_a_worker_is_blamed_after_heartbeat_timeout(scene, nanny):
    """Nobody can see its process, or it sleeps."""
    scene.add("a", nanny=nanny)
    await scene.all_beat(2.0)
    await asyncio.sleep(30.0)
    ((when, _, reason),) = scene.blamed()
    assert reason == LossReason.WORKER_SILENT
    assert 11.5 <= when < 12.5


async def test_a_busy_silent_rank_is_heard_of_but_nobody_says_that_it_waits(scene):
    """It is left in peace, and blamed once it stops."""
    scene.add("a", nanny=True)
    scene.monitor.start()
    await scene.beat("a", 2.0, waiting=True)
    scene.keep_busy("a")
    scene.told.clear()
    await asyncio.sleep(60.0)
    received = [event.beats for _, event in scene.told if isinstance(event, Beats)]
    assert len(received) > 24
    assert all(beats == (Beat(0, 1, 7, False, 3, 4, ""),) for beats in received[1:])
    assert scene.blamed() == []
    scene.stop("a")
    await asyncio.sleep(5.0)
    assert [reason for _, _, reason in scene.blamed()] == [LossReason.PROCESS_STOPPED]


async def test_a_pause_of_the_scheduler_is_nobody_elses_silence(scene: Scheduler) -> None:
    scene.add("a", nanny=True)
    await scene.all_beat(2.0)
    asyncio.get_running_loop().now += 60.0
    await asyncio.sleep(0.01)  # what is due is done before what has come in is read
    await scene.beat("a", 2.0)
    assert scene.blamed() == []


# -- looks at a process ---------------------------------------------------------------------------


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
    assert found == [{"S": "stopped", "B": "busy"}.get(each) for each in verdicts]


def test_a_debugged_process_is_neither_stopped_nor_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "status", lambda self: psutil.STATUS_TRACING_STOP)
    assert read_state(os.getpid()).state == "alive"
