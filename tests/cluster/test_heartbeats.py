"""What the scheduler makes of silence, in virtual time."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from nbelastic.cluster.process_state import ProcessState
from nbelastic.cluster.scheduler.heartbeats import HeartbeatMonitor
from nbelastic.cluster.scheduler.records import WorkerRecord
from nbelastic.messages import Beat, Beats, LossReason, ProcessId, RankBeat, Slot, SlotSilent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that does not wait for time to pass."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        wait = self._selector.select

        def select(timeout: float | None) -> Any:
            assert timeout is not None, "nothing will ever happen again"
            self.now += timeout
            return wait(0)

        self._selector.select = select

    def time(self) -> float:
        return self.now


class Scheduler:
    """A scheduler with workers, all on one host, and the monitor of one job."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.scheduler = SimpleNamespace(
            workers={}, stream_comms={}, client_comms={}, broadcast=self.broadcast
        )
        self.hosts: dict[str, WorkerRecord] = {}
        self.told: list[tuple[float, Any]] = []
        self.asked: list[str] = []
        self.states: dict[int, Callable[[], ProcessState]] = {}
        self.deaf: set[str] = set()
        self.delay = 0.0
        job = SimpleNamespace(
            terms=SimpleNamespace(heartbeat_timeout=10.0),
            beats={},
            telemetry={},
            silent=set(),
            client=None,
        )
        self.monitor = HeartbeatMonitor(
            self.scheduler, {"job": job}, self.hosts, self.tell, self.tell
        )

    def add(self, name: str, *, nanny: bool, host: str = "A", namespace: str = "pid:[1]") -> None:
        number = len(self.hosts)
        slot = Slot(name, name, name, host)
        process = ProcessId(number, 1.0, namespace)
        self.hosts[name] = WorkerRecord(
            slot, {}, process, "nanny" if nanny else None, holder=("job", number)
        )
        self.scheduler.workers[name] = SimpleNamespace()
        self.states[number] = lambda: ProcessState("alive", 0.0, self.loop.now)

    def tell(self, job: str, event: Any) -> None:
        self.told.append((self.loop.now, event))

    async def broadcast(
        self, *, msg: dict[str, Any], workers: list[str], nanny: bool, on_error: str
    ) -> dict[str, Any]:
        (address,) = workers
        who = f"nanny of {address}" if nanny else address
        self.asked.append(who)
        if who in self.deaf:
            await asyncio.Event().wait()
        (process,) = pickle.loads(msg["args"])
        sight = self.states[process.pid]()
        await asyncio.sleep(self.delay)
        return {address: {"status": "OK", "result": sight}}

    async def beat(self, name: str, seconds: float, *, waiting: bool = False) -> None:
        """Send heartbeats every half second."""
        doing = "an operation" if waiting else ""
        beat = RankBeat("job", Beat(self.hosts[name].holder[1], 1, 7, waiting, 3, 4, doing))
        for _ in range(int(seconds / 0.5)):
            self.monitor.take(name, (beat,))
            await asyncio.sleep(0.5)

    async def all_beat(self, seconds: float, *but: str) -> None:
        self.monitor.start()
        await asyncio.gather(*(self.beat(name, seconds) for name in self.hosts if name not in but))

    def blamed(self) -> list[tuple[float, str, LossReason]]:
        return [(t, e.slot, e.reason) for t, e in self.told if isinstance(e, SlotSilent)]

    def stop(self, name: str) -> None:
        """Have others see from now on that a process is stopped."""
        self.states[self.hosts[name].process.pid] = lambda: ProcessState(
            "stopped", 1.0, self.loop.now
        )

    def keep_busy(self, name: str) -> None:
        """Have others see from now on that a process uses the processor."""
        self.states[self.hosts[name].process.pid] = lambda: ProcessState(
            "alive", self.loop.now / 2, self.loop.now
        )


@pytest.fixture
def scene() -> Iterator[Scheduler]:
    loop = VirtualLoop()
    yield Scheduler(loop)
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def play(scene: Scheduler, story: Callable[[], Any]) -> None:
    async def whole() -> None:
        try:
            await story()
        finally:
            scene.monitor.stop()
            await asyncio.sleep(0)

    scene.loop.run_until_complete(whole())


@pytest.mark.parametrize("offset", [0.0, 0.1, 0.2, 0.3, 0.4])
def test_a_stopped_process_is_blamed_within_two_seconds(scene: Scheduler, offset: float) -> None:
    scene.add("a", nanny=True)

    async def story() -> None:
        scene.monitor.start()
        await asyncio.sleep(offset)
        await scene.beat("a", 3.0)
        scene.stop("a")  # at once after a heartbeat it would be half a second more
        await asyncio.sleep(5.0)

    play(scene, story)
    ((when, slot, reason),) = scene.blamed()
    assert (slot, reason) == ("a", LossReason.PROCESS_STOPPED)
    assert 103.0 + offset < when <= 102.5 + offset + 2.0


def test_a_worker_that_sends_heartbeats_is_not_looked_at(scene: Scheduler) -> None:
    scene.add("a", nanny=True)
    play(scene, lambda: scene.all_beat(30.0))
    assert scene.asked == []


