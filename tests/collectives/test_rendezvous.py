"""The rendezvous server over the wire: for ranks, and for clients without the job's secret."""

import contextlib
import itertools
import socket
import subprocess
import sys
import threading
from functools import partial

import pytest
import torch

from nbelastic.collectives import RendezvousServer
from nbelastic.collectives.gloo.group import GlooStore
from nbelastic.collectives.gloo.sockets import addresses_of
from nbelastic.collectives.rendezvous.client import unreachable
from nbelastic.collectives.rendezvous.handshake import (
    GREETING,
    LENGTH,
    MAGIC,
    PROOF_BYTES,
)
from nbelastic.collectives.rendezvous.server import MAX_STRANGERS
from nbelastic.errors import CollectiveError
from tests.collectives import worlds
from tests.collectives.clients import (
    NONCE,
    SECRET,
    approach,
    join,
    messages,
    refusal,
    request,
    send,
    turned_away,
    values,
)
from tests.collectives.worlds import BIND, MAKERS, PATIENCE_S, World, eventually, terms


@pytest.fixture
def server():
    server = RendezvousServer(BIND, SECRET)
    yield server
    server.close()


def test_all_get_what_each_brings_also_in_pieces(server):
    clients = [join(server, "a/1", rank, 3, b"v%d" % rank * 1000) for rank in (2, 0)]
    slow, challenge = approach(server.address)
    for byte in request(SECRET, challenge, "a/1", 1, 3, b"v1"):
        slow.sendall(bytes([byte]))
    for client in (*clients, slow):
        assert values(client, 3) == [b"v0" * 1000, b"v1", b"v2" * 1000]


def test_ranks_that_leave_at_the_same_moment_cost_no_server(server):
    for generation in range(20):
        leaving = [join(server, f"a/{generation}", rank, 4) for rank in range(3)]
        assert values(join(server, f"b/{generation}", 0, 1, b"all wait now"), 1)
        for client in leaving:
            client.close()
    assert values(join(server, "a/last", 0, 1, b"still there"), 1) == [b"still there"]


def test_jobs_with_generations_of_one_number_share_a_server(monkeypatch):
    monkeypatch.setattr(worlds, "_generations", itertools.repeat(1 << 40))
    with contextlib.closing(RendezvousServer(BIND)) as server, contextlib.ExitStack() as stack:
        its = {"store": server.address, "connected": False}
        one, two = (
            stack.enter_context(World(MAKERS["auto"], 2, job=job, **its)) for job in ("one", "two")
        )
        ranks = ((one, 0), (two, 0), (two, 1), (one, 1))
        connecting = [world.start(rank, lambda c: c.connect()) for world, rank in ranks]
        for future in connecting:
            future.result(PATIENCE_S)
        assert one.run(lambda c: summed(c, 1.0)) == two.run(lambda c: summed(c, 1.0)) == [2.0] * 2


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
    assert turned_away(waiting)
    assert turned_away(half)
    with pytest.raises(ConnectionRefusedError):
        join(server)
    assert "nbelastic-rendezvous" not in [thread.name for thread in threading.enumerate()]
    dropped = RendezvousServer(BIND)
    address = dropped.address
    del dropped
    eventually(lambda: unreachable([address], PATIENCE_S), "the end of the server")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
def test_it_listens_on_the_given_interface_only(server):
    host, port = server.address
    assert host == BIND
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), PATIENCE_S)
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


def test_servers_that_are_silent_or_refuse_are_unreachable():
    with contextlib.ExitStack() as stack:
        answering = stack.enter_context(contextlib.closing(RendezvousServer(BIND))).address
        with socket.create_server((BIND, 0)) as closed:
            refusing = closed.getsockname()
        # Its queue is full: connections to it get no answer.
        full = stack.enter_context(socket.create_server((BIND, 0), backlog=0)).getsockname()
        stack.enter_context(socket.create_connection(full))
        assert unreachable([answering, full, refusing, answering], limit_s=0.5) == [1, 2]
    assert unreachable([]) == []


