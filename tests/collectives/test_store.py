"""The store in which ranks meet, seen over the wire."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading

import pytest

from nbelastic.collectives import open_store
from tests.collectives.guests import (
    NONCE,
    SECRET,
    approach,
    hung_up,
    refusal,
    request,
    values,
    visit,
)
from tests.collectives.worlds import BIND, PATIENCE_S, eventually


@pytest.fixture
def store():
    store = open_store(BIND, SECRET)
    yield store
    store.close()


def test_all_get_what_each_brings(store):
    guests = [visit(store, "a/1", rank, 3, b"v%d" % rank * 1000) for rank in (2, 0, 1)]
    for guest in guests:
        assert values(guest, 3) == [b"v%d" % rank * 1000 for rank in range(3)]


def test_a_request_may_arrive_in_pieces(store):
    connection, challenge = approach(store.address)
    message = request(SECRET, challenge, NONCE, room="a/1", rank=0, size=1, value=b"value")
    for piece in message:
        connection.sendall(bytes([piece]))
    assert values(connection, 1) == [b"value"]


def test_rooms_are_apart(store):
    first = visit(store, "a/1", 0, 2, b"old")
    second = visit(store, "a/2", 0, 2, b"new")
    assert values(visit(store, "a/2", 1, 2, b"too"), 2) == [b"new", b"too"]
    assert values(second, 2) == [b"new", b"too"]
    assert values(visit(store, "a/1", 1, 2, b"two"), 2) == [b"old", b"two"]
    assert values(first, 2) == [b"old", b"two"]


def test_the_others_are_told_when_one_leaves(store):
    staying, leaving = (visit(store, "a/1", rank, 3, b"") for rank in range(2))
    leaving.close()
    assert "rank 1 left" in refusal(staying)
    assert "rank 1 left" in refusal(visit(store, "a/1", 2, 3, b""))


def test_nobody_comes_twice_and_all_agree_on_the_size(store):
    first = visit(store, "a/1", 0, 2, b"first")
    assert "come before" in refusal(visit(store, "a/1", 0, 2, b"again"))
    assert "generation of 2" in refusal(visit(store, "a/1", 1, 3, b""))
    assert "generation of 2" in refusal(visit(store, "a/1", 2, 2, b""))
    assert values(visit(store, "a/1", 1, 2, b"second"), 2) == [b"first", b"second"]
    assert values(first, 2) == [b"first", b"second"]
    assert "come before" in refusal(visit(store, "a/1", 1, 2, b"late"))


def test_closing_frees_who_waits_and_the_port():
    store = open_store(BIND, SECRET)
    waiting = visit(store, "a/1", 0, 2, b"")
    half, _ = approach(store.address)
    store.close()
    store.close()
    assert "closed" in refusal(waiting)
    assert hung_up(half)
    with pytest.raises(ConnectionRefusedError):
        visit(store)
    assert "nbelastic-store" not in [thread.name for thread in threading.enumerate()]


def test_a_store_that_is_dropped_is_closed():
    store = open_store(BIND)
    address = store.address
    del store

    def refused():
        try:
            socket.create_connection(address, PATIENCE_S).close()
        except ConnectionRefusedError:
            return True
        except ConnectionResetError:
            pass  # in the very moment
        return False

    eventually(refused, "the end of the store")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
def test_it_listens_on_the_given_interface_only(store):
    host, port = store.address
    assert host == BIND
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), PATIENCE_S)


def test_an_address_of_no_interface_is_an_error():
    with pytest.raises(OSError, match="address"):
        open_store("203.0.113.1")


def test_neither_the_package_nor_a_store_needs_torch():
    code = (
        "import sys; from nbelastic.collectives import Rendezvous, SoloCommunicator, open_store;"
        "open_store('127.0.0.1').close(); SoloCommunicator(generation=1).barrier();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
