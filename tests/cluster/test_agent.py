"""Agents of workers, and the ranks that they watch: early orders, silence, closing, output."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.core import Status

from nbelastic.cluster.process_state import ProcessState
from nbelastic.cluster.worker import agent as agents
from nbelastic.cluster.worker import hosted_rank
from nbelastic.cluster.worker.agent import Agent
from nbelastic.cluster.worker.hosted_rank import CROWDED, FULL, INTERVAL, PATIENCE, OutputBuffer
from nbelastic.cluster.worker.notice_watcher import NoticeWatcher
from nbelastic.cluster.worker.rank_process import ProcessExit
from nbelastic.elastic.ranks.runtime import RankSpec
from nbelastic.messages import (
    Beat,
    EndRank,
    ForgetOrder,
    Heartbeats,
    InjectFaults,
    Place,
    RankDied,
    RankEvent,
    RankOrder,
    Text,
)
from tests.support.virtual_time import run  # noqa: F401 - conftest runs the tests by it


@pytest.mark.parametrize("status", [Status.closing, Status.running])
def test_a_worker_that_closes_ends_its_ranks(status):
    heeded, undone, closed = [], [], []
    agent = Agent()
    agent._ranks = {}
    agent._beats = SimpleNamespace(stop=lambda: None)
    agent._notices = NoticeWatcher(SimpleNamespace(), lambda report: None)
    agent._undo_interrupts = lambda: heeded.append(True)
    agent._undo_termination = lambda: undone.append(True)
    agent._launcher = SimpleNamespace(close=lambda: asyncio.sleep(0, closed.append(True)))
    asyncio.run(agent.teardown(SimpleNamespace(status=status)))
    assert undone == closed == [True]
    assert bool(heeded) == (status is Status.running)  # it goes on without the agent


class Hosted:
    """A rank that ends at once, and keeps what it was ordered."""

    def __init__(self, setup, *_):
        self.orders = made[setup.spec.job, setup.spec.start] = []

    def obey(self, order):
        self.orders.append(order.effect)

    async def wait(self):
        pass


made = {}


@pytest.fixture
def agent(monkeypatch):
    monkeypatch.setattr(agents, "HostedRank", Hosted)
    made.clear()
    agent = Agent()
    agent._ranks, agent._early, agent._payloads = {}, {}, {"job": b""}
    agent._beats = SimpleNamespace(start=lambda: None, stop=lambda: None)
    agent._worker = SimpleNamespace(loop=SimpleNamespace(add_callback=print))
    agent._send = lambda *_: None
    agent._send_beats = lambda: None
    agent._setup_of = lambda spec, payload: SimpleNamespace(spec=spec, scratch="/nowhere")
    agent.bind, agent._launcher = (lambda address: ""), None
    return agent


def run_rank(agent):
    asyncio.run(agent.run(RankSpec(job="job", start=3, place=Place(0, 1, 0, 1, 0, 1)), ""))


def test_a_rank_gets_the_orders_that_came_before_it(agent):
    early = [InjectFaults((), (7,)), InjectFaults((), (8,))]
    for effect in early:
        for start in (3, 4):
            agent._obey(RankOrder("job", start, effect))
    run_rank(agent)
    assert made == {("job", 3): early}
    agent._take(ForgetOrder("job"))
    assert agent._early == {}


def test_an_order_to_end_holds_for_the_job_that_gave_it(agent):
    end = RankOrder("job", 3, EndRank(3, "leave", Text("it is over")))
    agent._obey(end)
    run_rank(agent)
    assert made == {}
    agent._obey(end)  # late: its process has ended
    agent._take(ForgetOrder("job"))
    agent._payloads["job"] = b""  # of the next job of this name
    run_rank(agent)
    assert list(made) == [("job", 3)]


# -- a rank whose process a test makes up ----------------------------------------------------------


class Process:
    waits, pause_output = False, print

    def __init__(self, state: str) -> None:
        self.kind, self.at, self.signals = state, 0.0, list[tuple[int, str]]()

    def state(self) -> ProcessState:
        self.at += 5.0
        return ProcessState(self.kind, 0.0, self.at)

    def send_signal(self, number: int, reason: str) -> None:
        self.signals.append((number, reason))

    async def wait(self) -> ProcessExit:
        return ProcessExit()


def hosted(process: Any, seconds: float, send: Any = print) -> hosted_rank.HostedRank:
    place = Place(0, 1, 0, 1, 0, 1)
    spec = RankSpec(job="job", start=0, place=place, heartbeat_timeout_s=seconds)
    setup, launcher = SimpleNamespace(spec=spec), SimpleNamespace(launch=lambda *_: process)
    return hosted_rank.HostedRank(setup, launcher, None, send)


async def test_a_death_is_reported_with_the_commit_of_the_last_heartbeat() -> None:
    sent: list[Any] = []
    rank = hosted(Process("gone"), 2, sent.append)
    rank._take(Heartbeats((("job", Beat(0, 1, 0, False, 7)),)))
    await rank.wait()
    assert sent == [RankEvent("job", RankDied(0, "its process has ended", 7))]


@pytest.mark.parametrize(
    ("state", "heard", "words"),
    [
        ("stopped", True, "was stopped"),
        ("stopped", False, "was stopped"),
        ("alive", True, "does nothing"),
        ("alive", False, ""),
    ],
)
async def test_a_process_that_is_stopped_is_ended_also_before_its_first_heartbeat(
    monkeypatch: pytest.MonkeyPatch, state: str, heard: bool, words: str
) -> None:
    monkeypatch.setattr(hosted_rank, "SILENCE_S", -1.0)
    process: Any = Process(state)
    rank = hosted(process, -1)
    if heard:
        rank._take(Heartbeats((("job", Beat(0, 0, 0, False, 0)),)))
    rank.beat()
    rank.beat()
    assert words in "".join(reason for _, reason in process.signals)
    assert bool(process.signals) == bool(words)


async def test_a_busy_process_is_said_to_wait_until_it_is_silent_and_never_again() -> None:
    """Each change counts as progress: one that held the GIL was not evicted while it waited."""
    rank = hosted(Process("disk"), 2)
    rank._take(Heartbeats((("job", Beat(0, 0, 0, True, 0)),)))
    waits = []
    for _ in range(20):
        waits.append(rank.beat().waiting)
        await asyncio.sleep(0.5)
    assert waits == [True] * 3 + [False] * 17


async def test_a_rank_is_not_blamed_for_time_in_which_its_worker_did_not_run() -> None:
    process: Any = Process("alive")
    rank = hosted(process, 2)
    rank._take(Heartbeats((("job", Beat(0, 0, 0, False, 0)),)))
    rank.beat()
    await asyncio.sleep(30)  # the machine is suspended, or has much to do
    rank.beat()
    assert process.signals == []
    for _ in range(4):
        await asyncio.sleep(0.5)
        rank.beat()
    assert "does nothing" in process.signals[0][1]


# -- output: many lines in few messages, and a rank that waits, in virtual time --------------------


class Scene:
    """A buffer, what it has sent, and whether it lets the rank's pipe be read."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.waiting, self.paused = 0, False
        self.buffer = OutputBuffer(self.sent.append, lambda: self.waiting, self._pause)

    def _pause(self, paused: bool) -> None:
        self.paused = paused


