"""Who can be reached, as far as the network is concerned."""

from __future__ import annotations

import socket

import pytest

from nbelastic.collectives import open_store
from nbelastic.collectives.reach import unreachable


@pytest.fixture
def full():
    """The address of a socket whose queue is full: connections to it get no answer."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        with socket.create_connection(address):
            yield address


def test_those_who_do_not_answer_or_refuse_are_found_among_those_who_do(full):
    store = open_store("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()
    try:
        assert unreachable([store.address, full, nobody, store.address], limit_s=0.5) == [1, 2]
    finally:
        store.close()


def test_nobody_is_asked_where_there_is_nobody():
    assert unreachable([]) == []
