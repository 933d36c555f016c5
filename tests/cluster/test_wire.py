"""Messages as Dask carries them, what a bad one costs, and what is used of Dask's own streams."""

import asyncio
import enum
import socket
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import torch
from distributed import batched
from distributed.batched import BatchedSend
from distributed.protocol import dumps, loads

import nbelastic
from nbelastic import messages as m
from nbelastic.cluster import dask_compat, wire
from nbelastic.errors import VersionMismatch
from tests.support.logs import own_records

from .shared_cluster import SharedCluster

EVENT = m.RankEvent("j", m.RankReady(0, 0, 0, 1, ("host", 1)))
BEATS = m.Heartbeats((("j", m.Beat(0, 1, 5, False, 2, 7, "allreduce")),))
NOTICE = m.NoticeReport(m.Notice(m.NoticeSource.AWS, "terminate", 120.0, host=True))


def carried(message):
    """Return what arrives of a message over a connection of Dask's."""
    return wire.unpack(loads(dumps({"message": wire.pack(message)}))["message"])


def test_a_large_message_travels_in_parts(monkeypatch):
    monkeypatch.setattr(wire, "PART_BYTES", 10)
    assert len(wire.pack(NOTICE)["body"]) > 5
    assert carried(NOTICE) == NOTICE


def changed(message, *path, to):
    """Return a message as bytes, with another value somewhere in it."""
    plain = place = msgspec.msgpack.decode(m.encode(message))
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return {"protocol": wire.PROTOCOL, "body": [m.encode(plain)]}


BAD = [
    None,
    {"protocol": wire.PROTOCOL, "body": [b"\xc1"]},
    {"protocol": wire.PROTOCOL, "body": 3},
    changed(EVENT, "event", to={"kind": "ClusterGone"}),
    wire.pack(m.RankEvent("j", m.RankReturned(0))),
    wire.pack(m.GiveUp("topic", False)),
    changed(EVENT, "strange", to=3),
    changed(EVENT, "event", to={"kind": "RankReady"}),
    changed(EVENT, "event", "start", to="0"),
    changed(EVENT, "event", "version", to=float("nan")),
    changed(BEATS, "beats", 0, 1, 2, to=None),
    changed(NOTICE, "seconds", to=float("inf")),
]


def scene():
    """Return a plugin on a scheduler, whose rank of worker ``w`` a bad message would cost."""
    cluster = SharedCluster()
    asyncio.run(cluster.start())
    cluster.plugin._evict_sender = Mock()
    return cluster


@pytest.mark.parametrize("packed", BAD, ids=str)
def test_a_message_that_cannot_be_read_costs_its_senders_rank_alone(packed):
    cluster = scene()
    cluster.stream_handlers[wire.FROM_AGENTS](worker="w", message=packed)
    cluster.plugin._evict_sender.assert_called_once()


def test_a_message_of_another_protocol_is_refused_with_a_sentence():
    cluster = scene()
    for packed in (
        {**wire.pack(EVENT), "protocol": wire.PROTOCOL + 1},
        {"protocol": 7, "body": {"job": "j"}},
    ):
        cluster.stream_handlers[wire.FROM_AGENTS](worker="w", message=packed)
        worker, error = cluster.plugin._evict_sender.call_args.args
        assert (worker, type(error)) == ("w", VersionMismatch)
        assert "install the same version of nbelastic" in str(error)


def test_a_kernels_message_that_cannot_be_read_raises_nothing(caplog):
    cluster = scene()
    for packed in (None, wire.pack(EVENT)):
        cluster.stream_handlers[wire.FROM_KERNELS](client="c", message=packed)
    assert [record.getMessage().split()[:2] for record in own_records(caplog)] == [
        ["a", "message"]
    ] * 2


class Cunning(str):
    """A text that runs code when it is looked at."""

    __slots__ = ()

    def __str__(self):
        raise SystemExit

    __repr__ = encode = __len__ = __str__


