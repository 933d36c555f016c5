"""What is Gloo's own: its sockets and its limits."""

import contextlib
import itertools
import socket
import struct
import threading
import types

import pytest
import torch

from nbelastic.collectives import Rendezvous
from nbelastic.collectives.abort_signal import AbortSignal
from nbelastic.collectives.gloo import group as group_module
from nbelastic.collectives.gloo import sockets
from nbelastic.collectives.operations import QueuedOperation
from nbelastic.errors import CollectiveError
from tests.collectives.clients import join
from tests.collectives.test_abort import threads_of
from tests.collectives.worlds import (
    BIND,
    MAKERS,
    PATIENCE_S,
    World,
    eventually,
    failure,
    terms,
)


def gloo_address(host, port):
    """Return what Gloo sends to the rendezvous of two ranks."""
    family, port_ = struct.pack("@H", socket.AF_INET), struct.pack("!H", port)
    sockaddr = (family + port_ + socket.inet_aton(host)).ljust(136, b"\0")
    return struct.pack("=Q4sQ136sQQ", 4, b"host", 136, sockaddr, 0, 1)


def test_a_peer_of_another_generation_is_turned_away(monkeypatch):
    def token(rendezvous, rank, true=Rendezvous.token):
        return true(rendezvous, rank + 100 * (rendezvous.rank == 1))

    monkeypatch.setattr(Rendezvous, "token", token)
    with World(MAKERS["gloo"], 2, connected=False) as world:
        connecting = [world.start(rank, lambda c: c.connect()) for rank in range(2)]
        for future in connecting:
            failure(future)


def test_abort_frees_who_connects_to_a_peer_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(group_module, "FORMING_LIMIT_S", 0.3)
    with World(MAKERS["gloo"], 2, connected=False) as world:
        connecting = world.start(0, lambda c: c.connect())
        # Of two ranks the one with the higher address calls the other; this one never does.
        address = gloo_address("127.0.0.9", 12345)
        with join(world._store, f"test/{world.generation}", 1, 2, address, secret=b"") as peer:
            assert peer.recv(1)  # rank 0 has been told too
        eventually(lambda: world[0]._owner._store.addresses, "the rendezvous")
        world.abort("enough")
        assert failure(connecting) == "enough"
        eventually(lambda: not threads_of(world), "owner threads")


def test_abort_frees_who_waits_before_gloo_has_ended_its_operation(monkeypatch):
    cut, owner = threading.Event(), group_module.GlooGroupOwner
    end = owner._take_down
    monkeypatch.setattr(owner, "_take_down", lambda self: end(self) if cut.wait() else None)
    with World(MAKERS["gloo"], 2) as world:
        waiter = world.start(0, lambda c: c.allreduce(torch.ones(3)))
        eventually(lambda: world[0]._abort_signal._wakeups, "a wait beyond the brief one")
        world[0].abort("enough")
        try:
            assert failure(waiter) == "enough"
        finally:
            cut.set()


def test_stuck_operations_time_out_if_connections_are_not_cut(monkeypatch):
    monkeypatch.setattr(group_module, "addresses_of", lambda _: [])
    one = torch.ones(1)
    with World(MAKERS["gloo"], 2, timeout_s=2.0) as world:
        waiting = [
            world.start(0, lambda c: c.barrier()),
            world.start(1, lambda c: c.receive(one, 0)),
        ]
        world.wait_until_waiting(range(2))
        world.abort("enough")
        assert {failure(future) for future in waiting} == {"enough"}
    eventually(lambda: not threads_of(world), "owner threads")


def test_severing_leaves_other_sockets_alone():
    with (
        World(MAKERS["gloo"], 2) as world,
        socket.create_server((BIND, 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):
        ends = sockets.addresses_of(world[0]._owner._store.addresses)
        # Gloo may be quick to close the other end.
        assert sockets.cut_connections(ends, 0) in (1, 2)
        with pytest.raises(CollectiveError):
            world.do(0, lambda c: c.barrier())
        one.sendall(b"whole")
        assert other.recv(5) == b"whole"
        with socket.create_connection(server.getsockname(), PATIENCE_S):
            pass
        with World(MAKERS["gloo"], 2) as another:
            another.run(lambda c: c.barrier())
            assert sockets.cut_connections(ends, 0) == 0
            another.run(lambda c: c.barrier())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_connection_is_cut_by_either_rank_whoever_has_made_it(rank):
    with (
        socket.create_server((BIND, 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):
        assert sockets.cut_connections([server.getsockname(), ("127.0.0.9", 1)], rank) == 1
        assert (one, other)[rank].recv(1) == b""


def test_addresses_of_an_unknown_kind_are_not_severed():
    known = gloo_address(BIND, 1)
    other_family = known.replace(struct.pack("@H", socket.AF_INET), b"\xff\xff", 1)
    endless = struct.pack("@Q", 1 << 60) + b"x"
    for value in (b"", b"nonsense", endless, gloo_address(BIND, 0), other_family):
        assert sockets.addresses_of([known, value]) == []
    assert sockets.addresses_of([known, gloo_address("127.0.0.2", 2)]) == [
        (BIND, 1),
        ("127.0.0.2", 2),
    ]


def test_the_limit_of_forming_is_not_that_of_operations(monkeypatch):
    monkeypatch.setattr(group_module, "FORMING_LIMIT_S", 1.0)
    with World(MAKERS["gloo"], 2) as world, World(MAKERS["gloo"], 2) as other:
        waiters = [
            world.start(0, lambda c: c.barrier()),
            other.start(0, lambda c: c.receive(torch.ones(1), 1)),
        ]
        threading.Event().wait(1.5)
        assert not any(waiter.done() for waiter in waiters)


def test_a_failed_operation_is_drained_like_one_under_way(monkeypatch):
    """It has ended here; others may be in the middle of it, and write to this rank."""
    now = itertools.count()  # seconds: as many as looks at the clock
    clock = types.SimpleNamespace(monotonic=lambda: next(now), sleep=lambda _: None)
    monkeypatch.setattr(group_module, "time", clock)
    monkeypatch.setattr(group_module, "DRAIN_LIMIT_S", 100)
    for error, looks in ((None, 2), ("it failed", 101)):
        its = group_module.GlooGroupOwner(terms(), AbortSignal())
        operation = QueuedOperation()
        operation.end(error)
        its.under_way.add(operation)
        before = next(now)
        its._drain()
        assert next(now) - before - 1 == looks


def test_an_end_that_another_thread_sees_first_wakes_the_waiting_one():
    """As a rank's thread does that begins a message while a device's executor waits."""

    class Late:
        """An operation that ends right after the short wait for it."""

        def __init__(self):
            self.ended = False

        def is_completed(self):
            return self.ended

        def wait(self, *limit):
            if limit:
                self.ended = True
                raise RuntimeError("not within the limit")

    operation = group_module.GlooOperation(Late(), threading.Lock())

    class Signal(AbortSignal):
        @contextlib.contextmanager
        def listen(self):
            with super().listen() as wakeup:
                assert operation.failure() is None  # as the other thread asks
                yield wakeup

    found = []
    waiting = threading.Thread(target=lambda: found.append(operation.wait(Signal())), daemon=True)
    waiting.start()
    waiting.join(PATIENCE_S)
    assert found == [True]
