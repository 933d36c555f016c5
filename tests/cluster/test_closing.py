"""What a worker does when it closes."""

import asyncio
import gc
from types import SimpleNamespace

import pytest
from distributed import Client, LocalCluster
from distributed.core import Status

import nbelastic
from nbelastic.cluster.worker import agent as agents
from nbelastic.cluster.worker.agent import Agent
from nbelastic.cluster.worker.notice_watcher import NoticeWatcher


@pytest.mark.parametrize(
    ("status", "nanny", "parent", "freezes"),
    [
        (Status.closing, "tcp://a:1", object(), 1),
        (Status.running, "tcp://a:1", object(), 0),
        (Status.closing, None, object(), 0),
        (Status.closing, "tcp://a:1", None, 0),
    ],
)
def test_a_process_that_ends_with_its_worker_is_not_searched(
    monkeypatch, status, nanny, parent, freezes
):
    frozen, heeded, undone = [], [], []
    monkeypatch.setattr(agents, "gc", SimpleNamespace(freeze=lambda: frozen.append(True)))
    monkeypatch.setattr(agents, "multiprocessing", SimpleNamespace(parent_process=lambda: parent))
    agent = Agent()
    agent._sessions = {}
    agent._beats = SimpleNamespace(stop=lambda: None)
    agent._notices = NoticeWatcher(SimpleNamespace(), lambda report: None)
    agent._heed_interrupts = lambda: heeded.append(True)
    agent._heed_termination = lambda: undone.append(True)
    asyncio.run(agent.teardown(SimpleNamespace(status=status, nanny=nanny)))
    assert len(frozen) == freezes
    assert undone == [True]
    assert bool(heeded) == (status is Status.running)  # it goes on without the agent


def test_a_kernel_whose_workers_are_threads_goes_on_collecting():
    before = gc.get_freeze_count()
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        assert nbelastic.fit(nbelastic.size, cluster=client, np=1).results() == [1]
    assert gc.get_freeze_count() == before