class Evil:
    """Something that can neither be shown nor pickled."""

    def __repr__(self):
        raise SystemExit

    __str__ = __reduce__ = __repr__


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "arrives"),
    [
        ("a\udc80b", "a\\udc80b"),
        ("ü", "ü"),
        (-(2**70), -(2**63)),
        (Colour.RED, 1),
        (np.int32(7), 7),
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (Cunning("x\ud800"), "x\\ud800"),
        ({"\udc80": 1, 2**70: 2}, {"\\udc80": 1, 2**64 - 1: 2}),
        ((b"x", ["\udc80"]), [b"x", ["\\udc80"]]),
        (True, True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_odd_values_arrive_as_what_is_nearest(value, arrives):
    assert m.decode(m.encode({"value": value}), dict) == {"value": arrives}
    odd = m.decode(m.encode({"value": value, "odd": "\udc80"}), dict)
    assert odd == {"value": arrives, "odd": "\\udc80"}


def test_odd_texts_of_a_message_are_escaped_and_its_bytes_are_not():
    error = m.PackedError("\udc80", (), b"\xff\x00")
    arrived = carried(m.RankEvent("j", m.RankRaised(2**70, ""), error=error))
    assert arrived.error == m.PackedError("\\udc80", (), b"\xff\x00")
    assert arrived.event.start == 2**64 - 1


@pytest.mark.parametrize("make", [Evil, object, torch.Tensor, complex])
def test_what_is_no_plain_value_arrives_as_its_name(make):
    assert make.__name__ in m.decode(m.encode({"value": make()}), dict)["value"]


# -- streams of Dask's -----------------------------------------------------------------------------


def test_a_stream_waits_for_nothing_even_where_the_clock_is_set_back_and_keeps_few(monkeypatch):
    sent = []

    async def write(messages, **_):
        sent.extend(messages)
        return 0

    async def scene():
        stream = BatchedSend(interval="10ms")
        dask_compat.hold_nothing_back(stream)
        stream.start(SimpleNamespace(write=write, closed=bool))
        for number in range(20):
            monkeypatch.setattr(batched, "time", lambda number=number: 1e9 - 60 * number)
            stream.send(number)
            for _ in range(5):  # turns of the loop
                await asyncio.sleep(0)
        assert len(stream.recent_message_log) == 10
        stream.comm = None
        stream.please_stop = True

    asyncio.run(scene())
    assert sent == list(range(20))


@pytest.mark.parametrize("odd", [None, SimpleNamespace(interval="1s", stream=None)])
def test_what_is_no_stream_or_connection_is_left_alone(odd):
    dask_compat.hold_nothing_back(odd)
    assert dask_compat.unacknowledged_s(odd) == 0.0


def test_a_jobs_messages_are_not_held_back_anywhere(crew):
    assert crew.fit(nbelastic.size, np=2).results() == [2, 2]
    assert crew.client.scheduler_comm.interval == dask_compat.INTERVAL_S
    of_workers = crew.client.run(lambda dask_worker: dask_worker.batched_stream.interval)
    assert set(of_workers.values()) == {dask_compat.INTERVAL_S}
    to_workers = crew.client.run_on_scheduler(
        lambda dask_scheduler: [each.interval for each in dask_scheduler.stream_comms.values()]
    )
    assert set(to_workers) == {dask_compat.INTERVAL_S}


# -- what a machine knows of a connection whose other end does not answer --------------------------


def test_a_busy_receiver_is_not_cut_off_and_a_closed_connection_is_left_to_dask():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as connection,
    ):
        connection.sendall(b"beat")  # nobody reads it, but it has arrived
        comm = SimpleNamespace(stream=SimpleNamespace(socket=connection))
        assert dask_compat.unacknowledged_s(comm) == 0.0
    assert dask_compat.unacknowledged_s(comm) == 0.0
