"""The rendezvous server, seen over the wire, and which servers can be reached."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading

import pytest

from nbelastic.collectives import RendezvousServer
from nbelastic.collectives.rendezvous.client import unreachable
from tests.collectives.clients import (
    SECRET,
    approach,
    closed,
    join,
    refusal,
    request,
    values,
)
from tests.collectives.worlds import BIND, PATIENCE_S, eventually


@pytest.fixture
def server():
    server = RendezvousServer(BIND, SECRET)
    yield server
    server.close()


def test_all_get_what_each_brings(server):
    clients = [join(server, "a/1", rank, 3, b"v%d" % rank * 1000) for rank in (2, 0, 1)]
    for client in clients:
        assert values(client, 3) == [b"v%d" % rank * 1000 for rank in range(3)]


def test_a_request_may_arrive_in_pieces(server):
    connection, challenge = approach(server.address)
    message = request(SECRET, challenge, "a/1", 0, 1, b"value")
    for piece in message:
        connection.sendall(bytes([piece]))
    assert values(connection, 1) == [b"value"]


def test_keys_are_apart(server):
    first = join(server, "a/1", 0, 2, b"old")
    second = join(server, "a/2", 0, 2, b"new")
    assert values(join(server, "a/2", 1, 2, b"too"), 2) == [b"new", b"too"]
    assert values(second, 2) == [b"new", b"too"]
    assert values(join(server, "a/1", 1, 2, b"two"), 2) == [b"old", b"two"]
    assert values(first, 2) == [b"old", b"two"]


def test_the_others_are_told_when_one_leaves(server):
    staying, leaving = (join(server, "a/1", rank, 3, b"") for rank in range(2))
    leaving.close()
    assert "rank 1 left" in refusal(staying)
    assert "rank 1 left" in refusal(join(server, "a/1", 2, 3, b""))


def test_ranks_that_leave_at_the_same_moment_cost_no_server(server):
    for generation in range(20):
        leaving = [join(server, f"a/{generation}", rank, 4) for rank in range(3)]
        assert values(join(server, f"b/{generation}", 0, 1, b"all wait now"), 1)
        for client in leaving:
            client.close()
    assert values(join(server, "a/last", 0, 1, b"still there"), 1) == [b"still there"]


def test_no_rank_joins_twice_and_all_agree_on_the_size(server):
    first = join(server, "a/1", 0, 2, b"first")
    assert "already joined" in refusal(join(server, "a/1", 0, 2, b"again"))
    assert "generation of 2" in refusal(join(server, "a/1", 1, 3, b""))
    assert "generation of 2" in refusal(join(server, "a/1", 2, 2, b""))
    assert values(join(server, "a/1", 1, 2, b"second"), 2) == [b"first", b"second"]
    assert values(first, 2) == [b"first", b"second"]
    assert "already joined" in refusal(join(server, "a/1", 1, 2, b"late"))


def test_closing_frees_who_waits_and_the_port():
    server = RendezvousServer(BIND, SECRET)
    waiting = join(server, "a/1", 0, 2, b"")
    half, _ = approach(server.address)
    server.close()
    server.close()
    assert "closed" in refusal(waiting)
    assert closed(half)
    with pytest.raises(ConnectionRefusedError):
        join(server)
    assert "nbelastic-rendezvous" not in [thread.name for thread in threading.enumerate()]


def test_a_store_that_is_dropped_is_closed():
    server = RendezvousServer(BIND)
    address = server.address
    del server

    def refused():
        try:
            socket.create_connection(address, PATIENCE_S).close()
        except ConnectionRefusedError:
            return True
        except ConnectionResetError:
            pass  # in the very moment
        return False

    eventually(refused, "the end of the server")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
def test_it_listens_on_the_given_interface_only(server):
    host, port = server.address
    assert host == BIND
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), PATIENCE_S)


def test_an_address_of_no_interface_is_an_error():
    with pytest.raises(OSError, match="address"):
        RendezvousServer("203.0.113.1")


@pytest.mark.slow
def test_neither_the_package_nor_a_store_needs_torch():
    code = (
        "import sys; from nbelastic.collectives import RendezvousServer, SoloCommunicator;"
        "RendezvousServer('127.0.0.1').close(); SoloCommunicator(generation=1).barrier();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def full():
    """The address of a socket whose queue is full: connections to it get no answer."""
    with socket.socket() as listener:
        listener.bind((BIND, 0))
        listener.listen(0)
        address = listener.getsockname()
        with socket.create_connection(address):
            yield address


def test_servers_that_are_silent_or_refuse_are_unreachable(full):
    server = RendezvousServer(BIND)
    with socket.create_server((BIND, 0)) as closed:
        refusing = closed.getsockname()
    try:
        assert unreachable([server.address, full, refusing, server.address], limit_s=0.5) == [1, 2]
    finally:
        server.close()


def test_of_no_servers_none_is_unreachable():
    assert unreachable([]) == []
