"""Notices: read from any bytes, watched for in virtual time, asked for, and reported."""

import contextlib
import logging
import threading
from email.utils import formatdate
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from nbelastic.cluster.worker import notices as watch
from nbelastic.messages import Notice, NoticeSource, WatchOrder
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

from .test_reachability import listening

PATHS = {**ROLES, "rebalance": REBALANCE}
NOON = 1700000000.0

# -- reading ---------------------------------------------------------------------------------------


def read(what, body, now=NOON):
    """Return the notices in an answer of ROLES' path, or REBALANCE."""

    def ask(_, path, __):
        known = path.startswith(PATHS[what])
        headers = {"date": formatdate(now, usegmt=True), "metadata-flavor": "Google"}
        return watch.Answer(200 if known else 404, headers, body)

    cloud = "aws" if what == "rebalance" else what
    (asked,) = (each for each in watch.CLOUDS if each.source.name.lower() == cloud)
    return asked.poll(ask, "vm-1")


STOP = b'{"action": "stop", "time": "2017-09-18T08:22:00Z"}'
AT_STOP = 1505722920.0
ODD_BODIES = [
    b"",
    b"null",
    b"[" * 5000,
    b"<!DOCTYPE html><p>log in</p>",
    b"caf\xc3\xa9 \xff",
    b"x\r\ny: z",
    b'{"Events": [{"EventType": []}]}',
    azure_events("vm-1", before="soon"),
    b'{"action": "stop", "time": "9999-99-99T00:00:00Z"}',
    aws_notice(3e7, now=NOON),
]


@pytest.mark.parametrize(
    ("what", "body", "now", "found"),
    [
        ("aws", STOP, AT_STOP - 120, ("stop", 120.0)),
        ("aws", STOP, AT_STOP + 500, ("stop", 0.0)),
        *(
            ("aws", STOP.replace(b'"stop"', action), AT_STOP, ("", 0.0))  # no word to show
            for action in (
                b'"\\u001b[2J"',
                b'"stop\\nnow"',
                b'"<b>"',
                b'"%050d"' % 0,
                b"null",
                b"7",
            )
        ),
        ("rebalance", b'{"noticeTime": "2020-10-27T08:22:00Z"}', NOON, ("rebalance", 0.0)),
        ("google", b"TRUE\n", NOON, ("preempt", 30.0)),
        ("google", b"FALSE", NOON, ()),
        (
            *("azure", azure_events("vm-0", "VM-1", before="Mon, 19 Sep 2016 18:29:47 GMT")),
            *(1474309787.0 - 60, ("Preempt", 60.0)),
        ),
        ("azure", azure_events("vm-1", kind="Terminate"), 5.0, ("Terminate", 0.0)),
        ("azure", azure_events("vm-10"), NOON, ()),
        ("azure", azure_events("vm-1", kind="Freeze"), NOON, ()),
        ("azure", azure_events("vm-1", EventStatus="Canceled"), NOON, ()),
    ],
)
def test_what_a_cloud_writes_is_read_and_no_other_bytes_are(what, body, now, found):
    notices = [(each.action, each.seconds) for each in read(what, body, now)]
    assert notices == [found] * bool(found)
    for odd in ODD_BODIES:
        with pytest.raises(OSError, match="no notice"):
            read(what, odd)


@pytest.mark.parametrize(
    ("environ", "end"),
    [
        ({}, None),
        ({"SLURM_JOB_END_TIME": "1700000600"}, (NoticeSource.SLURM, 1700000600.0)),
        ({"PBS_WALLTIME": "3600"}, (NoticeSource.PBS, 1700003600.0)),
        ({"PBS_WALLTIME": "-1", "SLURM_JOB_END_TIME": "nan"}, None),
        ({"SLURM_JOB_END_TIME": "UNLIMITED"}, None),
    ],
)
def test_a_batch_job_has_an_end(environ, end):
    assert watch.batch_job_end(environ, started=NOON) == end


@pytest.mark.parametrize(
    "body", [b"", ODD_BODIES[4], b"caf\xc3\xa9", b"a b", b"x\r\ny", b"x" * 5000]
)
def test_a_page_that_answers_everything_is_no_cloud(body):
    """Its text must not be sent as a token either, which a header may not hold."""
    played = machine("aws")
    played.service.body = body
    played.run(NOON + 60)
    assert played.told == []
    assert played.next is None, "it is not looked for any more"


