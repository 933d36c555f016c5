"""What a worker does when it closes."""

import asyncio
from types import SimpleNamespace

import pytest
from distributed.core import Status

from nbelastic.cluster.worker.agent import Agent
from nbelastic.cluster.worker.notice_watcher import NoticeWatcher


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
