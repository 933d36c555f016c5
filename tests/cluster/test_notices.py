"""Notices: read as the clouds write them, watched for by one agent a host, and acted on."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nbelastic.cluster.scheduler import notices as desk
from nbelastic.cluster.wire import NoticeReport, WatchOrder, pack, unpack
from nbelastic.cluster.worker import notice_watcher
from nbelastic.cluster.worker.notice_watcher import MetadataPoller, NoticeWatcher
from nbelastic.cluster.worker.notices import (
    GOOGLE_SECONDS,
    Notice,
    Unanswered,
    batch_job_end,
    read_aws,
    read_azure,
    read_google,
)
from nbelastic.membership import NoticeGiven, NoticeSource, view
from nbelastic.membership.reasons import Noticed, NoticeRevoked
from tests.support.clusters import until
from tests.support.metadata import FakeMetadata, aws_notice, azure_events, metadata

from .shared_cluster import SharedCluster
from .test_arbiter import settle

# -- reading ---------------------------------------------------------------------------------------


def test_each_cloud_s_notice_is_read():
    aws = b'{"action": "stop", "time": "2017-09-18T08:22:00Z"}'
    assert read_aws(aws) == Notice(NoticeSource.AWS, "stop", 1505722920.0)
    assert read_google(b"TRUE\n", 5.0) == Notice(NoticeSource.GOOGLE, "preempt", 35.0)
    assert GOOGLE_SECONDS == 30.0
    assert read_google(b"FALSE", 5.0) is None
    events = azure_events("vm-0", "vm-1", before="Mon, 19 Sep 2016 18:29:47 GMT")
    assert read_azure(events, "vm-1", 5.0) == Notice(NoticeSource.AZURE, "Preempt", 1474309787.0)
    started = azure_events("vm-1", kind="Terminate")
    assert read_azure(started, "vm-1", 5.0) == Notice(NoticeSource.AZURE, "Terminate", 5.0)


def test_events_of_others_and_events_that_pass_are_none():
    assert read_azure(azure_events("vm-10"), "vm-1", 0.0) is None
    assert read_azure(azure_events("vm-1", kind="Freeze"), "vm-1", 0.0) is None
    assert read_azure(b'{"DocumentIncarnation": 7, "Events": []}', "vm-1", 0.0) is None


@given(st.one_of(st.binary(max_size=40), st.sampled_from([b"null", b"[]", b"7", b'{"Events": 3}'])))
@example(b'{"Events": [{"EventType": "Preempt", "Resources": ["vm-1"], "NotBefore": "soon"}]}')
@example(b'{"Events": [{"EventType": [], "Resources": ["vm-1"]}]}')
@example(b'{"action": "stop", "time": "9999-99-99T00:00:00Z"}')
@example(b'{"action": "stop", "time": null}')
@example(b"[" * 5000)
def test_what_is_no_notice_says_nothing(body):
    for read in (read_aws, lambda b: read_azure(b, "vm-1", 0.0), lambda b: read_google(b, 0.0)):
        try:
            found = read(body)
        except Unanswered:
            continue
        assert found is None or isinstance(found, Notice)


@pytest.mark.parametrize(
    ("environ", "end"),
    [
        ({}, None),
        ({"SLURM_JOB_END_TIME": "1700000600"}, Notice(NoticeSource.SLURM, "end", 1700000600.0)),
        ({"PBS_WALLTIME": "3600"}, Notice(NoticeSource.PBS, "end", 1700003600.0)),
        ({"PBS_WALLTIME": "-1"}, None),
        ({"SLURM_JOB_END_TIME": "nan"}, None),
        ({"SLURM_JOB_END_TIME": "UNLIMITED"}, None),
    ],
)
def test_a_batch_job_says_when_it_ends(environ, end):
    assert batch_job_end(environ, started=1700000000.0) == end


# -- asking ----------------------------------------------------------------------------------------


@pytest.fixture
def watch(monkeypatch):
    """Return a function that watches a made-up service, and what it was told."""
    pollers = []

    def start(service):
        told = []
        monkeypatch.setenv("NBELASTIC_METADATA_URL", service.url)
        pollers.append(MetadataPoller(told.append, interval=0.01))
        return told

    yield start
    for poller in pollers:
        poller.stop()
        until(lambda poller=poller: not poller.running, "the thread has ended")


def polls(service: FakeMetadata) -> int:
    return sum("token" not in path and "/id" not in path for path, _ in service.asked)


def test_aws_says_no_then_yes_then_takes_it_back(watch):
    with metadata("aws") as service:
        told = watch(service)
        until(lambda: polls(service) > 2, "404s")
        assert told == []
        service.notice = aws_notice(120)
        until(lambda: told, "the notice")
        assert (told[0].source, told[0].action) == (NoticeSource.AWS, "terminate")
        service.notice = None
        until(lambda: len(told) > 1, "that it is revoked")
        assert told[1] is None


def test_a_token_that_has_expired_is_replaced(watch):
    with metadata("aws") as service:
        told = watch(service)
        until(lambda: polls(service) > 1, "404s")
        service.token, service.notice = "second", aws_notice(120)
        until(lambda: told, "the notice")
        assert 401 in {status for _, status in service.asked}
        tokens = [path for path, _ in service.asked if "token" in path]
        assert len(tokens) == 2


@pytest.mark.parametrize(
    ("cloud", "notice", "source"),
    [
        ("google", b"TRUE", NoticeSource.GOOGLE),
        ("azure", azure_events("vm-1"), NoticeSource.AZURE),
    ],
)
def test_the_other_clouds_are_found_and_asked(watch, cloud, notice, source):
    with metadata(cloud) as service:
        told = watch(service)
        until(lambda: polls(service) > 2, "answers")
        assert told == []
        service.notice = notice
        until(lambda: told, "the notice")
        assert told[0].source == source


def test_an_event_of_another_machine_is_not_ours(watch):
    with metadata("azure") as service:
        service.notice = azure_events("vm-2")
        told = watch(service)
        until(lambda: polls(service) > 4, "answers")
        assert told == []


def test_silence_and_errors_revoke_nothing(watch):
    with metadata("google") as service:
        told = watch(service)
        service.notice = b"TRUE"
        until(lambda: told, "the notice")
        for service.broken in (500, 404, 401):
            before = polls(service)
            until(lambda before=before: polls(service) > before + 2, "errors")
    assert [each is not None for each in told] == [True]


def test_a_machine_without_a_service_is_not_asked_again(monkeypatch):
    monkeypatch.setenv("NBELASTIC_METADATA_URL", "http://127.0.0.1:9")
    poller = MetadataPoller(lambda _: None, interval=0.01)
    until(lambda: not poller.running, "the thread has ended")


def test_a_service_that_is_too_slow_is_none(monkeypatch):
    with metadata("aws") as service:
        service.slow = 0.3
        monkeypatch.setattr(notice_watcher, "PROBE_LIMIT", 0.05)
        monkeypatch.setenv("NBELASTIC_METADATA_URL", service.url)
        poller = MetadataPoller(lambda _: None, interval=0.01)
        until(lambda: not poller.running, "the thread has ended")


def test_a_thread_ends_in_the_middle_of_a_request(monkeypatch):
    asked = threading.Event()
    with metadata("google") as service:
        monkeypatch.setenv("NBELASTIC_METADATA_URL", service.url)
        monkeypatch.setattr(notice_watcher, "REQUEST_LIMIT", 3600.0)
        poller = MetadataPoller(lambda _: None, interval=0.01)
        until(lambda: polls(service) > 1, "answers")
        release = threading.Event()
        monkeypatch.setattr(
            service, "answer", lambda *_: (asked.set(), release.wait(), (404, b""))[2]
        )
        assert asked.wait(60)
        poller.stop()
        until(lambda: not poller.running, "the thread has ended")
        release.set()


def test_proxies_are_bypassed(watch, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with metadata("google") as service:
        service.notice = b"TRUE"
        told = watch(service)
        until(lambda: told, "the notice")


# -- the agent -------------------------------------------------------------------------------------


class FakeLoop:
    """A loop whose timers wait for a test."""

    def __init__(self):
        self.timers = {}

    def call_later(self, delay, function, *args):
        self.timers[len(self.timers)] = (delay, lambda: function(*args))
        return len(self.timers) - 1

    def remove_timeout(self, timer):
        self.timers.pop(timer, None)

    def add_callback(self, function, *args):
        function(*args)


def test_the_end_of_a_batch_job_is_told_in_time_and_for_this_worker_alone(monkeypatch):
    now = 1700000000.0
    monkeypatch.setattr(notice_watcher, "time", SimpleNamespace(time=lambda: now))
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1700003600")
    loop, sent = FakeLoop(), []
    watcher = NoticeWatcher(loop, sent.append)
    watcher.heed(WatchOrder(on=True))
    watcher.heed(WatchOrder(on=True))
    ((delay, act),) = loop.timers.values()
    assert delay == 3600.0 - notice_watcher.BATCH_SECONDS
    now += delay
    act()
    assert sent == [NoticeReport(NoticeSource.SLURM, "end", 120.0, host=False)]
    watcher.heed(WatchOrder())
    assert not loop.timers


def test_a_batch_job_that_is_over_is_an_earlier_one(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1000")
    loop = FakeLoop()
    NoticeWatcher(loop, lambda _: None).heed(WatchOrder(on=True))
    assert not loop.timers


def test_an_agent_reports_a_notice_and_that_it_is_revoked(monkeypatch):
    sent = []
    monkeypatch.setattr(notice_watcher, "POLL_INTERVAL", 0.01)
    monkeypatch.setattr(MetadataPoller.__init__, "__defaults__", (0.01,))
    with metadata("aws") as service:
        monkeypatch.setenv("NBELASTIC_METADATA_URL", service.url)
        watcher = NoticeWatcher(FakeLoop(), sent.append)
        watcher.heed(WatchOrder(on=True, host=True))
        service.notice = aws_notice(120)
        until(lambda: sent, "the report")
        service.notice = None
        until(lambda: len(sent) > 1, "the second report")
        watcher.heed(WatchOrder())
        asyncio.run(watcher.stopped())
    assert [(each.host, each.revoked) for each in sent] == [(True, False), (True, True)]
    assert 100 < sent[0].seconds <= 120
    assert not [each for each in threading.enumerate() if each.name == "nbelastic-notices"]


def test_a_report_travels():
    report = NoticeReport(NoticeSource.AZURE, "Preempt", 12.5, host=True)
    assert unpack(pack(report)) == report


# -- the scheduler ---------------------------------------------------------------------------------


class Cloud(SharedCluster):
    """A made-up cluster whose machines go."""

    def __init__(self) -> None:
        super().__init__()
        self.retired = []
        self.watching = {}
        self.handlers["retire_workers"] = self._retire

    async def _retire(self, workers, **kwargs):
        assert kwargs == {"close_workers": True, "remove": True}
        self.retired.append(sorted(self.workers[each].name for each in workers))
        for address in workers:
            self.kill_worker(address)

    def worker_send(self, address, message):
        order = unpack(message["message"])
        if isinstance(order, WatchOrder):
            self.watching[address] = order
        super().worker_send(address, message)

    def report(self, address, **fields):
        fields = {"action": "terminate", "seconds": 120.0, "host": True, **fields}
        report = NoticeReport(NoticeSource.AWS, **fields)
        self.stream_handlers["nbelastic-agent"](worker=address, message=pack(report))

    def watchers(self):
        return {self.workers[each].name for each, order in self.watching.items() if order.host}


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
        cloud.plugin.jobs["one"].notices = False
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
        assert [type(each) for each in said if isinstance(each, NoticeGiven | NoticeRevoked)] == [
            NoticeGiven,
            NoticeRevoked,
        ]

    play(scene)


def test_at_the_end_of_the_time_workers_are_retired_whatever_their_ranks_do():
    async def scene(cloud):
        gone = cloud.hire("w0", "a")
        await cloud.open("one")
        await settle(cloud)
        cloud.report(gone, seconds=desk.MARGIN)
        cloud.step_all()
        assert cloud.held() == {"one": 1}
        await retired(cloud)
        assert cloud.retired == [["w0"]]

    play(scene)