# -- a story of each cloud, in virtual time --------------------------------------------------------


def machine(service, *script):
    """Return a machine of a cloud with the script of its service, in seconds after noon."""
    service = FakeMetadata(service) if isinstance(service, str) else service
    return Machine(service, [(NOON + after, act) for after, act in script], NOON)


def given_at(after, seconds=120.0):
    """Return an entry of a script: the notice is given."""

    def give(service):
        service.notice = notice_of(service.cloud, seconds, NOON + after + service.skew)

    return after, give


def change(after, **fields):
    return after, lambda service: service.__dict__.update(fields)


def verdicts(played):
    """Return what a watch has told: True for each notice, False for each that there is none."""
    return [not notice.revoked for _, _, notice in played.told]


@pytest.mark.parametrize("skew", [-3600.0, 3600.0])
@pytest.mark.parametrize("cloud", ROLES)
def test_a_machine_goes_through_all_kinds_of_trouble(cloud, skew):
    """A slow start, a notice, errors and silence, which revoke nothing; then it is revoked.

    Its deadline only comes nearer.
    """
    trouble = [{"broken": status} for status in (302, 401, 500)]
    bodies = [*ODD_BODIES[:-1], b"FALSE"]
    trouble += [{"slow": watch.REQUEST_LIMIT_S + 1}, *({"body": body} for body in bodies)]
    over = {"broken": 0, "slow": 0.0, "body": None}
    script = [change(0, slow=watch.REQUEST_LIMIT_S + 1, skew=skew), change(12, **over)]
    script += [given_at(60), given_at(75, 900.0), change(90, token="second"), given_at(100, 40.0)]
    for number, fault in enumerate(trouble):
        script += [change(120 + 60 * number, **fault), change(150 + 60 * number, **over)]
    end = 160 + 60 * len(trouble)
    script.append(change(end, notice=None))
    played = machine(cloud, *script).run(NOON + end + 40)
    assert verdicts(played) == [False, True, *([True] * (cloud != "google")), False]
    at, risk, notice = played.told[1]
    assert at <= NOON + 60 + 2 * watch.POLL_INTERVAL
    assert notice.seconds == pytest.approx(30 if cloud == "google" else 120, abs=11)
    assert cloud == "google" or played.told[2][2].seconds == pytest.approx(40, abs=11)
    assert risk.revoked


def test_a_recommendation_of_aws_is_soft_and_one_that_cannot_be_read_hides_no_notice():
    played = machine("aws", change(20, advice=b'{"noticeTime": "2020-10-27T08:22:00Z"}'))
    played.run(NOON + 60)
    assert [not risk.revoked for _, risk, _ in played.told] == [False, True]

    class NoAdvice(FakeMetadata):
        def _answer(self, method, path, headers):
            return (500, b"") if path == REBALANCE else super()._answer(method, path, headers)

    assert verdicts(machine(NoAdvice("aws"), given_at(61)).run(NOON + 120)) == [True]


def test_what_takes_connections_and_never_answers_is_looked_at_some_times():
    played = machine("aws")
    played.service.slow = 3600.0
    played.run(NOON + 3600)
    assert len(played.requests) == 3 * watch.MOST_PROBES
    played = machine("aws")
    played.dead = True
    played.run(NOON + 60)
    assert (played.requests, played.next) == ([], None)


def test_no_token_is_written_to_a_log(caplog):
    secrets = ["AQAEAsecret1==", "AQAEAsecret2=="]
    trouble = [change(20, token=secrets[1]), change(40, body=b"garbage")]
    with caplog.at_level(logging.DEBUG):
        played = machine("aws", *trouble, change(60, body=None, broken=500), given_at(50))
        played.service.token = secrets[0]
        played.run(NOON + 90)
    assert "no answer about notices" in caplog.text
    assert not any(secret in caplog.text for secret in secrets)


# -- connections -----------------------------------------------------------------------------------


@contextlib.contextmanager
def answering(write):
    """Listen on loopback, and have ``write(connection)`` answer each request."""

    def answer(connection):
        with connection, contextlib.suppress(OSError):
            connection.recv(4096)
            write(connection)

    with listening(answer) as address:
        yield address.replace("tcp", "http")


