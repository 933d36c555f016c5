"""The scheduler's copy of a machine: stepped by a driver, looked after without one, handed over."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nbelastic.cluster.conductor import MOST_BEHIND, Conductor
from nbelastic.cluster.records import JobRecord
from nbelastic.membership import (
    Beats,
    Limits,
    LimitsChanged,
    Machine,
    Slot,
    SlotBusy,
    SlotsFound,
    Tick,
    from_dict,
    pack_event,
    to_dict,
)

SLOT = Slot("w0", "tcp://w0", "w0", "host")


class FakeStage:
    """Notes what it is asked to do."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def claim(self, job: str, record: JobRecord, effect: Any) -> Any:
        self.done.append(("claim", effect.start))
        if record.client is None:
            return SlotBusy(effect.slot.id)
        record.ranks[effect.start] = effect.slot.id
        return None

    def to_agent(self, slot: str, job: str, do: str, **fields: Any) -> None:
        self.done.append((do, fields["start"]))

    def send(self, record: JobRecord, do: str, **fields: Any) -> None:
        self.done.append((do, fields.get("seq")))

    def renew(self, slot: Slot, reason: str) -> None:
        self.done.append(("renew", slot.id))

    def drop(self, job: str) -> None:
        self.done.append(("drop", job))


class Desk:
    """A job on a scheduler."""

    def __init__(self, **limits: Any) -> None:
        self.record = JobRecord(
            client="kernel",
            topic="topic",
            payload=b"",
            workers=None,
            resources={},
            versions={},
            heartbeat_timeout=10.0,
            lease=limits.pop("lease", 3600.0),
            options={},
            machine=Machine(Limits(**limits)),
            uid="uid",
            started=0.0,
        )
        self.stage = FakeStage()
        self.conductor = Conductor("job", self.record, self.stage, lambda: 0.5)

    def find(self) -> None:
        self.conductor.take_in(pack_event(SlotsFound((SLOT,))))

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.record.archive.history]


def test_an_event_happens_when_the_driver_says_so():
    async def scene() -> None:
        desk = Desk()
        desk.find()
        assert desk.stage.done == [("event", 1)]
        assert desk.conductor.step(1, 2.0, 0.0, 1, None)
        assert desk.stage.done[1:] == [("claim", 0)]
        assert desk.record.backlog == {}
        assert desk.record.machine.roster.now == 2.0

    asyncio.run(scene())


def test_the_copy_comes_to_the_same_as_the_drivers_machine():
    async def scene() -> None:
        desk = Desk(np=1, max_np=4)
        machine = from_dict(to_dict(desk.record.machine))
        events = [LimitsChanged(max_np=2), Tick(), SlotsFound((SLOT,)), Tick()]
        for number, event in enumerate(events, 1):
            machine.handle(event, 0.3 * number, 0.7)
            assert desk.conductor.step(number, 0.3 * number, 0.7, 0, pack_event(event))
        assert to_dict(desk.record.machine) == to_dict(machine)

    asyncio.run(scene())


def test_a_step_that_is_said_twice_counts_once_and_a_missing_one_is_noticed():
    async def scene() -> None:
        desk = Desk()
        desk.find()
        assert desk.conductor.step(1, 1.0, 0.0, 1, None)
        assert desk.conductor.step(1, 1.0, 0.0, 1, None)
        assert desk.stage.done.count(("claim", 0)) == 1
        assert not desk.conductor.step(3, 2.0, 0.0, 0, pack_event(Tick()))

    asyncio.run(scene())


def test_without_a_kernel_what_has_not_been_stepped_happens_and_no_rank_is_started():
    async def scene() -> None:
        desk = Desk()
        desk.find()
        desk.conductor.abandon()
        assert ("claim", 0) in desk.stage.done
        assert desk.record.ranks == {}
        assert desk.record.machine.roster.ranks == {}
        assert desk.record.backlog == {}
        desk.conductor.stop()

    asyncio.run(scene())


def test_who_takes_over_is_sent_what_has_not_been_stepped():
    async def scene() -> None:
        desk = Desk()
        desk.find()
        desk.find()
        assert desk.conductor.step(1, 1.0, 0.0, 1, None)
        packed = desk.conductor.take_over("another", "its topic")
        assert packed["epoch"] == 2
        assert packed["seq"] == 1
        assert from_dict(packed["machine"]).roster.ranks.keys() == {0}
        desk.stage.done.clear()
        desk.conductor.catch_up()
        assert desk.stage.done == [("event", 2)]
        assert desk.conductor.step(1, 1.5, 0.0, 2, None)
        assert desk.kinds()[-1] == "attached"

    asyncio.run(scene())


def test_a_driver_that_is_far_behind_is_spared_heartbeats_and_nothing_else():
    async def scene() -> None:
        desk = Desk()
        for _ in range(3 * MOST_BEHIND):
            desk.conductor.take_in(pack_event(Beats(())))
        assert len(desk.record.backlog) == MOST_BEHIND + 1
        desk.find()
        assert len(desk.record.backlog) == MOST_BEHIND + 2

    asyncio.run(scene())


@pytest.mark.parametrize("ranks", [0, 1])
def test_a_job_that_nobody_takes_over_is_ended_and_dropped_with_its_lease(ranks):
    async def scene() -> None:
        desk = Desk(lease=0.4)
        if ranks:
            desk.find()
            desk.conductor.step(1, 1.0, 0.0, 1, None)
        desk.conductor.abandon()
        for _ in range(100):
            await asyncio.sleep(0.02)
            if ranks and ("end", 0) in desk.stage.done:
                desk.conductor.take_in({"kind": "RankLeft", "start": 0})
            if ("drop", "job") in desk.stage.done:
                break
        assert ("drop", "job") in desk.stage.done
        assert desk.kinds()[0] == "abandoned"
        assert "stopped" in desk.kinds()
        desk.conductor.stop()

    asyncio.run(scene())
