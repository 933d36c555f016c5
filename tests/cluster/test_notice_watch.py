"""Notices, as an agent reads them, asks for them, and reports them; and what else may answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import select
import signal
import socket
import threading
from email.utils import formatdate
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nbelastic.cluster.wire import NoticeReport, WatchOrder, pack, unpack
from nbelastic.cluster.worker import metadata_service, notice_watcher
from nbelastic.cluster.worker.metadata_service import MOST_BYTES, MetadataService
from nbelastic.cluster.worker.notice_watcher import (
    MOST_PROBES,
    POLL_INTERVAL,
    PROBE_LIMIT,
    REQUEST_LIMIT,
    MachineWatch,
    MetadataPoller,
    NoticeWatcher,
)
from nbelastic.cluster.worker.notices import (
    GOOGLE_SECONDS,
    SOURCES,
    Notice,
    Unanswered,
    batch_job_end,
    read_aws,
    read_azure,
    read_google,
    read_rebalance,
)
from nbelastic.membership import NoticeSource
from tests.support.clusters import until
from tests.support.metadata import (
    REBALANCE,
    ROLES,
    FakeMetadata,
    Machine,
    aws_notice,
    azure_events,
    metadata,
    notice_of,
)

CLOUDS = sorted(ROLES)
NOON = 1700000000.0

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
    assert read_rebalance(b'{"noticeTime": "2020-10-27T08:22:00Z"}').soft


def test_events_of_others_and_events_that_pass_are_none():
    assert read_azure(azure_events("vm-10"), "vm-1", 0.0) is None
    assert read_azure(azure_events("vm-1", kind="Freeze"), "vm-1", 0.0) is None
    assert read_azure(azure_events("vm-1", EventStatus="Canceled"), "vm-1", 0.0) is None
    assert read_azure(b'{"DocumentIncarnation": 7, "Events": []}', "vm-1", 0.0) is None


def test_names_of_machines_differ_in_case_only():
    assert read_azure(azure_events("VM-1"), "vm-1", 0.0) is not None


def test_a_text_is_no_list_of_machines():
    with pytest.raises(Unanswered):
        read_azure(azure_events("vm-1", Resources="vm-10"), "vm-1", 0.0)


@pytest.mark.parametrize("action", ["\x1b[2J", "stop\nnow", "<b>", "a" * 50, None, 7])
def test_an_action_that_is_no_word_is_not_shown(action):
    body = json.dumps({"action": action, "time": "2017-09-18T08:22:00Z"}).encode()
    assert read_aws(body).action == ""


@given(st.one_of(st.binary(max_size=40), st.sampled_from([b"null", b"[]", b"7", b'{"Events": 3}'])))
@example(b'{"Events": [{"EventType": "Preempt", "Resources": ["vm-1"], "NotBefore": "soon"}]}')
@example(b'{"Events": [{"EventType": [], "Resources": ["vm-1"]}]}')
@example(b'{"Events": [3]}')
@example(b'{"action": "stop", "time": "9999-99-99T00:00:00Z"}')
@example(b'{"action": "stop", "time": null}')
@example(b"[" * 5000)
def test_what_is_no_notice_says_nothing(body):
    for read in (
        read_aws,
        read_rebalance,
        lambda b: read_azure(b, "vm-1", 0.0),
        lambda b: read_google(b, 0.0),
    ):
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


# -- each cloud, by a script, in virtual time ------------------------------------------------------


def machine(cloud, *script):
    """Return a machine of a cloud with the script of its service, in seconds after noon."""
    service = FakeMetadata(cloud)
    return Machine(service, [(NOON + after, act) for after, act in script], NOON)


def given_at(after, seconds=120.0):
    """Return an entry of a script: the notice is given."""

    def give(service):
        service.notice = notice_of(service.cloud, seconds, NOON + after)

    return after, give


def change(after, **fields):
    return after, lambda service: service.__dict__.update(fields)


def verdicts(played):
    """Return what a watch has told: True for each notice, False for each that there is none."""
    return [notice is not None for _, notice, _ in played.told]


def spaced(played):
    """Return whether a service was asked at most once in five seconds, once it was found."""
    found = [at for at in played.requests if at > NOON + 2 * PROBE_LIMIT]
    return all(b - a >= POLL_INTERVAL for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("cloud", CLOUDS)
def test_no_notice_then_one(cloud):
    played = machine(cloud, given_at(61)).run(NOON + 90)
    assert verdicts(played) == [False, True]
    at, notice, soft = played.told[1]
    assert at <= NOON + 61 + (POLL_INTERVAL if cloud == "google" else 2 * POLL_INTERVAL)
    assert notice.deadline - at == pytest.approx(30 if cloud == "google" else 120, abs=11)
    assert soft is None
    assert spaced(played)


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_notice_that_is_revoked(cloud):
    played = machine(cloud, given_at(20), change(60, notice=None)).run(NOON + 120)
    assert verdicts(played) == [False, True, False]
    assert spaced(played)


@pytest.mark.parametrize("cloud", CLOUDS)
@pytest.mark.parametrize(
    "fault",
    [
        {"token": "second"},
        {"broken": 401},
        {"broken": 500},
        {"slow": REQUEST_LIMIT + 1},
        {"body": b"<html>log in</html>"},
        {"body": b"{"},
        {"body": b"\xff" * 100},
    ],
    ids=lambda fault: next(iter(fault)),
)
def test_what_goes_wrong_for_a_while_revokes_nothing(cloud, fault):
    """The fault comes after the notice, and is over after a minute: then it is revoked."""
    over = {"broken": 0, "slow": 0.0, "body": None}
    script = [given_at(10), change(40, **fault), change(100, **over), change(160, notice=None)]
    played = machine(cloud, *script).run(NOON + 240)
    assert verdicts(played) == [False, True, False]
    assert played.told[-1][0] >= NOON + 160
    assert spaced(played)


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_service_that_falls_silent_revokes_nothing(cloud):
    played = machine(cloud, given_at(10)).run(NOON + 60)
    played.dead = True
    assert verdicts(played.run(NOON + 600)) == [False, True]
    assert spaced(played)


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_slow_service_is_heard(cloud):
    played = machine(cloud, change(1, slow=REQUEST_LIMIT - 0.1), given_at(10)).run(NOON + 60)
    assert verdicts(played) == [False, True]


@pytest.mark.parametrize("cloud", CLOUDS)
def test_under_one_request_in_five_seconds_a_host(cloud):
    hour = 3600
    played = machine(cloud, given_at(hour / 2)).run(NOON + hour)
    probes = len(SOURCES)
    assert len(played.requests) <= hour / POLL_INTERVAL + probes
    assert spaced(played)
    if cloud == "google":
        assert len(played.requests) <= hour / 60 + probes, "it holds its answers back"


def test_a_token_that_has_expired_is_replaced():
    played = machine("aws", change(30, token="second"), given_at(31)).run(NOON + 60)
    assert verdicts(played) == [False, True]
    paths = [path for path, _ in played.service.asked]
    assert paths.count("/latest/api/token") == 2


def test_a_recommendation_is_soft_and_asked_for_now_and_then():
    played = machine("aws", change(20, advice=b'{"noticeTime": "2020-10-27T08:22:00Z"}'))
    played.run(NOON + 300)
    assert [soft is not None for _, _, soft in played.told] == [False, True]
    asked = [path for path, _ in played.service.asked]
    assert asked.count(ROLES["aws"]) > 4 * asked.count(REBALANCE) > 0


def test_recommendations_that_cannot_be_had_hide_no_notice():
    class NoAdvice(FakeMetadata):
        def _answer(self, method, path, headers):
            return (500, b"") if path == REBALANCE else super()._answer(method, path, headers)

    played = Machine(NoAdvice("aws"), [(NOON + 61, given_at(61)[1])], NOON).run(NOON + 120)
    assert verdicts(played) == [False, True]


def test_a_notice_comes_nearer_but_not_later():
    def events(before):
        return azure_events("vm-1", before=formatdate(NOON + before, usegmt=True))

    script = [change(1, notice=events(900)), change(60, notice=events(1900))]
    script.append(change(120, notice=events(150)))
    played = machine("azure", *script).run(NOON + 180)
    assert [notice.deadline - NOON for _, notice, _ in played.told] == [900, 150]


@pytest.mark.parametrize("cloud", ["aws", "azure"])
@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_the_clock_of_a_machine_may_be_wrong(cloud, ahead):
    """What counts is how far a notice is ahead of the time of the answer that has it."""
    played = machine(cloud)
    for moment in range(0, 60, 5):
        played.service.clock = NOON + moment + ahead
        if moment == 20:
            played.service.notice = notice_of(cloud, 120.0, NOON + moment + ahead)
        played.run(NOON + moment)
    at, notice, _ = played.told[-1]
    assert notice.deadline - at == pytest.approx(120, abs=11)


@pytest.mark.parametrize("cloud", ["aws", "azure"])
def test_a_notice_of_the_past_is_due_now_and_one_of_next_year_none(cloud):
    past = machine(cloud, given_at(10, seconds=-500)).run(NOON + 60)
    assert past.told[-1][1].deadline < NOON
    assert verdicts(machine(cloud, given_at(10, seconds=3e7)).run(NOON + 60)) == [False]


# -- finding the service ---------------------------------------------------------------------------


def ask_of(service):
    """Return a function that asks a service at once."""

    def ask(method, path, headers, *, hold=0.0):
        lower = {name.lower(): value for name, value in headers.items()}
        return metadata_service.Answer(*service.answer(method, path, lower))

    return ask


@pytest.mark.parametrize("cloud", CLOUDS)
def test_each_cloud_is_taken_for_itself_alone(cloud):
    found = [kind.source.value for kind in SOURCES if kind().found(ask_of(FakeMetadata(cloud)))]
    assert found == [cloud]


@pytest.mark.parametrize(
    "body",
    [b"<!DOCTYPE html><p>log in</p>", b"", b"caf\xc3\xa9 \xff", b"a b", b"x\r\ny: z", b"x" * 5000],
)
def test_a_page_that_answers_everything_is_no_cloud(body):
    """Its text must not be sent as a token either, which a header may not hold."""
    played = machine("aws")
    played.service.body = body
    played.run(NOON + 60)
    assert played.told == []
    assert played.next is None, "it is not looked for any more"


def test_what_swallows_all_packets_is_waited_for_once_and_not_for_long():
    played = machine("aws")
    played.dead = True
    played.run(NOON + 60)
    assert played.requests == []
    assert played.next is None


def test_all_that_is_asked_to_find_a_service_takes_the_limit_in_all():
    """Something takes connections and never answers: what listens there may be starting."""
    played = machine("aws")
    played.service.slow = 3600.0
    played.watch.step()
    assert played.now - NOON == pytest.approx(PROBE_LIMIT)
    assert len(played.requests) == 1, "the others had no time left"
    probes = 1
    while played.watch.step():
        probes += 1
    assert probes + 1 == MOST_PROBES


@pytest.mark.parametrize("seconds", [0.5, 1.0, 1.5])
def test_a_service_that_always_takes_longer_than_the_first_limit_is_found(seconds):
    played = machine("aws", given_at(70))
    played.service.slow = seconds
    played.run(NOON + 100)
    assert verdicts(played) == [False, True]


def test_a_service_that_was_slow_to_start_is_found():
    played = machine("google", change(3, slow=0.0), given_at(60))
    played.service.slow = 1.0
    assert verdicts(played.run(NOON + 120)) == [False, True]


# -- connections -----------------------------------------------------------------------------------


@contextlib.contextmanager
def answering(write, family=socket.AF_INET):
    """Listen on loopback, and have ``write(connection)`` answer each request."""
    listener = socket.create_server(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0),
                                    family=family)  # fmt: skip
    stopped = threading.Event()

    def serve():
        while not stopped.is_set():
            ready, _, _ = select.select([listener], [], [], 0.01)
            if ready:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.recv(4096)
                    write(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[:2]
    finally:
        stopped.set()
        thread.join()
        listener.close()


def get(address, seconds=30.0):
    return MetadataService().ask(address, "GET", "/", {}, seconds)


def drip(start, chunk):
    def write(connection):
        connection.sendall(start)
        while True:
            connection.sendall(chunk)
            connection.settimeout(0.005)
            with contextlib.suppress(TimeoutError):
                if not connection.recv(1):
                    return  # the asker has had enough

    return write


@pytest.mark.parametrize(
    ("start", "chunk"),
    [
        (b"", b"H"),
        (b"HTTP/1.1 200 OK\r\n", b"a: b\r\n"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"x"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["status", "headers", "body", "continue"],
)
def test_an_answer_that_never_ends_is_given_up(start, chunk):
    """Each byte comes soon after the last one: only a limit on all of it helps."""
    with answering(drip(start, chunk)) as address, pytest.raises(OSError, match="timed out"):
        get(address, seconds=0.3)


def test_a_huge_answer_is_cut():
    def write(connection):
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n")
        for _ in range(64):
            connection.sendall(b"x" * MOST_BYTES)

    with answering(write) as address:
        assert len(get(address).body) == MOST_BYTES


@pytest.mark.parametrize(
    "text",
    [b"", b"\0" * 100, b"HTTP/1.1 2000 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
     b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"],
)  # fmt: skip
def test_what_is_no_answer_is_none(text):
    with answering(lambda connection: connection.sendall(text)) as address:
        try:
            assert get(address).body == b""
        except OSError:
            pass


def test_a_redirection_is_not_followed():
    followed = []
    with answering(lambda _: followed.append(1)) as other:
        place = f"http://{other[0]}:{other[1]}/".encode()
        text = b"HTTP/1.1 302 Found\r\nLocation: " + place + b"\r\nContent-Length: 0\r\n\r\n"
        with answering(lambda connection: connection.sendall(text)) as address:
            answer = get(address)
            assert answer.status == 302
            assert not SOURCES[0]().found(lambda *_: answer)
    assert not followed


def test_headers_that_cannot_be_sent_are_an_error_without_their_text():
    with (
        answering(lambda _: None) as address,
        pytest.raises(OSError, match="not an answer") as caught,
    ):
        MetadataService().ask(address, "GET", "/", {"token": "se\ncret"}, 30.0)
    assert "cret" not in repr(caught.value)
    assert caught.value.__cause__ is None


def test_the_first_address_that_takes_a_connection_is_the_one():
    with answering(lambda _: None) as address:
        service = MetadataService()
        service.addresses = (("127.0.0.1", 9), address)
        assert service.reach(30.0) == address
        service.addresses = (("127.0.0.1", 9), ("::1", 9))
        assert service.reach(30.0) is None


def test_a_machine_with_the_other_kind_of_addresses_only():
    try:
        there = answering(lambda _: None, socket.AF_INET6)
        address = there.__enter__()
    except OSError:
        pytest.skip("this machine has no IPv6")
    try:
        service = MetadataService()
        service.addresses = (("127.0.0.1", 9), address)
        assert service.reach(30.0) == address
    finally:
        there.__exit__(None, None, None)


def test_an_address_that_swallows_packets_is_given_up(monkeypatch):
    """A connection that is never made, as a socket looks that can never be written to."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(b"x" * 65536)
    monkeypatch.setattr(
        metadata_service, "_begin", lambda selector, at: selector.register(ours, 2, at)
    )
    service = MetadataService()
    service.addresses = (("169.254.169.254", 80),)
    assert service.reach(0.05) is None
    assert ours.fileno() == -1, "it was closed"
    theirs.close()