OK = b"HTTP/1.1 200 OK\r\n"
ODD_TEXTS = [
    b"",
    b"HTTP/1.1 2000 OK\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.6\r\n",
    OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n",
]


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_any_bytes_are_no_answer_and_what_redirects_is_not_followed(text):
    with answering(lambda connection: connection.sendall(text)) as url:
        if b"Found" in text:
            assert watch.ask_service(url, "GET", "/", {}).status == 302
        else:
            with pytest.raises(OSError):  # noqa: PT011 - of any kind
                watch.ask_service(url, "GET", "/", {})


def test_a_huge_answer_is_cut_and_a_silent_service_given_up(monkeypatch):
    def write(connection):
        connection.sendall(OK + b"Content-Length: 99999999999\r\n\r\n")
        for _ in range(64):
            connection.sendall(b"x" * watch.MOST_BYTES)

    with answering(write) as url:
        assert len(watch.ask_service(url, "GET", "/", {}).body) == watch.MOST_BYTES
    monkeypatch.setattr(watch, "REQUEST_LIMIT_S", 0.05)
    over = threading.Event()
    with answering(lambda _: over.wait(60)) as url:
        with pytest.raises(OSError, match="timed out"):
            watch.ask_service(url, "GET", "/", {})
        over.set()


def test_headers_that_cannot_be_sent_are_an_error_without_their_text():
    with answering(lambda _: None) as url, pytest.raises(OSError, match="not an answer") as caught:
        watch.ask_service(url, "GET", "/", {"token": "se\ncret"})
    assert "cret" not in repr(caught.value)
    assert caught.value.__cause__ is None


def test_the_first_address_that_takes_a_connection_is_the_one(monkeypatch):
    with answering(lambda _: None) as url:
        monkeypatch.setenv("NBELASTIC_METADATA_URL", url)
        assert watch.find_service() == url
    for wrong in ("http://127.0.0.1:9", "http://127.0.0.1:x", "http://[::1", "nothing"):
        monkeypatch.setenv("NBELASTIC_METADATA_URL", wrong)
        assert watch.find_service() is None


# -- the agent -------------------------------------------------------------------------------------


def a_loop():
    """Return a loop whose timers wait for a test."""
    return Mock(add_callback=lambda function, *args: function(*args))


def test_the_end_of_a_batch_job_is_told_in_time_and_for_this_worker_alone(monkeypatch):
    now = 1700000000.0
    monkeypatch.setattr(watch, "time", SimpleNamespace(time=lambda: now))
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1700003600")
    loop, sent = a_loop(), []
    watcher = watch.NoticeWatcher(loop, sent.append)
    for _ in range(2):
        watcher.apply(WatchOrder(on=True))
    loop.call_later.assert_called_once()
    delay, act, *end = loop.call_later.call_args.args
    assert delay == 3600.0 - watch.BATCH_SECONDS
    now += delay
    act(*end)
    assert sent == [Notice(NoticeSource.SLURM, "end", 120.0)]
    watcher.close()
    loop.remove_timeout.assert_called_once_with(loop.call_later.return_value)
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1000")  # of an earlier job
    watcher = watch.NoticeWatcher(loop, sent.append)
    watcher.apply(WatchOrder(on=True))
    watcher.close()
    loop.call_later.assert_called_once()


def test_an_agent_reports_all_that_it_knows_of_its_host(monkeypatch):
    """Also that there is no notice: the agent that watched before may have reported one.

    No proxy is asked.
    """
    sent = []
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(watch, "POLL_INTERVAL", 0.01)
    with metadata("aws") as service:
        monkeypatch.setenv("NBELASTIC_METADATA_URL", service.url)
        watcher = watch.NoticeWatcher(a_loop(), sent.append)
        watcher.apply(WatchOrder(on=True, host=True))
        until(lambda: len(sent) >= 2, "the first reports")
        service.notice = aws_notice(120)
        until(lambda: len(sent) >= 4, "the notice")
        watcher.close()
        watcher.apply(WatchOrder(on=True, host=True))
    assert all(each.host for each in sent)
    found = [(each.soft, each.revoked) for each in sent]
    assert found == [(True, True), (False, True), (True, True), (False, False)]
    assert 0 < sent[3].seconds <= 120
    until(lambda: "nbelastic-notices" not in [t.name for t in threading.enumerate()], "its end")
