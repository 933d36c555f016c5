"""Notices, as the scheduler acts on them: who watches, who leaves, who is retired, and when."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from nbelastic.cluster.scheduler import notices as desk
from nbelastic.cluster.scheduler.spot_notices import SpotNotices
from nbelastic.cluster.wire import pack, unpack
from nbelastic.membership import view
from nbelastic.messages import (
    Notice,
    Noticed,
    NoticeReport,
    NoticeSource,
    WatchOrder,
)

from .shared_cluster import SharedCluster
from .test_arbiter import settle


class Cloud(SharedCluster):
    """A made-up cluster whose machines go."""

    def __init__(self) -> None:
        super().__init__()
        self.retired = []
        self.refused = 0  # of so many calls nothing comes, as the data has nowhere to go
        self.watching = {}
        self.plugins = {}
        self.installed = []
        self.handlers["retire_workers"] = self._retire

    async def _retire(self, workers, **kwargs):
        assert kwargs == {"close_workers": True, "remove": True}
        if self.refused:
            self.refused -= 1
            return
        self.retired.append(sorted(self.workers[each].name for each in workers))
        for address in workers:
            self.kill_worker(address)

    def worker_send(self, address, message):
        order = unpack(message["message"])
        if isinstance(order, WatchOrder):
            self.watching[address] = order
        super().worker_send(address, message)

    async def broadcast(self, *, msg, workers, **_):
        self.installed += [self.workers[each].name for each in workers]
        return {}

    def report(self, address, source=NoticeSource.AWS, **fields):
        fields = {"action": "terminate", "seconds": 120.0, "host": True, **fields}
        report = NoticeReport(Notice(source, **fields))
        self.stream_handlers["nbelastic-agent"](worker=address, message=pack(report))

    def watchers(self):
        return {self.workers[each].name for each, order in self.watching.items() if order.host}


def kinds(cloud):
    return [record.kind for record in cloud.plugin.jobs["one"].log.contents().history]


def busy(cloud):
    """Have no rank come to a commit: nothing is retired, as there is time."""
    for rank in cloud.ranks.values():
        rank.aborted = -1
    cloud.actions = list


def play(scene):
    async def run():
        cloud = await Cloud().start()
        try:
            await scene(cloud)
        finally:
            await cloud.plugin.before_close()

    asyncio.run(run())


async def retired(cloud, most=200):
    for _ in range(most):
        if cloud.retired:
            return
        await settle(cloud)
        await asyncio.sleep(0.01)
    raise AssertionError("not retired")


def test_one_agent_a_host_watches_while_there_is_a_job():
    async def scene(cloud):
        first, _, third = (cloud.hire(f"w{n}", "ab"[n // 2]) for n in range(3))
        assert not cloud.watching
        await cloud.open("one")
        await settle(cloud)
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
        cloud.plugin.drop("one")
        assert not any(order.on for order in cloud.watching.values())

    play(scene)


def test_no_agent_watches_for_a_job_that_does_not_want_it():
    async def scene(cloud):
        cloud.hire("w0")
        await cloud.open("one")
        record = cloud.plugin.jobs["one"]
        record.terms = replace(record.terms, notices=False)
        await settle(cloud)
        assert not cloud.watchers()

    play(scene)


def test_a_host_is_left_its_workers_retired_and_others_asked_for():
    async def scene(cloud):
        gone = cloud.hire("w0", "a")
        for name, host in (("w1", "a"), ("w2", "b"), ("w3", "b")):
            cloud.hire(name, host)
        await cloud.open("one", np=4, min_np=1, max_np=4)
        await settle(cloud)
        assert cloud.sizes() == {"one": 4}
        cloud.report(gone)
        assert cloud.plugin.demand() == 6, "two more, from this moment on"
        cloud.step_all()
        reason = view(cloud.plugin.jobs["one"].machine, cloud.now).reason
        assert isinstance(reason, Noticed) and reason.number == 2
        await retired(cloud)
        assert cloud.retired == [["w0", "w1"]]
        await settle(cloud)
        assert cloud.sizes() == {"one": 2}
        assert cloud.plugin.demand() == 4
        assert not cloud.roster("one").notices

    play(scene)


def test_a_worker_that_comes_to_such_a_host_gets_no_rank():
    async def scene(cloud):
        gone = cloud.hire("w0", "a")
        cloud.hire("w1", "b")
        await cloud.open("one")
        await settle(cloud)
        cloud.report(gone)
        cloud.hire("w2", "a")
        await settle(cloud)
        assert {rank.worker.split("/")[2][:2] for rank in cloud.ranks.values()} == {"w1"}

    play(scene)


def test_a_batch_job_s_end_is_about_one_worker():
    async def scene(cloud):
        gone = cloud.hire("w0", "a")
        cloud.hire("w1", "a")
        await cloud.open("one")
        await settle(cloud)
        cloud.report(gone, host=False)
        await retired(cloud)
        assert cloud.retired == [["w0"]]

    play(scene)


def test_a_revoked_notice_offers_the_slots_again():
    async def scene(cloud):
        stays = cloud.hire("w0", "a")
        cloud.hire("w1", "b")
        await cloud.open("one")
        await settle(cloud)
        cloud.report(stays)
        cloud.step_all()
        cloud.report(stays, revoked=True)
        await settle(cloud)
        await asyncio.sleep(2 * desk.POLL)
        await settle(cloud)
        assert cloud.retired == []
        assert cloud.sizes() == {"one": 2}
        said = [record.reason for record in cloud.plugin.jobs["one"].log.contents().history]
        assert [each.revoked for each in said if isinstance(each, Notice)] == [False, True]

    play(scene)


def test_at_the_end_of_the_time_workers_are_retired_whatever_their_ranks_do(monkeypatch):
    async def scene(cloud):
        gone = cloud.hire("w0", "a")
        await cloud.open("one")
        await settle(cloud)
        monkeypatch.setattr(desk, "LEAST", 0.0)
        cloud.report(gone, seconds=desk.MARGIN)
        cloud.step_all()
        assert cloud.held() == {"one": 1}
        await retired(cloud)
        assert cloud.retired == [["w0"]]

    play(scene)


@pytest.mark.parametrize("seconds", [0.0, -600.0, 1e12])
def test_ranks_have_a_little_time_whatever_a_notice_says(seconds):
    """A machine that should be gone already still speaks; its clock may be wrong."""

    async def scene(cloud):
        cloud.hire("w0", "a")
        cloud.hire("w1", "b")
        await cloud.open("one")
        await settle(cloud)
        cloud.report(next(iter(cloud.workers)), seconds=seconds)
        (worker,) = (each for each in cloud.plugin._workers.values() if each.notices)
        now = asyncio.get_running_loop().time()
        assert worker.retire_at == pytest.approx(now + desk.LEAST, abs=1.0)
        await retired(cloud)
        assert cloud.retired == [["w0"]]
        assert "lost" not in kinds(cloud)

    play(scene)


def test_one_notice_revoked_leaves_the_other_in_force():
    """The end of a batch job is not revoked by the cloud, nor the other way round."""

    async def scene(cloud):
        first = cloud.hire("w0", "a")
        cloud.hire("w1", "a")
        await cloud.open("one", preemptible=False)
        await settle(cloud)
        busy(cloud)
        cloud.report(first, NoticeSource.SLURM, action="end", host=False)
        cloud.report(first, seconds=60.0)
        cloud.report(first, revoked=True)
        record = {each.slot.name: each for each in cloud.plugin._workers.values()}
        assert record["w0"].leaving and not record["w1"].leaving
        cloud.report(first, NoticeSource.SLURM, host=False, revoked=True)
        assert not record["w0"].leaving

    play(scene)


def test_a_worker_that_is_being_retired_is_not_offered_again():
    """Somebody retires it; that its notice is revoked does not matter then."""

    async def scene(cloud):
        stays = cloud.hire("w0", "a")
        cloud.hire("w1", "b")
        await cloud.open("one")
        await settle(cloud)
        busy(cloud)
        cloud.report(stays)
        cloud.plugin.mark_leaving(stays)
        cloud.report(stays, revoked=True)
        (worker,) = (each for each in cloud.plugin._workers.values() if each.address == stays)
        assert worker.leaving
        assert stays not in cloud.plugin.free_workers()

    play(scene)


def test_only_the_agent_that_watches_is_believed_about_its_host():
    """A process that stood still for an hour may report what was so an hour ago."""

    async def scene(cloud):
        first, second = cloud.hire("w0", "a"), cloud.hire("w1", "a")
        await cloud.open("one")
        await settle(cloud)
        busy(cloud)
        assert cloud.watchers() == {"w0"}
        cloud.report(first)
        cloud.report(second, revoked=True)
        assert all(each.notices for each in cloud.plugin._workers.values())

    play(scene)


def test_an_agent_that_is_silent_or_closes_watches_no_more():
    async def scene(cloud):
        cloud.hire("w0", "a")
        second = cloud.hire("w1", "a")
        await cloud.open("one")
        await settle(cloud)
        records = {each.slot.name: each for each in cloud.plugin._workers.values()}
        records["w0"].silence = desk.SILENT
        cloud.plugin._review_all()
        assert cloud.watchers() == {"w1"}
        records["w0"].silence = 0.0
        cloud.plugin.mark_leaving(second, soon=True)
        cloud.plugin._review_all()
        assert cloud.watchers() == {"w0"}

    play(scene)


def test_a_notice_that_comes_nearer_counts_and_one_that_goes_away_does_not():
    async def scene(cloud):
        gone = cloud.hire("w0", "a")
        await cloud.open("one")
        await settle(cloud)
        busy(cloud)
        ends = []
        for seconds in (600.0, 900.0, 60.0):
            cloud.report(gone, seconds=seconds)
            cloud.step_all()
            (shown,) = view(cloud.plugin.jobs["one"].machine, cloud.now).reason.notices
            ends.append(round(shown.seconds, -1))
        assert ends == [600.0, 600.0, 60.0]
        assert kinds(cloud).count("notice") == 1

    play(scene)


def test_workers_that_cannot_be_retired_are_tried_again(monkeypatch):
    monkeypatch.setattr(desk, "RETRY", 0.01)

    async def scene(cloud):
        gone = cloud.hire("w0", "a")
        cloud.hire("w1", "b")
        await cloud.open("one")
        await settle(cloud)
        cloud.refused = 2
        cloud.report(gone)
        await retired(cloud)
        assert cloud.retired == [["w0"]]
        assert cloud.refused == 0

    play(scene)


# -- machines at risk ------------------------------------------------------------------------------


def test_a_worker_at_risk_stays_until_another_has_its_place():
    async def scene(cloud):
        risky = cloud.hire("w0", "a")
        cloud.hire("w1", "b")
        await cloud.open("one", np=2, min_np=1, max_np=2)
        await settle(cloud)
        cloud.report(risky, action="rebalance", seconds=0.0, soft=True)
        assert cloud.plugin.demand() == 3, "one more, from this moment on"
        await settle(cloud)
        assert cloud.sizes() == {"one": 2}
        assert cloud.retired == []
        cloud.hire("w2", "c")
        await settle(cloud)
        assert {rank.worker.split("/")[2][:2] for rank in cloud.ranks.values()} == {"w1", "w2"}
        await retired(cloud)
        assert cloud.retired == [["w0"]]
        assert cloud.plugin.demand() == 2
        assert kinds(cloud).count("notice") == 1
        assert "lost" not in kinds(cloud)

    play(scene)


def test_a_worker_that_was_replaced_gets_no_rank_while_its_data_keeps_it(monkeypatch):
    monkeypatch.setattr(desk, "RETRY", 0.01)

    async def scene(cloud):
        risky = cloud.hire("w0", "a")
        cloud.hire("w1", "b")
        await cloud.open("one", np=1, min_np=1, max_np=1)
        await settle(cloud)
        cloud.refused = 3
        cloud.report(risky, action="rebalance", seconds=0.0, soft=True)
        await settle(cloud)
        await retired(cloud)
        assert cloud.refused == 0
        assert cloud.retired == [["w0"]]
        assert {rank.worker.split("/")[2][:2] for rank in cloud.ranks.values()} == {"w1"}

    play(scene)


def test_a_worker_is_at_risk_no_more():
    async def scene(cloud):
        risky = cloud.hire("w0", "a")
        await cloud.open("one", np=1, min_np=1, max_np=1)
        await settle(cloud)
        cloud.report(risky, action="rebalance", seconds=0.0, soft=True)
        cloud.report(risky, action="rebalance", seconds=0.0, soft=True, revoked=True)
        cloud.hire("w1", "b")
        await settle(cloud)
        assert {rank.worker.split("/")[2][:2] for rank in cloud.ranks.values()} == {"w0"}
        assert cloud.plugin.demand() == 1

    play(scene)


def test_a_notice_that_is_revoked_leaves_the_recommendation_before_it():
    async def scene(cloud):
        risky = cloud.hire("w0", "a")
        await cloud.open("one", np=1, min_np=1, max_np=1)
        await settle(cloud)
        cloud.report(risky, action="rebalance", seconds=0.0, soft=True)
        cloud.report(risky, seconds=60.0)
        cloud.report(risky, revoked=True)
        await settle(cloud)
        assert cloud.retired == []
        assert cloud.sizes() == {"one": 1}
        (rank,) = cloud.plugin.jobs["one"].machine.roster.ranks.values()
        assert not rank.leaving, "it stays while there is no other place"
        cloud.hire("w1", "b")
        await settle(cloud)
        await retired(cloud)
        assert cloud.retired == [["w0"]]
        assert {rank.worker.split("/")[2][:2] for rank in cloud.ranks.values()} == {"w1"}

    play(scene)


def test_a_recommendation_before_a_job_and_a_notice_after_it():
    async def scene(cloud):
        cloud.plugins[SpotNotices.name] = None
        cloud.plugin.watch_machines()
        risky = cloud.hire("w0", "a")
        cloud.plugin._review_all()
        cloud.report(risky, action="rebalance", seconds=0.0, soft=True)
        await settle(cloud)
        assert cloud.retired == [], "it stays while nothing says when it goes"
        await cloud.open("one", np=1, min_np=1, max_np=1)
        await settle(cloud)
        assert cloud.sizes() == {"one": 1}
        cloud.hire("w1", "b")
        await settle(cloud)
        await retired(cloud)
        assert cloud.retired == [["w0"]]

    play(scene)


# -- Dask without jobs -----------------------------------------------------------------------------


def test_workers_are_watched_and_retired_without_a_job():
    async def scene(cloud):
        cloud.plugins[SpotNotices.name] = None
        cloud.plugin.watch_machines()
        gone = cloud.hire("w0", "a")
        cloud.hire("w1", "a")
        cloud.hire("w2", "b")
        cloud.workers["tcp://w3:9"] = SimpleNamespace(**{**vars(cloud.workers[gone]), "name": "w3"})
        cloud.plugin._review_all()
        await settle(cloud)
        assert cloud.installed == ["w3"], "it had no agent"
        assert cloud.watchers() == {"w0", "w2"}
        cloud.report(gone)
        await retired(cloud)
        assert cloud.retired == [["w0", "w1"]]
        assert cloud.plugin._review.running

    play(scene)


def test_nothing_is_watched_when_the_plugin_is_gone():
    async def scene(cloud):
        cloud.plugins[SpotNotices.name] = None
        cloud.plugin.watch_machines()
        cloud.hire("w0", "a")
        cloud.plugin._review_all()
        await cloud.open("one")
        cloud.plugin.drop("one")
        assert cloud.watchers() == {"w0"}
        assert cloud.plugin._review.running
        del cloud.plugins[SpotNotices.name]
        cloud.plugin._review_all()
        assert not cloud.watchers()
        assert not cloud.plugin._review.running

    play(scene)
