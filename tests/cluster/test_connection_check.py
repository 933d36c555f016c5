"""What a machine knows of a connection whose other end does not answer."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from nbelastic.cluster import dask_compat
from nbelastic.cluster.dask_compat import LIMIT_S, ConnectionCheck, unacknowledged_s

pytestmark = pytest.mark.skipif(
    not hasattr(socket, "TCP_INFO"), reason="this system does not tell of acknowledgments"
)


def test_a_busy_receiver_is_not_cut_off():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as connection,
    ):
        connection.sendall(b"beat")  # nobody reads it, but it has arrived
        comm = SimpleNamespace(stream=SimpleNamespace(socket=connection))
        assert unacknowledged_s(comm) == 0.0


@pytest.mark.parametrize("comm", [None, SimpleNamespace(), SimpleNamespace(stream=None)])
def test_what_is_no_connection_of_tcp_tells_nothing(comm):
    assert unacknowledged_s(comm) == 0.0
    assert not ConnectionCheck().lost(comm)


def test_a_closed_connection_is_left_for_dask_to_notice():
    with socket.socket() as connection:
        pass
    assert unacknowledged_s(SimpleNamespace(stream=SimpleNamespace(socket=connection))) == 0.0


def test_what_was_sent_just_now_after_a_pause_does_not_count(monkeypatch):
    silences = iter([LIMIT_S, 0.0, LIMIT_S - 0.1, LIMIT_S, LIMIT_S + 0.5])
    monkeypatch.setattr(dask_compat, "unacknowledged_s", lambda _comm: next(silences))
    one = ConnectionCheck()
    assert [one.lost(None) for _ in range(5)] == [False, False, False, False, True]
