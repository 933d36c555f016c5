"""A rank's connection to the matching of operations: what the others learn when it leaves."""

from __future__ import annotations

import contextlib

import pytest

from nbelastic.collectives import Rendezvous, RendezvousServer
from nbelastic.collectives.rendezvous.matching import MatchingClient
from nbelastic.errors import CollectiveError
from tests.collectives.worlds import BIND


@pytest.fixture
def clients():
    with contextlib.closing(RendezvousServer(BIND)) as store, contextlib.ExitStack() as stack:
        made = [
            MatchingClient(
                Rendezvous(
                    job="matching",
                    generation=1,
                    rank=rank,
                    size=2,
                    store=store.address,
                    bind=BIND,
                    timeout_s=10,
                )
            )
            for rank in range(2)
        ]
        for client in made:
            stack.callback(client.close)
        yield made


def leave(client):
    with pytest.raises(CollectiveError, match="this rank has left"):
        client.connect()
    client.close()


def test_a_rank_that_leaves_before_it_is_connected_has_gone(clients):
    clients[0].connect()
    clients[1].abort()
    leave(clients[1])
    assert clients[0].receive() == {"do": "gone", "rank": 1}


def test_a_rank_that_is_connected_after_another_has_left_learns_of_it(clients):
    clients[1].abort()
    leave(clients[1])
    clients[0].connect()
    assert clients[0].receive() == {"do": "gone", "rank": 1}