async def test_many_lines_take_one_message_and_the_last_words_are_sent_at_once() -> None:
    scene = Scene()
    lines = [f"{number}\n" for number in range(1_000)]
    for line in lines:
        scene.buffer.write(line.encode())
    await asyncio.sleep(INTERVAL / 2)
    assert not scene.sent
    await asyncio.sleep(INTERVAL)
    assert scene.sent == ["".join(lines)]
    scene.buffer.write(b"end")
    scene.buffer.flush()
    scene.buffer.flush()
    assert scene.sent[1:] == ["end"]
    await asyncio.sleep(10.0)
    assert len(scene.sent) == 2


async def test_a_letter_may_come_in_two_parts_and_what_is_no_text_is_replaced() -> None:
    """A long text is sent in parts."""
    scene = Scene()
    for part in (b"a\xc3", b"\xbc\xff\n"):
        scene.buffer.write(part)
        scene.buffer.flush()
    assert "".join(scene.sent) == "a\u00fc\N{REPLACEMENT CHARACTER}\n"
    scene.sent.clear()
    scene.buffer.write(b"ab" * (FULL + 10))
    assert [len(part) for part in scene.sent] == [FULL, FULL, 20]
    assert "".join(scene.sent) == "ab" * (FULL + 10)
    assert not scene.paused


async def test_a_rank_that_is_faster_than_the_connection_waits_for_a_moment_each_time() -> None:
    scene = Scene()
    scene.waiting = CROWDED + 1
    for _ in range(3):
        scene.buffer.write(b"x" * FULL)
        assert scene.paused
        await asyncio.sleep(PATIENCE / 2)
        assert scene.paused
        await asyncio.sleep(PATIENCE)
        assert not scene.paused
    scene.buffer.write(b"x")
    assert scene.paused and not scene.sent
    scene.waiting = 0
    await asyncio.sleep(2 * hosted_rank.PAUSE)
    assert not scene.paused
    assert sum(map(len, scene.sent)) == 3 * FULL + 1


def print_lines(count: int) -> None:
    for number in range(count):
        print(number)


def test_a_rank_that_prints_without_end_is_not_lost(crew) -> None:
    job = crew.fit(print_lines, args=[100_000], np=2, heartbeat_timeout=2)
    assert job.logs(1).splitlines() == [str(number) for number in range(100_000)]
    assert not [event for event in job.history if event.kind == "lost"]
