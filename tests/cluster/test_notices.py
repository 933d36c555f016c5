"""Workers that are to leave: notices, as the scheduler acts on them, and retirement."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from math import inf
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from nbelastic import messages as m
from nbelastic.cluster.scheduler import leaving
from nbelastic.cluster.scheduler.plugin import SpotNotices
from nbelastic.cluster.wire import pack
from nbelastic.membership import reasons

from .shared_cluster import SharedCluster
from .test_arbiter import begin, settle


class Cloud(SharedCluster):
    """A made-up cluster whose machines go."""

    def __init__(self) -> None:
        super().__init__()
        self.retired = []
        self.refused = 0  # of so many calls nothing comes, as the data has nowhere to go
        self.watching = {}
        self.installed = []

    async def retire_workers(self, workers, **kwargs):
        assert kwargs == {"close_workers": True, "remove": True}
        if self.refused:
            self.refused -= 1
            return
        self.retired.append(sorted(self.workers[each].name for each in workers))
        for address in workers:
            self.kill_worker(address)

    def take_order(self, address, order):
        if isinstance(order, m.WatchOrder):
            self.watching[address] = order
        super().take_order(address, order)

    async def broadcast(self, *, msg, workers, **_):
        self.installed += [self.workers[each].name for each in workers]
        return {}

    def report(self, address, source=m.NoticeSource.AWS, **fields):
        fields = {"action": "terminate", "seconds": 120.0, "host": True, **fields}
        report = m.NoticeReport(m.Notice(source, **fields))
        self.stream_handlers["nbelastic-agent"](worker=address, message=pack(report))

    def places(self):
        """Return the names of the workers with a rank."""
        return {self.workers[rank.worker].name for rank in self.ranks.values()}

    def watchers(self):
        return {self.workers[each].name for each, order in self.watching.items() if order.host}


def kinds(cloud):
    return [record.kind for record in cloud.plugin.jobs["one"].log.contents().history]


def busy(cloud):
    """Have no rank come to a commit: nothing is retired, as there is time."""
    for rank in cloud.ranks.values():
        rank.aborted = -1
    cloud.actions = list


@contextlib.asynccontextmanager
async def a_cloud(hosts, *, job=True, **limits):
    """Yield a cloud with a worker on each host and a job, and the first worker's address."""
    cloud = await Cloud().start()
    for number, host in enumerate(hosts):
        cloud.hire(f"w{number}", host)
    try:
        if job:
            await begin(cloud, "one", **limits)
        yield cloud, next(iter(cloud.workers), "")
    finally:
        await cloud.plugin.before_close()


@contextlib.asynccontextmanager
async def a_watched_cloud(hosts):
    """Yield a cloud without a job, on which the plugin is registered that watches."""
    async with a_cloud(hosts, job=False) as (cloud, first):
        cloud.plugins[SpotNotices.name] = Mock()
        cloud.plugin.review.start()
        cloud.plugin._review_all()
        yield cloud, first


async def retired(cloud, most=200):
    for _ in range(most):
        if cloud.retired:
            return
        await settle(cloud)
        await asyncio.sleep(0.01)
    raise AssertionError("not retired")


async def test_one_agent_a_host_watches_while_there_is_a_job():
    async with a_cloud("aab", job=False) as (cloud, first):
        third = list(cloud.workers)[2]
        assert not cloud.watching
        await begin(cloud, "one")
        assert cloud.watchers() == {"w0", "w2"}
        assert all(order.on for order in cloud.watching.values())
        cloud.hire("a0", "a")
        cloud.kill_worker(third)
        cloud.watching.pop(third)
        await settle(cloud)
        assert cloud.watchers() == {"w0"}, "it is not replaced while it is there"
        cloud.kill_worker(first)
        cloud.watching.pop(first)
        await settle(cloud)
        assert cloud.watchers() == {"a0"}
        cloud.plugin.service.drop("one")
        cloud.plugin._review_all()
        assert not any(order.on for order in cloud.watching.values())
        await cloud.open("two")
        record = cloud.plugin.jobs["two"]
        record.terms = replace(record.terms, notices=False)
        await settle(cloud)
        assert not cloud.watchers(), "this one does not want it"


async def test_a_host_is_left_its_workers_retired_and_others_asked_for():
    async with a_cloud("aabb", np=4, min_np=1, max_np=4) as (cloud, gone):
        assert cloud.sizes() == {"one": 4}
        cloud.report(gone)
        assert cloud.plugin.departures.demand() == 6, "two more, from this moment on"
        cloud.step_all()
        (reason,) = reasons(cloud.plugin.jobs["one"].machine, cloud.now)
        assert str(reason).count("leaves in") == 2
        cloud.hire("w4", "a")
        await settle(cloud)
        assert "w4" not in cloud.places(), "it comes to such a host"
        await retired(cloud)
        assert cloud.retired == [["w0", "w1", "w4"]]
        await settle(cloud)
        assert cloud.sizes() == {"one": 2}
        assert cloud.plugin.departures.demand() == 4
        assert not cloud.roster("one").notices


