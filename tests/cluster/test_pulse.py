"""What the scheduler makes of silence, in virtual time."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from nbelastic.cluster.look import Sight
from nbelastic.cluster.pulse import Pulse
from nbelastic.cluster.records import Host

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


class Stage:
    """A scheduler with workers, all on one host, and the pulse of one job."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.scheduler = SimpleNamespace(workers={}, broadcast=self.broadcast)
        self.hosts: dict[str, Host] = {}
        self.told: list[tuple[float, dict[str, Any]]] = []
        self.asked: list[str] = []
        self.sights: dict[int, Callable[[], Sight]] = {}
        self.deaf: set[str] = set()
        self.delay = 0.0
        job = SimpleNamespace(heartbeat_timeout=10.0, beats={}, vitals={}, silent=set())
        self.pulse = Pulse(self.scheduler, {"job": job}, self.hosts, self.tell)

    def add(self, name: str, *, nanny: bool, host: str = "A", namespace: str = "pid:[1]") -> None:
        number = len(self.hosts)
        slot = {"id": name, "worker": name, "name": name, "host": host}
        process = {"pid": number, "started": "1", "namespace": namespace}
        self.hosts[name] = Host(slot, {}, process, holder=("job", number))
        self.scheduler.workers[name] = SimpleNamespace(nanny="nanny" if nanny else None)
        self.sights[number] = lambda: Sight("alive", 0.0, self.loop.now)

    def tell(self, job: str, do: str, event: dict[str, Any], attachment: None) -> None:
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
        sight = self.sights[process["pid"]]()
        await asyncio.sleep(self.delay)
        return {address: {"status": "OK", "result": sight}}

    async def beat(self, name: str, seconds: float, *, waiting: bool = False) -> None:
        """Send heartbeats every half second."""
        beat = [self.hosts[name].holder[1], 7, waiting, 3]
        for _ in range(int(seconds / 0.5)):
            self.pulse.take(name, [("job", beat)])
            await asyncio.sleep(0.5)

    async def all_beat(self, seconds: float, *but: str) -> None:
        self.pulse.start()
        await asyncio.gather(*(self.beat(name, seconds) for name in self.hosts if name not in but))

    def blamed(self) -> list[tuple[float, str, str]]:
        return [(t, e["slot"], e["detail"]) for t, e in self.told if e["kind"] == "SlotSilent"]

    def stop(self, name: str) -> None:
        """Have others see from now on that a process is stopped."""
        self.sights[int(self.hosts[name].process["pid"])] = lambda: Sight(
            "stopped", 1.0, self.loop.now
        )

    def keep_busy(self, name: str) -> None:
        """Have others see from now on that a process uses the processor."""
        self.sights[int(self.hosts[name].process["pid"])] = lambda: Sight(
            "alive", self.loop.now / 2, self.loop.now
        )


@pytest.fixture
def stage() -> Iterator[Stage]:
    loop = VirtualLoop()
    yield Stage(loop)
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def play(stage: Stage, story: Callable[[], Any]) -> None:
    async def whole() -> None:
        try:
            await story()
        finally:
            stage.pulse.stop()
            await asyncio.sleep(0)

    stage.loop.run_until_complete(whole())


@pytest.mark.parametrize("offset", [0.0, 0.1, 0.2, 0.3, 0.4])
def test_a_stopped_process_is_blamed_within_two_seconds(stage: Stage, offset: float) -> None:
    stage.add("a", nanny=True)

    async def story() -> None:
        stage.pulse.start()
        await asyncio.sleep(offset)
        await stage.beat("a", 3.0)
        stage.stop("a")  # at once after a heartbeat it would be half a second more
        await asyncio.sleep(5.0)

    play(stage, story)
    ((when, slot, detail),) = stage.blamed()
    assert (slot, detail) == ("a", "its process is stopped")
    assert 103.0 + offset < when <= 102.5 + offset + 2.0


def test_a_worker_that_sends_heartbeats_is_not_looked_at(stage: Stage) -> None:
    stage.add("a", nanny=True)
    play(stage, lambda: stage.all_beat(30.0))
    assert stage.asked == []


def test_a_process_stopped_for_half_a_second_is_left_in_peace(stage: Stage) -> None:
    stage.add("a", nanny=True)

    async def story() -> None:
        await stage.all_beat(2.0)
        stage.stop("a")
        await asyncio.sleep(0.5)
        await stage.beat("a", 5.0)

    play(stage, story)
    assert stage.blamed() == []


