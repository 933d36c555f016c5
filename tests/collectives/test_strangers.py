"""Who does not know the job's secret learns nothing, changes nothing, keeps nobody waiting."""

from __future__ import annotations

import dataclasses
import socket
import sys
import threading

import pytest
import torch

from nbelastic.collectives import Rendezvous, connect, open_store
from nbelastic.collectives import store as store_module
from nbelastic.collectives.keeper import _token
from nbelastic.collectives.meeting import Meeting
from nbelastic.collectives.sever import ends_of
from nbelastic.collectives.store import GREETING, LENGTH, MAGIC, REQUEST, VALUES
from nbelastic.errors import CollectiveError
from tests.collectives.guests import (
    NONCE,
    SECRET,
    approach,
    hung_up,
    request,
    say,
    values,
    visit,
)
from tests.collectives.worlds import BIND, MAKERS, PATIENCE_S, World


@pytest.fixture
def store():
    store = open_store(BIND, SECRET)
    yield store
    store.close()


def silence(connection):
    """Return what a connection still brings before its end."""
    with connection:
        return connection.recv(1)


def test_without_the_secret_one_gets_nothing_and_changes_nothing(store):
    first = visit(store, "a/1", 0, 2, b"first")
    for secret in (b"", b"guess", SECRET[:-1]):
        assert silence(visit(store, "a/1", 1, 2, b"stranger", secret=secret)) == b""
    assert silence(visit(store, "a/2", 0, 9, b"a room of his own", secret=b"guess")) == b""
    assert values(visit(store, "a/1", 1, 2, b"second"), 2) == [b"first", b"second"]
    assert values(first, 2) == [b"first", b"second"]
    assert values(visit(store, "a/2", 0, 1, b"mine"), 1) == [b"mine"]


def test_what_a_rank_said_cannot_be_said_again_nor_altered(store):
    connection, challenge = approach(store.address)
    asked = {"rank": 0, "size": 1, "value": b"value"}
    message = request(SECRET, challenge, NONCE, room="a/1", **asked)
    altered = message.replace(b"a/1", b"a/2")
    connection.sendall(altered)
    assert silence(connection) == b""
    assert silence(say(store, message)) == b"", "it answers another challenge"


def test_nonsense_does_no_harm(store):
    first = visit(store, "a/1", 0, 2, b"first")
    visit(store).close()
    say(store, b"nb").close()
    assert hung_up(say(store, b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n" * 3))
    assert hung_up(say(store, REQUEST.pack(3, 0, 1, 1 << 31, NONCE)))
    assert hung_up(say(store, REQUEST.pack(60000, 0, 1, 1, NONCE)))
    assert values(visit(store, "a/1", 1, 2, b"second"), 2) == [b"first", b"second"]
    assert values(first, 2) == [b"first", b"second"]


def test_strangers_that_stay_silent_keep_nobody_waiting(store):
    first = visit(store, "a/1", 0, 2, b"first")
    crowd = [say(store, b"n") for _ in range(store_module.MOST_STRANGERS + 20)]
    second = visit(store, "a/1", 1, 2, b"second")
    assert values(second, 2) == [b"first", b"second"]
    assert values(first, 2) == [b"first", b"second"]
    for each in crowd[:20]:
        assert hung_up(each), "those who have dawdled longest go"
    for each in crowd[20:]:
        each.close()


def test_strangers_that_dawdle_are_parted_with_but_ranks_may_wait(store, monkeypatch):
    monkeypatch.setattr(store_module, "STRANGER_LIMIT_S", 0.2)
    first = visit(store, "a/1", 0, 2, b"first")
    assert hung_up(say(store, b"n"))
    assert values(visit(store, "a/1", 1, 2, b"second"), 2) == [b"first", b"second"]
    assert values(first, 2) == [b"first", b"second"]


def rendezvous(**changes):
    its = Rendezvous(
        job="a", generation=1, rank=0, size=2, store=("", 0), bind=BIND, timeout_s=PATIENCE_S
    )
    return dataclasses.replace(its, secret=SECRET, **changes)


def test_a_rank_takes_no_address_from_a_store_that_does_not_know_the_secret():
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
        meeting = Meeting(rendezvous(store=server.getsockname()))
        with pytest.raises(CollectiveError, match="does not belong to this job"):
            meeting.wait([])
        thread.join()
        assert meeting.addresses == []


def test_a_rank_without_the_secret_cannot_take_part():
    with World(MAKERS["gloo"], 2, connected=False) as world:
        world.communicators[1] = connect(
            dataclasses.replace(world[1]._keeper._rendezvous, secret=b"guess", backend="gloo")
        )
        stranger = world.start(1, lambda c: c.connect())
        assert isinstance(stranger.exception(PATIENCE_S), CollectiveError)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Gloo's address as Linux writes it")
def test_strangers_at_gloos_door_do_no_harm_to_a_group_that_has_formed():
    with World(MAKERS["gloo"], 2) as world:
        doors = [ends_of(world[rank]._keeper._meeting.addresses, rank).own for rank in range(2)]
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


def test_the_token_that_peers_compare_is_made_of_the_secret_and_says_who_it_is_of():
    its = rendezvous()
    others = [
        _token(rendezvous(), 1),
        _token(rendezvous(generation=2), 0),
        _token(dataclasses.replace(its, secret=b"guess"), 0),
    ]
    assert all(other.tolist() != _token(its, 0).tolist() for other in others)


def test_the_secret_is_not_shown():
    assert repr(SECRET)[2:-1] not in repr(rendezvous())
