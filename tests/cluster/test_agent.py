"""Agents of workers, and the ranks that they watch: early orders, silence, closing, output."""

from __future__ import annotations

import asyncio
import contextlib
import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

import pytest

from nbelastic import chaos
from nbelastic import messages as m
from nbelastic.cluster.process_state import ProcessState
from nbelastic.cluster.worker import agent as agents
from nbelastic.cluster.worker import hosted_rank, rank_process
from nbelastic.cluster.worker.agent import Agent
from nbelastic.elastic.ranks.runtime import RankSpec
from tests.support.virtual_time import run  # noqa: F401 - conftest runs the tests by it

SPEC = RankSpec(job="job", start=3, place=m.Place(0, 1, 0, 1, 0, 1), heartbeat_timeout_s=2)


@pytest.fixture
def hosts(monkeypatch):
    """What makes an agent's ranks, which end at once."""
    made = Mock(return_value=Mock(wait=AsyncMock()))
    monkeypatch.setattr(agents, "HostedRank", made)
    return made


@pytest.fixture
def agent(hosts):
    agent = Agent()
    agent._ranks, agent._early, agent._payloads = {}, {}, {"job": b""}
    agent._beats = agent._send = agent._send_beats = agent._worker = agent._launcher = Mock()
    agent._setup_of = lambda spec, payload: SimpleNamespace(spec=spec, scratch="/nowhere")
    agent.bind = lambda address: ""
    return agent


async def test_a_rank_obeys_orders_from_before_it_of_its_own_job(agent, hosts):
    end = m.RankOrder("job", 3, m.EndRank(3, "leave", m.Text("it is over")))
    agent._obey(end)
    await agent.run(SPEC, "")
    hosts.assert_not_called()
    agent._obey(end)  # late: its process has ended
    agent._take(m.ForgetOrder("job"))
    assert agent._early == {}
    agent._payloads["job"] = b""  # of the next job of this name
    early = [m.InjectFaults((), (7,)), m.InjectFaults((), (8,))]
    for effect in early:
        for start in (3, 4):
            agent._obey(m.RankOrder("job", start, effect))
    await agent.run(SPEC, "")
    hosts.assert_called_once()
    assert [each.args[0].effect for each in hosts().obey.call_args_list] == early


def test_the_largest_rank_ends_where_a_worker_has_more_memory_than_it_may(agent, monkeypatch):
    monkeypatch.setattr(agents, "memory_limit", lambda worker: 1e6)
    ranks = agent._ranks = {size: Mock(**{"process.memory.return_value": size}) for size in (1, 2)}
    agent._check_memory()
    assert [rank.kill.called for rank in ranks.values()] == [False, True]


def test_ranks_of_a_worker_that_is_cut_off_leave_their_generation(agent, monkeypatch):
    """At the second heartbeat: at the first, data may have been sent just now, after a pause."""
    silences = iter([agents.LIMIT_S, 0.0, agents.LIMIT_S - 0.1, agents.LIMIT_S, agents.LIMIT_S])
    monkeypatch.setattr(agents, "unacknowledged_s", lambda _: next(silences))
    monkeypatch.setattr(agents, "memory_limit", lambda _: None)
    agent._unheard, agent._ranks = False, {("job", 3): (rank := Mock())}
    left = []
    for _ in range(5):
        Agent._send_beats(agent)
        left.append(rank.leave_generation.called)
    assert left == [False] * 4 + [True]


# -- a rank whose process a test makes up ----------------------------------------------------------


class Process:
    waits = False

    def __init__(self, state: str) -> None:
        self.kind, self.at, self.signals = state, 0.0, list[tuple[int, str]]()

    def state(self) -> ProcessState:
        self.at += 5.0
        return ProcessState(self.kind, 0.0, self.at)

    def send_signal(self, number: int, reason: str) -> None:
        self.signals.append((number, reason))

    async def wait(self) -> rank_process.ProcessExit:
        return rank_process.ProcessExit()


def hosted(process: Any, beat: m.Beat | None, send: Any = print) -> hosted_rank.HostedRank:
    """Return a rank of a process that has sent a heartbeat, if one is given."""
    setup: Any = SimpleNamespace(spec=SPEC)
    with patch.object(hosted_rank, "RankProcess", return_value=process):
        rank = hosted_rank.HostedRank(setup, Mock(), Mock(), send)
    if beat:
        rank._take(m.Heartbeats((("job", beat),)))
    return rank