async def test_a_revoked_notice_offers_the_slots_again():
    async with a_cloud("ab") as (cloud, stays):
        cloud.report(stays)
        cloud.step_all()
        cloud.report(stays, revoked=True)
        await settle(cloud)
        await asyncio.sleep(2 * leaving.POLL)
        await settle(cloud)
        assert cloud.retired == []
        assert cloud.sizes() == {"one": 2}
        said = [record.reason for record in cloud.plugin.jobs["one"].log.contents().history]
        assert [each.revoked for each in said if isinstance(each, m.Notice)] == [False, True]


@pytest.mark.parametrize("seconds", [0.0, -600.0, 1e12])
async def test_ranks_have_a_little_time_whatever_a_notice_says(seconds):
    """A machine that should be gone already still speaks; its clock may be wrong."""
    async with a_cloud("ab") as (cloud, gone):
        cloud.report(gone, seconds=seconds)
        (worker,) = (each for each in cloud.plugin.workers.values() if each.notices)
        now = asyncio.get_running_loop().time()
        assert worker.retire_at == pytest.approx(now + leaving.rules.SOON, abs=1.0)
        await retired(cloud)
        assert cloud.retired == [["w0"]]
        assert "lost" not in kinds(cloud)


async def test_a_worker_is_retired_in_time_though_its_rank_comes_to_no_commit(monkeypatch):
    monkeypatch.setattr(leaving.rules, "SOON", 0.05)
    async with a_cloud("ab") as (cloud, gone):
        busy(cloud)
        cloud.report(gone, seconds=0.0)
        await retired(cloud)
        assert cloud.retired == [["w0"]]


async def test_one_notice_revoked_leaves_the_other_in_force():
    """The end of a batch job is not revoked by the cloud, nor the other way round.

    Only the agent that watches is believed about its host: a process that stood still for an hour
    may report what was so an hour ago. A worker that somebody retires is not offered again.
    """
    async with a_cloud("aa", preemptible=False) as (cloud, first):
        busy(cloud)
        assert cloud.watchers() == {"w0"}
        second = list(cloud.workers)[1]
        records = cloud.plugin.workers
        cloud.report(first, m.NoticeSource.SLURM, action="end", host=False)
        cloud.report(first, seconds=60.0)
        cloud.report(second, revoked=True)
        assert records[first].leaving and records[second].leaving
        cloud.report(first, revoked=True)
        assert records[first].leaving and not records[second].leaving
        cloud.report(first, m.NoticeSource.SLURM, host=False, revoked=True)
        assert not records[first].leaving
        cloud.report(first)
        cloud.plugin.departures.mark_leaving(first)
        cloud.report(first, revoked=True)
        assert records[first].leaving and not records[second].leaving


async def test_a_notice_that_comes_nearer_counts_and_one_that_goes_away_does_not():
    async with a_cloud("a") as (cloud, gone):
        busy(cloud)
        ends = []
        for seconds in (600.0, 900.0, 60.0):
            cloud.report(gone, seconds=seconds)
            cloud.step_all()
            roster = cloud.plugin.jobs["one"].machine.roster
            (kept,) = roster.notices.values()
            ends.append(round(kept.seconds - roster.now, -1))
        assert ends == [600.0, 600.0, 60.0]
        assert kinds(cloud).count("notice") == 1


# -- machines at risk ------------------------------------------------------------------------------


async def test_a_worker_at_risk_stays_until_another_has_its_place():
    async with a_cloud("ab", np=2, min_np=1, max_np=2) as (cloud, risky):
        cloud.report(risky, action="rebalance", seconds=0.0, soft=True)
        assert cloud.plugin.departures.demand() == 3, "one more, from this moment on"
        await settle(cloud)
        assert cloud.sizes() == {"one": 2}
        assert cloud.retired == []
        cloud.hire("w2", "c")
        await settle(cloud)
        assert cloud.places() == {"w1", "w2"}
        await retired(cloud)
        assert cloud.retired == [["w0"]]
        assert cloud.plugin.departures.demand() == 2
        assert kinds(cloud).count("notice") == 1
        assert "lost" not in kinds(cloud)


async def test_a_worker_that_was_replaced_gets_no_rank_while_its_data_keeps_it(monkeypatch):
    """Its retirement is tried again."""
    monkeypatch.setattr(leaving, "RETRY", 0.01)
    async with a_cloud("ab", np=1, min_np=1, max_np=1) as (cloud, risky):
        cloud.refused = 3
        cloud.report(risky, action="rebalance", seconds=0.0, soft=True)
        await retired(cloud)
        assert cloud.refused == 0
        assert cloud.retired == [["w0"]]
        assert cloud.places() == {"w1"}