def test_a_process_stopped_for_half_a_second_is_left_in_peace(scene: Scheduler) -> None:
    scene.add("a", nanny=True)

    async def story() -> None:
        await scene.all_beat(2.0)
        scene.stop("a")
        await asyncio.sleep(0.5)
        await scene.beat("a", 5.0)

    play(scene, story)
    assert scene.blamed() == []


def test_a_verdict_that_comes_after_a_heartbeat_does_not_count(scene: Scheduler) -> None:
    scene.add("a", nanny=True)
    scene.delay = 0.45

    async def story() -> None:
        await scene.all_beat(2.0)
        scene.stop("a")
        await asyncio.sleep(1.35)
        assert len(scene.asked) == 2, "an answer is on its way"
        await scene.beat("a", 5.0)

    play(scene, story)
    assert scene.blamed() == []


def test_without_a_nanny_a_neighbour_looks(scene: Scheduler) -> None:
    scene.add("a", nanny=False)
    scene.add("elsewhere", nanny=False, host="B")
    scene.add("caged", nanny=False, namespace="pid:[2]")
    scene.add("b", nanny=False)

    async def story() -> None:
        await scene.all_beat(2.0)
        scene.stop("a")
        await scene.all_beat(5.0, "a")

    play(scene, story)
    assert [(slot, reason) for _, slot, reason in scene.blamed()] == [
        ("a", LossReason.PROCESS_STOPPED)
    ]
    assert set(scene.asked) == {"b"}


def test_who_does_not_answer_is_not_asked_again_and_another_is(scene: Scheduler) -> None:
    for name in ("a", "b", "c"):
        scene.add(name, nanny=False)
    scene.deaf = {"b"}

    async def story() -> None:
        await scene.all_beat(2.0)
        scene.stop("a")
        await scene.all_beat(5.0, "a")

    play(scene, story)
    assert [slot for _, slot, _ in scene.blamed()] == ["a"]
    assert scene.asked.count("b") == 1


def test_where_nobody_can_see_it_a_worker_is_blamed_after_heartbeat_timeout(
    scene: Scheduler,
) -> None:
    scene.add("a", nanny=False)

    async def story() -> None:
        await scene.all_beat(2.0)
        await asyncio.sleep(30.0)

    play(scene, story)
    ((when, _, reason),) = scene.blamed()
    assert reason == LossReason.WORKER_SILENT
    assert 111.5 <= when < 112.5


def test_a_sleeping_silent_process_is_blamed_after_heartbeat_timeout(scene: Scheduler) -> None:
    scene.add("a", nanny=True)

    async def story() -> None:
        await scene.all_beat(2.0)
        await asyncio.sleep(30.0)

    play(scene, story)
    ((when, _, reason),) = scene.blamed()
    assert reason == LossReason.WORKER_SILENT
    assert when > 111


def test_a_busy_silent_process_is_left_in_peace_and_blamed_once_it_stops(scene: Scheduler) -> None:
    scene.add("a", nanny=True)

    async def story() -> None:
        await scene.all_beat(2.0)
        scene.keep_busy("a")
        await asyncio.sleep(60.0)
        assert scene.blamed() == []
        scene.stop("a")
        await asyncio.sleep(5.0)

    play(scene, story)
    assert [reason for _, _, reason in scene.blamed()] == [LossReason.PROCESS_STOPPED]


def test_a_busy_silent_rank_is_heard_of_but_nobody_says_that_it_waits(scene: Scheduler) -> None:
    scene.add("a", nanny=True)

    async def story() -> None:
        scene.monitor.start()
        await scene.beat("a", 2.0, waiting=True)
        scene.keep_busy("a")
        scene.told.clear()
        await asyncio.sleep(10.0)

    play(scene, story)
    received = [event.beats for _, event in scene.told if isinstance(event, Beats)]
    assert len(received) > 4
    assert all(beats == (Beat(0, 1, 7, False, 3, 4, ""),) for beats in received[1:])


def test_a_process_stopped_before_its_first_heartbeat_is_blamed_too(scene: Scheduler) -> None:
    scene.add("a", nanny=True)
    scene.stop("a")

    async def story() -> None:
        scene.monitor.start()
        await asyncio.sleep(5.0)

    play(scene, story)
    assert [reason for _, _, reason in scene.blamed()] == [LossReason.PROCESS_STOPPED]


def test_a_rank_whose_task_waits_for_a_thread_is_left_in_peace(scene: Scheduler) -> None:
    scene.add("a", nanny=True)

    async def story() -> None:
        scene.monitor.start()
        await asyncio.sleep(60.0)

    play(scene, story)
    assert scene.blamed() == []


def test_a_pause_of_the_scheduler_is_nobody_elses_silence(scene: Scheduler) -> None:
    scene.add("a", nanny=True)

    async def story() -> None:
        await scene.all_beat(2.0)
        scene.loop.now += 60.0
        await asyncio.sleep(0.01)  # what is due is done before what has come in is read
        await scene.beat("a", 2.0)

    play(scene, story)
    assert scene.blamed() == []