async def test_a_death_is_reported_with_the_commit_of_the_last_heartbeat() -> None:
    """What it has printed before may come in any parts; what is no text is replaced."""
    sent: list[Any] = []
    rank = hosted(Process("gone"), m.Beat(3, 1, 0, False, 7), sent.append)
    for part in (b"a\xc3", b"\xbc\xff\n"):
        rank._print(part)
    await rank.wait()
    parts = ("a", "\u00fc\N{REPLACEMENT CHARACTER}\n")
    texts = [m.RankOutput("job", 3, text) for text in parts]
    assert sent == [*texts, m.RankEvent("job", m.RankDied(3, "its process has ended", 7))]


@pytest.mark.parametrize(
    ("state", "heard", "words"),
    [("stopped", False, "was stopped"), ("alive", True, "does nothing"), ("alive", False, "")],
)
async def test_a_process_that_is_stopped_is_ended_also_before_its_first_heartbeat(
    state: str, heard: bool, words: str
) -> None:
    process: Any = Process(state)
    rank = hosted(process, m.Beat(3, 0, 0, False, 0) if heard else None)
    for _ in range(6):
        await asyncio.sleep(0.5)
        rank.beat()
    assert words in "".join(reason for _, reason in process.signals)
    assert bool(process.signals) == bool(words)


async def test_a_busy_process_is_said_to_wait_until_it_is_silent_and_never_again() -> None:
    """Each change counts as progress: one that held the GIL was not evicted while it waited."""
    rank = hosted(Process("disk"), m.Beat(3, 0, 0, True, 0))
    waits = []
    for _ in range(20):
        waits.append(rank.beat().waiting)
        await asyncio.sleep(0.5)
    assert waits == [True] * 3 + [False] * 17


async def test_a_rank_is_not_blamed_for_time_in_which_its_worker_did_not_run() -> None:
    process: Any = Process("alive")
    rank = hosted(process, m.Beat(3, 0, 0, False, 0))
    rank.beat()
    await asyncio.sleep(30)  # the machine is suspended, or has much to do
    rank.beat()
    assert process.signals == []


async def test_a_notice_of_chaos_is_reported_and_the_worker_goes_when_it_said() -> None:
    sent: list[Any] = []
    process: Any = Process("alive")
    process.send = Mock()
    rank = hosted(process, None, sent.append)
    await rank._inflict(m.FaultDue("job", 3, chaos.notice(rank=0, seconds=60.0), 0))
    assert m.NoticeReport(m.Notice(m.NoticeSource.CHAOS, seconds=60.0)) in sent
    rank._worker.loop.call_later.assert_called_once_with(60.0, rank._end_as_noticed)


async def test_what_a_rank_prints_waits_while_much_waits_for_the_scheduler() -> None:
    stream = SimpleNamespace(_write_buffer=range(hosted_rank.CROWDED))
    worker: Any = SimpleNamespace(
        batched_stream=SimpleNamespace(comm=SimpleNamespace(stream=stream))
    )
    setup: Any = SimpleNamespace(spec=SPEC)
    with patch.object(hosted_rank, "RankProcess") as made:
        hosted_rank.HostedRank(setup, Mock(), worker, print)
    crowded = made.call_args.args[-1]
    assert not crowded()
    stream._write_buffer = range(hosted_rank.CROWDED + 1)
    assert crowded()


# -- output: many lines in few messages, and a rank that waits -------------------------------------


async def test_many_lines_are_one_message_and_a_crowded_connection_delays_it_for_a_moment() -> None:
    sent: list[bytes] = []
    crowded = False
    source, prints = os.pipe()
    pipe = rank_process.OutputPipe(source, sent.append, lambda: crowded)

    async def passed(seconds: float) -> list[bytes]:
        await asyncio.sleep(0)
        await asyncio.sleep(seconds)
        found = sent.copy()
        sent.clear()
        return found

    for _ in range(2):
        for number in range(100):
            os.write(prints, b"%d\n" % number)
        assert await passed(rank_process.OUTPUT_INTERVAL_S / 2) == []
        assert [len(each) for each in await passed(rank_process.OUTPUT_INTERVAL_S)] == [290]
    crowded = True
    os.set_blocking(prints, False)
    written = 0
    with contextlib.suppress(BlockingIOError):  # the rank waits
        while True:
            written += os.write(prints, bytes(1 << 16))
    assert await passed(rank_process.PATIENCE_S / 2) == []
    assert sum(map(len, await passed(rank_process.PATIENCE_S))) == written
    os.write(prints, b"more")
    assert await passed(rank_process.PATIENCE_S / 2) == []
    crowded = False
    assert await passed(2 * rank_process.PAUSE_S) == [b"more"]
    os.write(prints, b"last")
    os.close(prints)
    pipe.close()
    assert sent == [b"last"]