async def test_a_notice_that_is_revoked_leaves_the_recommendation_before_it():
    async with a_cloud("a", np=1, min_np=1, max_np=1) as (cloud, risky):
        cloud.report(risky, action="rebalance", seconds=0.0, soft=True)
        cloud.report(risky, seconds=60.0)
        cloud.report(risky, revoked=True)
        await settle(cloud)
        assert cloud.retired == []
        assert cloud.sizes() == {"one": 1}
        (rank,) = cloud.plugin.jobs["one"].machine.roster.ranks.values()
        assert not rank.leaving, "it stays while there is no other place"
        cloud.hire("w1", "b")
        await retired(cloud)
        assert cloud.retired == [["w0"]]
        assert cloud.places() == {"w1"}


async def test_a_recommendation_before_a_job_and_a_notice_after_it():
    async with a_watched_cloud("a") as (cloud, risky):
        cloud.report(risky, action="rebalance", seconds=0.0, soft=True)
        await settle(cloud)
        assert cloud.retired == [], "it stays while nothing says when it goes"
        await begin(cloud, "one", np=1, min_np=1, max_np=1)
        assert cloud.sizes() == {"one": 1}
        cloud.hire("w1", "b")
        await retired(cloud)
        assert cloud.retired == [["w0"]]


# -- Dask without jobs -----------------------------------------------------------------------------


async def test_workers_are_watched_and_retired_without_a_job():
    async with a_watched_cloud("aab") as (cloud, gone):
        cloud.workers["tcp://w3:9"] = dataclasses.replace(cloud.workers[gone], name="w3")
        cloud.plugin._review_all()
        await settle(cloud)
        assert cloud.installed == ["w3"], "it had no agent"
        await cloud.open("one")
        cloud.plugin.service.drop("one")
        assert cloud.watchers() == {"w0", "w2"}
        cloud.report(gone)
        await retired(cloud)
        assert cloud.retired == [["w0", "w1"]]
        assert cloud.plugin.review.running
        stays = next(iter(cloud.workers))
        assert cloud.watching[stays].on
        del cloud.plugins[SpotNotices.name]
        cloud.plugin._review_all()
        assert not cloud.watching[stays].on
        assert not cloud.plugin.review.running


# -- retirement as cluster managers ask for it -----------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "leaving"),
    [
        ({"workers": ["tcp://0:1"]}, {"0"}),
        ({"names": [1]}, {"1"}),
        ({"workers": [1]}, {"1"}),
        ({"workers": ["slurm-1"]}, {"slurm-1-0", "slurm-1-1"}),
        ({"workers": ["slurm-1-1"]}, {"slurm-1-1"}),
        ({"workers": ["slurm", "slurm-"]}, set()),
        ({"workers": ["tcp://gone:1"]}, set()),
        ({"workers": [0, 1, "slurm-1", "slurm-10"]}, set()),
    ],
)
def test_workers_are_asked_to_leave_however_they_are_given(asked, leaving):
    called = []

    async def retire(**options):
        called.append(options)

    async def scene(cluster):
        for name in ("0", "1", "slurm-1-0", "slurm-1-1", "slurm-10-0"):
            cluster.hire(name)
        await cluster.handlers["retire_workers"](**asked)
        return {w.slot.name for w in cluster.plugin.workers.values() if w.leaving}

    assert on_a_cluster(retire, scene) == leaving
    assert called == [asked], "Dask gets what was asked for"


def on_a_cluster(retire, scene):
    """Play a scene on a cluster whose Dask retires by a function."""

    async def play():
        cluster = SharedCluster()
        cluster.handlers["retire_workers"] = retire
        await cluster.start()
        found = await scene(cluster)
        await cluster.plugin.before_close()
        return found

    return asyncio.run(play())


@pytest.mark.parametrize(
    ("told", "left", "waited"),
    [(0.0, 5.0, 5.0), (0.0, inf, 30.0), (50.0, 70.0, 70.0), (50.0, inf, 80.0), (inf, inf, 120.0)],
)
def test_a_retired_worker_waits_for_the_last_holder_of_the_state(monkeypatch, told, left, waited):
    """It is told to leave only when another rank has the state."""
    now = 0.0

    async def sleep(seconds):
        nonlocal now
        now += seconds

    async def retire(**options):
        return now

    async def scene(cluster):
        address, departures = cluster.hire("0"), cluster.plugin.departures
        monkeypatch.setattr(departures, "mark_leaving", lambda address: [("job", 0)])
        monkeypatch.setattr(departures, "_was_told", lambda _: now >= told if now < left else None)
        monkeypatch.setattr(leaving, "asyncio", SimpleNamespace(sleep=sleep))
        return await cluster.handlers["retire_workers"](workers=[address])

    assert on_a_cluster(retire, scene) == pytest.approx(waited, abs=0.1)