def test_a_verdict_that_comes_after_a_heartbeat_does_not_count(stage: Stage) -> None:
    stage.add("a", nanny=True)
    stage.delay = 0.45

    async def story() -> None:
        await stage.all_beat(2.0)
        stage.stop("a")
        await asyncio.sleep(1.35)
        assert len(stage.asked) == 2, "an answer is on its way"
        await stage.beat("a", 5.0)

    play(stage, story)
    assert stage.blamed() == []


def test_without_a_nanny_a_neighbour_looks(stage: Stage) -> None:
    stage.add("a", nanny=False)
    stage.add("elsewhere", nanny=False, host="B")
    stage.add("caged", nanny=False, namespace="pid:[2]")
    stage.add("b", nanny=False)

    async def story() -> None:
        await stage.all_beat(2.0)
        stage.stop("a")
        await stage.all_beat(5.0, "a")

    play(stage, story)
    assert [(slot, detail) for _, slot, detail in stage.blamed()] == [
        ("a", "its process is stopped")
    ]
    assert set(stage.asked) == {"b"}


def test_who_does_not_answer_is_not_asked_again_and_another_is(stage: Stage) -> None:
    for name in ("a", "b", "c"):
        stage.add(name, nanny=False)
    stage.deaf = {"b"}

    async def story() -> None:
        await stage.all_beat(2.0)
        stage.stop("a")
        await stage.all_beat(5.0, "a")

    play(stage, story)
    assert [slot for _, slot, _ in stage.blamed()] == ["a"]
    assert stage.asked.count("b") == 1


def test_where_nobody_can_see_it_a_worker_is_blamed_after_heartbeat_timeout(stage: Stage) -> None:
    stage.add("a", nanny=False)

    async def story() -> None:
        await stage.all_beat(2.0)
        await asyncio.sleep(30.0)

    play(stage, story)
    ((when, _, detail),) = stage.blamed()
    assert detail == "its worker has sent no heartbeat for 10 s"
    assert 111.5 <= when < 112.5


def test_a_sleeping_silent_process_is_blamed_after_heartbeat_timeout(stage: Stage) -> None:
    stage.add("a", nanny=True)

    async def story() -> None:
        await stage.all_beat(2.0)
        await asyncio.sleep(30.0)

    play(stage, story)
    ((when, _, detail),) = stage.blamed()
    assert "no heartbeat" in detail
    assert when > 111


def test_a_busy_silent_process_is_left_in_peace_and_blamed_once_it_stops(stage: Stage) -> None:
    stage.add("a", nanny=True)

    async def story() -> None:
        await stage.all_beat(2.0)
        stage.keep_busy("a")
        await asyncio.sleep(60.0)
        assert stage.blamed() == []
        stage.stop("a")
        await asyncio.sleep(5.0)

    play(stage, story)
    assert [detail for _, _, detail in stage.blamed()] == ["its process is stopped"]


def test_a_busy_silent_rank_is_heard_of_but_nobody_says_that_it_waits(stage: Stage) -> None:
    stage.add("a", nanny=True)

    async def story() -> None:
        stage.pulse.start()
        await stage.beat("a", 2.0, waiting=True)
        stage.keep_busy("a")
        stage.told.clear()
        await asyncio.sleep(10.0)

    play(stage, story)
    heard = [event["beats"] for _, event in stage.told if event["kind"] == "Beats"]
    vouched = {"start": 0, "progress": 7, "waiting": False, "version": 3}
    assert len(heard) > 4
    assert all(beats == [vouched] for beats in heard[1:])


def test_a_process_stopped_before_its_first_heartbeat_is_blamed_too(stage: Stage) -> None:
    stage.add("a", nanny=True)
    stage.stop("a")

    async def story() -> None:
        stage.pulse.start()
        await asyncio.sleep(5.0)

    play(stage, story)
    assert [detail for _, _, detail in stage.blamed()] == ["its process is stopped"]


def test_a_rank_whose_task_waits_for_a_thread_is_left_in_peace(stage: Stage) -> None:
    stage.add("a", nanny=True)

    async def story() -> None:
        stage.pulse.start()
        await asyncio.sleep(60.0)

    play(stage, story)
    assert stage.blamed() == []


def test_a_pause_of_the_scheduler_is_nobody_elses_silence(stage: Stage) -> None:
    stage.add("a", nanny=True)

    async def story() -> None:
        await stage.all_beat(2.0)
        stage.loop.now += 60.0
        await asyncio.sleep(0.01)  # what is due is done before what has come in is read
        await stage.beat("a", 2.0)

    play(stage, story)
    assert stage.blamed() == []
