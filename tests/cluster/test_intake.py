"""The intake of the scheduler: a message that cannot be read costs its sender's rank alone."""

from __future__ import annotations

import types

import pytest

from nbelastic.cluster import wire
from nbelastic.cluster.rank_error import Frame, PackedError
from nbelastic.cluster.scheduler.intake import Intake
from nbelastic.elastic.ranks.telemetry import CodeLine, MetricsReport, TelemetrySnapshot
from nbelastic.errors import VersionMismatch
from nbelastic.membership import (
    Beat,
    ClusterGone,
    NoticeSource,
    RankRaised,
    RankReady,
    RankReturned,
    Slot,
    StopRequested,
)
from tests.support.logs import own_records

READY = RankReady(0, 0, 0, 1, ("host", 1))
SNAPSHOT = TelemetrySnapshot(1, 2, "cpu", line=CodeLine("f", 1, "g"))
REPORT = MetricsReport(0, 0, 1, None, {"a": float("nan")})
ERROR = PackedError("ValueError: no", (Frame("f", 1, "g", "x"),), b"x")


class Scene:
    def __init__(self):
        self.handled, self.blamed = [], []
        self.scheduler = types.SimpleNamespace(stream_handlers={})
        self.intake = Intake(self.scheduler, lambda _worker, error: self.blamed.append(error))
        for kind in (
            wire.Hello,
            wire.RankEvent,
            wire.Heartbeats,
            wire.RankOutput,
            wire.RankTelemetry,
            wire.RankEnded,
            wire.NoticeReport,
        ):
            self.intake.of_agents(kind, lambda _worker, message: self.handled.append(message))

    def say(self, packed):
        self.scheduler.stream_handlers[wire.FROM_AGENTS](worker="w", message=packed)


GOOD = [
    wire.RankEvent("j", READY),
    wire.RankEvent("j", RankReturned(0), result=b"x"),
    wire.RankEvent("j", RankRaised(0, "no"), error=ERROR),
    wire.Heartbeats((wire.RankBeat("j", Beat(0, 1, 5, False, 2, 7, "allreduce")),)),
    wire.RankOutput("j", 0, "x"),
    wire.RankTelemetry("j", 0, SNAPSHOT, (REPORT,)),
    wire.RankTelemetry("j", 0, TelemetrySnapshot()),
    wire.RankEnded("j", 0),
    wire.NoticeReport(NoticeSource.AWS, "terminate", 120.0, True),
]


def changed(message, *path, to):
    """Return a packed message with another value somewhere in it, or without the last item."""
    packed = wire.pack(message)
    place = packed
    for step in path[:-1]:
        place = place[step]
    if to is LEFT_OUT:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return packed


LEFT_OUT = object()
EVENT, BEATS, OUTPUT = GOOD[0], GOOD[3], GOOD[4]

BAD = [
    None,
    {},
    wire.pack(wire.RankEvent("j", ClusterGone())),
    wire.pack(wire.RankEvent("j", StopRequested())),
    wire.pack(wire.RankEvent("j", RankReturned(0))),
    wire.pack(wire.GiveUp("topic", False)),
    changed(EVENT, "body", to=None),
    changed(EVENT, "body", "message", to="Nothing"),
    changed(EVENT, "body", "message", to=["RankEvent"]),
    changed(EVENT, "body", "job", to=3),
    changed(EVENT, "body", "strange", to=3),
    changed(EVENT, "body", "event", to=None),
    changed(EVENT, "body", "event", to={}),
    changed(EVENT, "body", "event", "kind", to="FRESH"),
    changed(EVENT, "body", "event", "start", to=LEFT_OUT),
    changed(EVENT, "body", "event", "start", to="0"),
    changed(EVENT, "body", "event", "version", to="1"),
    changed(EVENT, "body", "event", "version", to=float("nan")),
    changed(EVENT, "body", "event", "store", to=["host"]),
    changed(EVENT, "body", "event", "gone", to=3),
    changed(GOOD[2], "body", "error", to={}),
    changed(GOOD[2], "body", "error", "frames", to=[["f"]]),
    changed(BEATS, "body", "beats", to=3),
    changed(BEATS, "body", "beats", 0, "beat", "progress", to=None),
    changed(BEATS, "body", "beats", 0, "beat", "start", to=LEFT_OUT),
    changed(OUTPUT, "body", "text", to=b"x"),
    changed(OUTPUT, "body", "start", to=LEFT_OUT),
    changed(GOOD[5], "body", "snapshot", to=[1, 2, "cpu"]),
    changed(GOOD[5], "body", "snapshot", "line", "line", to="1"),
    changed(GOOD[5], "body", "reports", 0, "values", to=[["a", "b"]]),
    changed(GOOD[7], "body", "start", to=None),
    changed(GOOD[8], "body", "source", to="a cloud"),
    changed(GOOD[8], "body", "seconds", to=float("nan")),
    changed(GOOD[8], "body", "action", to=None),
    changed(GOOD[8], "body", "host", to=1),
    changed(
        wire.Hello(Slot("w", "a", "n", "h"), {}, wire.ProcessId(1, 1.0, "")),
        *("body", "slot", "id"),
        to=3,
    ),
]


@pytest.mark.parametrize("message", GOOD, ids=lambda message: type(message).__name__)
def test_good_messages_are_handled(message):
    scene = Scene()
    scene.say(wire.pack(message))
    assert not scene.blamed
    assert repr(scene.handled) == repr([message])


@pytest.mark.parametrize("packed", BAD, ids=lambda packed: str(packed)[:60])
def test_bad_messages_are_not_handled_and_their_sender_is_blamed(packed):
    scene = Scene()
    scene.say(packed)
    assert len(scene.blamed) == 1
    assert not scene.handled


def test_a_message_of_another_protocol_is_refused_with_a_sentence():
    scene = Scene()
    scene.say({**wire.pack(OUTPUT), "protocol": wire.PROTOCOL + 1})
    (error,) = scene.blamed
    assert isinstance(error, VersionMismatch)
    assert "install the same version of nbelastic" in str(error)


def test_a_kernels_message_that_cannot_be_read_raises_nothing(caplog):
    scene = Scene()

    def step(client, message):
        raise KeyError(message.topic)

    scene.intake.of_kernels(wire.GiveUp, step)
    take = scene.scheduler.stream_handlers[wire.FROM_KERNELS]
    take(client="c", message=wire.pack(wire.GiveUp("t", False)))
    take(client="c", message=None)
    assert [record.getMessage().split()[:2] for record in own_records(caplog)] == [
        ["a", "message"]
    ] * 2
