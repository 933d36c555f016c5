"""Clients without the job's secret learn nothing, change nothing, hold up no rank."""

from __future__ import annotations

import dataclasses
import socket
import sys
import threading

import pytest
import torch

from nbelastic.collectives import Rendezvous, RendezvousServer, connect
from nbelastic.collectives.gloo.group import GlooStore
from nbelastic.collectives.gloo.sockets import endpoints_of
from nbelastic.collectives.rendezvous import handshake
from nbelastic.collectives.rendezvous.handshake import (
    GREETING,
    HEADER,
    MAGIC,
    encode_request,
    peer_token,
)
from nbelastic.collectives.rendezvous.server import LENGTH, PURPOSE, VALUES
from nbelastic.errors import CollectiveError
from tests.collectives.clients import (
    NONCE,
    SECRET,
    approach,
    closed,
    join,
    request,
    send,
    values,
)
from tests.collectives.worlds import BIND, MAKERS, PATIENCE_S, World


@pytest.fixture
def server():
    server = RendezvousServer(BIND, SECRET)
    yield server
    server.close()


def silence(connection):
    """Return what a connection still brings before its end."""
    with connection:
        return connection.recv(1)


def test_without_the_secret_one_gets_nothing_and_changes_nothing(server):
    first = join(server, "a/1", 0, 2, b"first")
    for secret in (b"", b"guess", SECRET[:-1]):
        assert silence(join(server, "a/1", 1, 2, b"stranger", secret=secret)) == b""
    assert silence(join(server, "a/2", 0, 9, b"a key of its own", secret=b"guess")) == b""
    assert values(join(server, "a/1", 1, 2, b"second"), 2) == [b"first", b"second"]
    assert values(first, 2) == [b"first", b"second"]
    assert values(join(server, "a/2", 0, 1, b"mine"), 1) == [b"mine"]


def test_what_a_rank_said_cannot_be_said_again_nor_altered(server):
    connection, challenge = approach(server.address)
    message = request(SECRET, challenge, "a/1", 0, 1, b"value")
    altered = message.replace(b"a/1", b"a/2")
    connection.sendall(altered)
    assert silence(connection) == b""
    assert silence(send(server, message)) == b"", "it answers another challenge"


def test_nonsense_does_no_harm(server):
    first = join(server, "a/1", 0, 2, b"first")
    join(server).close()
    send(server, b"nb").close()
    assert closed(send(server, b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n" * 3))
    assert closed(send(server, HEADER.pack(1 << 31, NONCE)))
    connection, challenge = approach(server.address)
    connection.sendall(encode_request(SECRET, PURPOSE, challenge, NONCE, b"short"))
    assert closed(connection)
    assert values(join(server, "a/1", 1, 2, b"second"), 2) == [b"first", b"second"]
    assert values(first, 2) == [b"first", b"second"]


def test_strangers_that_stay_silent_keep_nobody_waiting(server):
    first = join(server, "a/1", 0, 2, b"first")
    crowd = [send(server, b"n") for _ in range(handshake.MAX_UNAUTHENTICATED + 20)]
    second = join(server, "a/1", 1, 2, b"second")
    assert values(second, 2) == [b"first", b"second"]
    assert values(first, 2) == [b"first", b"second"]
    for each in crowd[:20]:
        assert closed(each), "those who have dawdled longest go"
    for each in crowd[20:]:
        each.close()


def test_slow_strangers_are_dropped_but_ranks_may_wait(server, monkeypatch):
    monkeypatch.setattr(handshake, "REQUEST_LIMIT_S", 0.2)
    first = join(server, "a/1", 0, 2, b"first")
    assert closed(send(server, b"n"))
    assert values(join(server, "a/1", 1, 2, b"second"), 2) == [b"first", b"second"]
    assert values(first, 2) == [b"first", b"second"]


def rendezvous(**changes):
    its = Rendezvous(
        job="a", generation=1, rank=0, size=2, store=("", 0), bind=BIND, timeout_s=PATIENCE_S
    )
    return dataclasses.replace(its, secret=SECRET, **changes)


def test_a_rank_rejects_a_server_without_the_secret():
    with socket.create_server((BIND, 0)) as server:

        def pretend():
            connection, _ = server.accept()
            with connection:
                connection.sendall(GREETING.pack(MAGIC, NONCE))
                connection.recv(10_000)
                field = LENGTH.pack(7) + b"address"
                connection.sendall(VALUES + field + field + bytes(32))

        thread = threading.Thread(target=pretend)
        thread.start()
        gloo_store = GlooStore(rendezvous(store=server.getsockname()))
        with pytest.raises(CollectiveError, match="does not belong to this job"):
            gloo_store.wait([])
        thread.join()
        assert gloo_store.addresses == []


def test_a_rank_without_the_secret_cannot_take_part():
    with World(MAKERS["gloo"], 2, connected=False) as world:
        world.communicators[1] = connect(
            dataclasses.replace(world[1]._owner._rendezvous, secret=b"guess", backend="gloo")
        )
        stranger = world.start(1, lambda c: c.connect())
        assert isinstance(stranger.exception(PATIENCE_S), CollectiveError)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Gloo's address as Linux writes it")
def test_strangers_at_gloos_port_do_not_harm_a_formed_group():
    with World(MAKERS["gloo"], 2) as world:
        doors = [endpoints_of(world[rank]._owner._store.addresses, rank).own for rank in range(2)]
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
    its = rendezvous()
    others = {
        peer_token(rendezvous(), 1),
        peer_token(rendezvous(generation=2), 0),
        peer_token(dataclasses.replace(its, secret=b"guess"), 0),
    }
    assert peer_token(its, 0) not in others


def test_the_secret_is_not_shown():
    assert repr(SECRET)[2:-1] not in repr(rendezvous())