# -- clients without the secret learn nothing, change nothing, hold up no rank -------------------


def test_without_the_secret_one_gets_nothing_and_changes_nothing(server):
    first = join(server, "a/1", 0, 2, b"first")
    join(server).close()
    send(server, b"nb").close()
    connection, challenge = approach(server.address)
    message = request(SECRET, challenge, "a/1", 1, 2, b"value")
    connection.sendall(message.replace(b"a/1", b"a/2"))  # altered
    short, challenge = approach(server.address)
    short.sendall(messages(SECRET, challenge, b"short"))
    for stranger in (
        *(join(server, "a/1", 1, 2, b"it", secret=s) for s in (b"", b"guess", SECRET[:-1])),
        join(server, "a/2", 0, 9, b"a key of its own", secret=b"guess"),
        connection,
        send(server, message),  # said again, it answers another challenge
        send(server, b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n" * 3),
        send(server, NONCE + LENGTH.pack(1 << 31)),
        short,
    ):
        assert turned_away(stranger)
    assert values(join(server, "a/1", 1, 2, b"second"), 2) == [b"first", b"second"]
    assert values(first, 2) == [b"first", b"second"]
    assert values(join(server, "a/2", 0, 1, b"mine"), 1) == [b"mine"]


def test_strangers_that_stay_silent_keep_no_rank_waiting(server):
    first = join(server, "a/1", 0, 2, b"first")
    crowd = [send(server, b"n") for _ in range(MAX_STRANGERS + 20)]
    for each in crowd[:20]:
        assert turned_away(each), "those who have dawdled longest go"
    for each in crowd[20:]:
        each.close()
    assert values(join(server, "a/1", 1, 2, b"second"), 2) == [b"first", b"second"]
    assert values(first, 2) == [b"first", b"second"]


rendezvous = partial(terms, generation=1, timeout_s=PATIENCE_S, secret=SECRET)


def test_a_rank_rejects_a_server_without_the_secret():
    with socket.create_server((BIND, 0)) as server:

        def pretend():
            connection, _ = server.accept()
            with connection:
                connection.sendall(GREETING.pack(MAGIC, NONCE))
                connection.recv(10_000)
                connection.sendall(LENGTH.pack(7) + b"address" + bytes(PROOF_BYTES))

        thread = threading.Thread(target=pretend)
        thread.start()
        gloo_store = GlooStore(rendezvous(store=server.getsockname()))
        with pytest.raises(CollectiveError, match="does not belong to this job"):
            gloo_store.wait([])
        thread.join()
        assert gloo_store.addresses == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads Gloo's address as Linux writes it")
def test_strangers_at_gloos_port_do_not_harm_a_formed_group():
    with World(MAKERS["gloo"], 2) as world:
        doors = addresses_of(world[0]._owner._store.addresses)
        strangers = []
        for door in doors:
            for said in (b"", b"x", bytes(8), b"\xff" * 8, b"GET / HTTP/1.1\r\n\r\n" * 100):
                connection = socket.create_connection(door, PATIENCE_S)
                connection.sendall(said)
                strangers.append(connection)
        sums = world.run(lambda c: summed(c, 1.0 + c.rank))
        for connection in strangers:
            connection.close()
        assert sums == [3.0, 3.0]
        assert world.run(lambda c: summed(c, 2.0)) == [4.0, 4.0]


def summed(communicator, value):
    tensor = torch.full((1000,), value)
    communicator.allreduce(tensor)
    assert (tensor == tensor[0]).all()
    return tensor[0].item()


def test_a_peer_token_depends_on_the_secret_and_the_rank():
    others = [rendezvous(generation=2), rendezvous(secret=b"guess"), rendezvous(job="another")]
    tokens = {rendezvous().token(1), *(each.token(0) for each in others)}
    assert rendezvous().token(0) not in tokens
    assert len(tokens) == 4
    assert repr(SECRET)[2:-1] not in repr(rendezvous()), "the secret is not shown"
