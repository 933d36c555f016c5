"""The door on which ranks of one host meet, and strangers knock."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from nbelastic.collectives import Rendezvous, host
from nbelastic.collectives.host import GREETING, MAGIC, REQUEST, Door, NotFormed
from tests.collectives.worlds import BIND, PATIENCE_S, eventually, needs_core

pytestmark = needs_core

SECRET = b"known to the job"
SOON_S = 5.0
"""Bounded: half as long as forming may take."""


def terms(**changes):
    its = {"job": "a", "generation": 1, "rank": 0, "size": 3, "secret": SECRET}
    where = {"store": ("", 0), "bind": BIND, "timeout_s": PATIENCE_S}
    return Rendezvous(**{**its, **where, **changes})


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4, thread_name_prefix="rank") as pool:
        yield pool


@pytest.fixture(autouse=True)
def _nothing_is_left():
    threads, before = threading.active_count(), descriptors()
    yield
    eventually(lambda: descriptors() <= before, "the end of all sockets and segments")
    eventually(lambda: threading.active_count() <= threads, "the end of all threads")


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def doors():
    with Door(terms()) as first, Door(terms(rank=1)) as second, Door(terms(rank=2)) as third:
        yield [first, second, third]


def share(share):
    """Check that all have one segment, and let go of it."""
    for each in share:
        each.watch()
    with ThreadPoolExecutor(len(share)) as pool:
        begun = [(each.group, each.group.barrier_async()) for each in share]
        for waiting in [pool.submit(group.wait, ticket) for group, ticket in begun]:
            waiting.result(PATIENCE_S)
    for each in share:
        each.drop()


def knock(door):
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(PATIENCE_S)
    connection.connect(f"\0{door.name}")
    magic, challenge = GREETING.unpack(connection.recv(GREETING.size))
    assert magic == MAGIC
    return connection, challenge


def ask(door, rank, secret=SECRET, **changes):
    """Knock, and ask for the segment."""
    connection, challenge = knock(door)
    nonce = bytes(16)
    said = host._request(terms(secret=secret, **changes), door.name, challenge, rank, nonce)
    connection.sendall(REQUEST.pack(rank, nonce, said))
    return connection


def turned_away(connection):
    with connection:
        try:
            return connection.recv(100) == b""
        except ConnectionResetError:
            return True


def test_the_ranks_of_a_host_share_a_segment(doors, threads):
    first = threads.submit(doors[0].receive, 3)
    others = [threads.submit(doors[rank].visit, doors[0].name, rank, 3) for rank in (2, 1)]
    share([each.result(PATIENCE_S) for each in (first, *reversed(others))])


def test_strangers_are_turned_away_and_keep_nobody_waiting(doors, threads):
    first = threads.submit(doors[0].receive, 3)
    silent, _ = knock(doors[0])
    halfway, _ = knock(doors[0])
    halfway.sendall(b"x" * (REQUEST.size - 1))
    for wrong in (
        ask(doors[0], 1, secret=b"guess"),
        ask(doors[0], 1, generation=2),
        ask(doors[0], 0),
        ask(doors[0], 3),
        ask(doors[0], 1 << 31),
    ):
        assert turned_away(wrong)
    gone, _ = knock(doors[0])
    gone.close()
    nonsense, _ = knock(doors[0])
    nonsense.sendall(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n" * 3)
    assert turned_away(nonsense)
    second = doors[1].visit(doors[0].name, 1, 3)
    assert turned_away(ask(doors[0], 1)), "rank 1 has come"
    third = doors[2].visit(doors[0].name, 2, 3)
    share([first.result(PATIENCE_S), second, third])
    assert turned_away(silent)
    assert turned_away(halfway)


def test_another_user_is_turned_away(doors, threads, monkeypatch):
    monkeypatch.setattr(host.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(NotFormed, match="another user"):
        doors[1].visit(doors[0].name, 1, 3)
    first = threads.submit(doors[0].receive, 3)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(PATIENCE_S)
        stranger.connect(f"\0{doors[0].name}")
        assert stranger.recv(100) == b""
    doors[0].shut()
    assert isinstance(first.exception(SOON_S), NotFormed)


@pytest.mark.parametrize(
    "answer", [b"", b"nbh9" + bytes(16), MAGIC + bytes(16), MAGIC + bytes(16) + b"x" * 32]
)
def test_a_host_that_is_none_of_the_job_gives_no_segment(doors, threads, answer):
    with socket.socket(socket.AF_UNIX) as impostor:
        impostor.bind("\0nbelastic-test-impostor")
        impostor.listen()
        visiting = threads.submit(doors[1].visit, "nbelastic-test-impostor", 1, 3)
        connection, _ = impostor.accept()
        with connection:
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
            assert isinstance(visiting.exception(PATIENCE_S), NotFormed)


def test_what_an_impostor_hands_over_is_closed(doors, threads):
    with socket.socket(socket.AF_UNIX) as impostor:
        impostor.bind("\0nbelastic-test-impostor")
        impostor.listen()
        visiting = threads.submit(doors[1].visit, "nbelastic-test-impostor", 1, 3)
        connection, _ = impostor.accept()
        with connection:
            connection.sendall(MAGIC + bytes(16))
            connection.recv(100)
            socket.send_fds(connection, [b"x" * 32], [0])
            assert "does not belong" in str(visiting.exception(PATIENCE_S))


def test_what_is_handed_over_must_be_a_segment(doors, threads, monkeypatch):
    with open(os.devnull, "rb") as file:
        monkeypatch.setattr(host.core, "Group", _refuse_after(1, host.core.Group))
        first = threads.submit(doors[0].receive, 3)
        assert file.fileno() > 0
        with pytest.raises(NotFormed, match="no segment"):
            doors[1].visit(doors[0].name, 1, 3)
    assert "in place 1 of its host is gone" in str(first.exception(PATIENCE_S))


def _refuse_after(count, true):
    made = []

    def group(*arguments):
        made.append(arguments)
        if len(made) > count:
            raise ValueError("no segment")
        return true(*arguments)

    return group


def test_one_who_does_not_come_is_waited_for_a_while_only(doors, threads, monkeypatch):
    monkeypatch.setattr(host, "FORMING_LIMIT_S", 0.3)
    first = threads.submit(doors[0].receive, 3)
    second = doors[1].visit(doors[0].name, 1, 3)
    assert "1 of its host did not come" in str(first.exception(PATIENCE_S))
    second.drop()


def test_one_who_has_come_and_is_gone_is_noticed(doors, threads):
    first = threads.submit(doors[0].receive, 3)
    doors[1].visit(doors[0].name, 1, 3).drop()
    assert "in place 1 of its host is gone" in str(first.exception(PATIENCE_S))


def test_a_host_that_is_gone_is_noticed(doors, threads):
    visiting = threads.submit(doors[1].visit, doors[0].name, 1, 3)
    doors[0].__exit__()
    assert isinstance(visiting.exception(PATIENCE_S), NotFormed)
    with pytest.raises(NotFormed, match="refused"):
        doors[2].visit(doors[0].name, 2, 3)


def test_shutting_the_door_frees_who_waits(doors, threads):
    visiting = threads.submit(doors[1].visit, doors[0].name, 1, 3)
    eventually(lambda: len(doors[1]._sockets) == 2, "the visit")
    doors[1].shut()
    assert isinstance(visiting.exception(SOON_S), NotFormed)
    receiving = threads.submit(doors[0].receive, 3)
    assert not receiving.done()
    doors[0].shut()
    assert isinstance(receiving.exception(SOON_S), NotFormed)
    for late in (lambda: doors[0].receive(3), lambda: doors[1].visit(doors[2].name, 1, 3)):
        with pytest.raises(NotFormed):
            late()
