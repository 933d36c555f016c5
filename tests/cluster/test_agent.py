"""Agents of workers: orders that come early, and closing."""

import asyncio
from types import SimpleNamespace

import pytest
from distributed.core import Status

from nbelastic.cluster.worker import agent as agents
from nbelastic.cluster.worker.agent import Agent
from nbelastic.cluster.worker.notice_watcher import NoticeWatcher
from nbelastic.elastic.ranks.runtime import RankSpec
from nbelastic.messages import (
    EndRank,
    ForgetOrder,
    InjectFaults,
    Place,
    RankOrder,
    Text,
)


@pytest.mark.parametrize("status", [Status.closing, Status.running])
def test_a_worker_that_closes_ends_its_ranks(status):
    heeded, undone, closed = [], [], []
    agent = Agent()
    agent._ranks = {}
    agent._beats = SimpleNamespace(stop=lambda: None)
    agent._notices = NoticeWatcher(SimpleNamespace(), lambda report: None)
    agent._undo_interrupts = lambda: heeded.append(True)
    agent._undo_termination = lambda: undone.append(True)
    agent._launcher = SimpleNamespace(close=lambda: closed.append(True))
    asyncio.run(agent.teardown(SimpleNamespace(status=status)))
    assert undone == closed == [True]
    assert bool(heeded) == (status is Status.running)  # it goes on without the agent


class Hosted:
    """A rank that ends at once, and keeps what it was ordered."""

    def __init__(self, key, *_):
        self.orders = made[key] = []

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
    agent._ranks, agent._ended_early, agent._early, agent._payloads = {}, set(), {}, {"job": b""}
    agent._beats = SimpleNamespace(start=lambda: None, stop=lambda: None)
    agent._send = agent._inflict = lambda *_: None
    agent._send_beats = lambda: None
    agent.bind, agent._scratch = (lambda address: ""), (lambda spec: "/nowhere")
    return agent


def run(agent):
    asyncio.run(agent.run(RankSpec(job="job", start=3, place=Place(0, 1, 0, 1, 0, 1)), ""))


def test_a_rank_gets_the_orders_that_came_before_it(agent):
    early = [InjectFaults((), (7,)), InjectFaults((), (8,))]
    for effect in early:
        for start in (3, 4):
            agent._obey(("job", start), RankOrder("job", start, effect))
    run(agent)
    assert made == {("job", 3): early}
    agent._take(ForgetOrder("job"))
    assert agent._early == {}


def test_an_order_to_end_holds_for_the_job_that_gave_it(agent):
    end = RankOrder("job", 3, EndRank(3, "leave", Text("it is over")))
    agent._obey(("job", 3), end)
    run(agent)
    assert made == {}
    agent._obey(("job", 3), end)  # late: its process has ended
    agent._take(ForgetOrder("job"))
    agent._payloads["job"] = b""  # of the next job of this name
    run(agent)
    assert list(made) == [("job", 3)]