@pytest.mark.parametrize("url", ["http://127.0.0.1:x", "http://[::1", "nothing"])
def test_a_wrong_address_for_tests_finds_nothing(monkeypatch, url):
    monkeypatch.setenv("NBELASTIC_METADATA_URL", url)
    assert MetadataService().reach(0.05) is None


# -- the thread ------------------------------------------------------------------------------------


@pytest.fixture
def watch(monkeypatch):
    """Return a function that watches a made-up service, and what it was told."""
    pollers = []

    def start(service):
        told = []
        monkeypatch.setenv("NBELASTIC_METADATA_URL", service.url)
        monkeypatch.setattr(notice_watcher, "PROBE_LIMIT", 30.0)
        pollers.append(MetadataPoller(lambda *each: told.append(each), interval=0.01))
        return told

    yield start
    for poller in pollers:
        poller.stop()
        until(lambda poller=poller: not poller.running, "the thread has ended")


def polls(service: FakeMetadata) -> int:
    return sum(path == ROLES[service.cloud] for path, _ in service.asked)


@pytest.mark.parametrize("cloud", CLOUDS)
def test_each_cloud_is_asked_over_a_connection(watch, cloud):
    with metadata(cloud) as service:
        told = watch(service)
        until(lambda: told, "the first answer")
        service.notice = notice_of(cloud, 120.0, NOON)
        until(lambda: len(told) > 1, "the notice")
        service.notice = None
        until(lambda: len(told) > 2, "that it is revoked")
    assert [notice is not None for _, notice, _ in told] == [False, True, False]


