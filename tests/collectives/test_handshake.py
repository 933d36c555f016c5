"""The socket at which ranks of one host share a segment, and strangers connect."""

import contextlib
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest

from nbelastic.collectives.rendezvous.handshake import LENGTH, MAGIC, PROOF_BYTES
from nbelastic.collectives.shm import handshake
from nbelastic.collectives.shm.handshake import SegmentError, SegmentSocket
from nbelastic.native import core
from tests.collectives.clients import SECRET, approach, messages, turned_away
from tests.collectives.worlds import PATIENCE_S, descriptors, eventually, needs_core, terms

pytestmark = needs_core

SOON_S = 5.0  # bounded: half as long as forming may take


its = partial(terms, size=3, generation=1, secret=SECRET, timeout_s=PATIENCE_S)


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


@pytest.fixture
def sockets():
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(SegmentSocket(its(rank=rank))) for rank in range(3)]


def share(share):
    """Check that all have one segment, and let go of it."""
    with ThreadPoolExecutor(len(share)) as pool:
        begun = [(group, group.barrier_async()) for group in share]
        for waiting in [pool.submit(group.wait, ticket) for group, ticket in begun]:
            waiting.result(PATIENCE_S)
    for each in share:
        each.close()


def ask(segment_socket, rank, secret=SECRET, **changes):
    """Connect, and ask for the segment."""
    connection, challenge = approach(f"\0{segment_socket.name}")
    known = its(**changes)
    purpose = f"segment {segment_socket.name} {known.job}/{known.generation}"
    body = handshake._LOCAL_RANK.pack(rank)
    connection.sendall(messages(secret, challenge, body, purpose=purpose))
    return connection


def test_strangers_are_turned_away_and_keep_nobody_waiting(sockets, threads):
    first = threads.submit(sockets[0].create, 3)
    silent, _ = approach(f"\0{sockets[0].name}")
    for rank, changes in [(1, {"secret": b"guess"}), (1, {"generation": 2}), (0, {}), (3, {})]:
        assert turned_away(ask(sockets[0], rank, **changes))
    second = sockets[1].join(sockets[0].name, 1, 3)
    assert turned_away(ask(sockets[0], 1)), "rank 1 has come"
    third = sockets[2].join(sockets[0].name, 2, 3)
    share([first.result(PATIENCE_S), second, third])
    assert turned_away(silent)


def test_another_user_is_turned_away(sockets, threads, monkeypatch):
    another = SimpleNamespace(getuid=lambda: os.geteuid() + 1, close=os.close)
    monkeypatch.setattr(handshake, "os", another)
    with pytest.raises(SegmentError, match="another user"):
        sockets[1].join(sockets[0].name, 1, 3)
    first = threads.submit(sockets[0].create, 3)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(PATIENCE_S)
        stranger.connect(f"\0{sockets[0].name}")
        assert stranger.recv(100) == b""  # no greeting either
    sockets[0].abort()
    assert isinstance(first.exception(SOON_S), SegmentError)


@pytest.mark.parametrize("answer", [b"", b"nbe9" + bytes(16), MAGIC + bytes(16), "a descriptor"])
def test_a_host_that_is_none_of_the_job_gives_no_segment(sockets, threads, answer):
    with socket.socket(socket.AF_UNIX) as impostor:
        impostor.bind("\0nbelastic-test-impostor")
        impostor.listen()
        joining = threads.submit(sockets[1].join, "nbelastic-test-impostor", 1, 3)
        connection, _ = impostor.accept()
        with connection:
            if given := answer == "a descriptor":  # which the rank closes
                connection.sendall(MAGIC + bytes(16))
                connection.recv(100)
                socket.send_fds(connection, [bytes(LENGTH.size) + b"x" * PROOF_BYTES], [0])
            else:
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
            error = joining.exception(PATIENCE_S)
            assert isinstance(error, SegmentError)
            assert "does not belong" in str(error) or not given


def test_one_who_does_not_come_is_waited_for_a_while_only(sockets, threads, monkeypatch):
    monkeypatch.setattr(handshake, "FORMING_LIMIT_S", 0.3)
    first = threads.submit(sockets[0].create, 3)
    second = sockets[1].join(sockets[0].name, 1, 3)
    assert "1 ranks of its host did not connect" in str(first.exception(PATIENCE_S))
    with pytest.raises(core.Broken, match="has left"):  # it does not wait in that segment
        second.wait(second.barrier_async())
    second.close()