def test_a_machine_without_a_service_is_not_asked_again(monkeypatch):
    monkeypatch.setenv("NBELASTIC_METADATA_URL", "http://127.0.0.1:9")
    poller = MetadataPoller(lambda *_: None, interval=0.01)
    until(lambda: not poller.running, "the thread has ended")


def test_a_thread_ends_in_the_middle_of_a_request(monkeypatch):
    asked, release = threading.Event(), threading.Event()
    with metadata("aws") as service:
        monkeypatch.setenv("NBELASTIC_METADATA_URL", service.url)
        monkeypatch.setattr(notice_watcher, "PROBE_LIMIT", 30.0)
        monkeypatch.setattr(notice_watcher, "REQUEST_LIMIT", 3600.0)
        poller = MetadataPoller(lambda *_: None, interval=0.01)
        until(lambda: polls(service) > 1, "answers")
        monkeypatch.setattr(
            service, "answer", lambda *_: (asked.set(), release.wait(), (404, {}, b""))[2]
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
        until(lambda: told and told[0][1], "the notice")


def test_an_answer_that_nobody_expects_does_not_end_the_watch(watch, monkeypatch, caplog):
    step, raised = MachineWatch.step, []

    def stumble(self):
        if len(raised) < 2:
            raised.append(1)
            raise RuntimeError("of a kind that was not thought of")
        return step(self)

    monkeypatch.setattr(MachineWatch, "step", stumble)
    with metadata("aws") as service, caplog.at_level(logging.CRITICAL + 1):
        told = watch(service)
        until(lambda: told, "an answer")


def test_no_token_is_written_to_a_log(caplog):
    secrets = ["AQAEAsecret1==", "AQAEAsecret2=="]
    with caplog.at_level(logging.DEBUG):
        played = machine(
            "aws",
            change(20, token=secrets[1]),
            change(40, body=b"garbage"),
            change(60, body=None, broken=500),
            given_at(50),
        )
        played.service.token = secrets[0]
        played.run(NOON + 90)
    assert "no answer about notices" in caplog.text
    assert not any(secret in caplog.text for secret in secrets)


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
    watcher = NoticeWatcher(loop, lambda _: None)
    watcher.heed(WatchOrder(on=True))
    assert not loop.timers
    watcher.close()


def test_an_agent_reports_all_that_it_knows_of_its_host(monkeypatch):
    """Also that there is no notice: the agent that watched before may have reported one."""
    sent = []
    monkeypatch.setattr(MetadataPoller.__init__, "__defaults__", (0.01,))
    monkeypatch.setattr(notice_watcher, "PROBE_LIMIT", 30.0)
    with metadata("aws") as service:
        monkeypatch.setenv("NBELASTIC_METADATA_URL", service.url)
        watcher = NoticeWatcher(FakeLoop(), sent.append)
        watcher.heed(WatchOrder(on=True, host=True))
        until(lambda: len(sent) >= 2, "the first reports")
        service.advice = b'{"noticeTime": "2020-10-27T08:22:00Z"}'
        until(lambda: len(sent) >= 4, "the recommendation")
        service.notice = aws_notice(120)
        until(lambda: len(sent) >= 6, "the notice")
        watcher.close()
        watcher.heed(WatchOrder(on=True, host=True))
        asyncio.run(watcher.stopped())
    assert all(each.host for each in sent)
    assert [(each.soft, each.revoked) for each in sent[:6]] == [
        (True, True),
        (False, True),
        (True, False),
        (False, True),
        (True, True),
        (False, False),
    ]
    assert 0 < sent[5].seconds <= 120
    assert not [each for each in threading.enumerate() if each.name == "nbelastic-notices"]


def test_a_report_travels():
    report = NoticeReport(NoticeSource.AZURE, "Preempt", 12.5, host=True)
    assert unpack(pack(report)) == report


def test_a_signal_is_a_notice_of_this_worker(monkeypatch):
    sent, shielded = [], []
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    watcher = NoticeWatcher(FakeLoop(), sent.append, shielded.append)
    watcher.heed(WatchOrder(on=True))
    os.kill(os.getpid(), signal.SIGUSR1)
    until(lambda: sent, "the report")
    watcher.close()
    assert sent == [NoticeReport(NoticeSource.SIGNAL, "SIGUSR1", 60.0, host=False)]
    assert shielded == [True, False]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_signal_shortly_before_the_end_of_a_batch_job(monkeypatch):
    now = 1700000000.0
    monkeypatch.setattr(notice_watcher, "time", SimpleNamespace(time=lambda: now))
    sent = []
    watcher = NoticeWatcher(FakeLoop(), sent.append)
    for end in (now + 30, now + 3600, now - 10):
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(end))
        watcher._signalled("SIGUSR2")
    assert [each.seconds for each in sent] == [30.0, 60.0, 60.0]
