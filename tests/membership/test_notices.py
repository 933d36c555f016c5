"""Machines that say they will go: left at a commit, shown with the time that is left."""

from __future__ import annotations

import json

from nbelastic.membership import (
    NoticeGiven,
    NoticeSource,
    SlotLeaving,
    SlotsFound,
    SlotStays,
    from_dict,
    pack_event,
    to_dict,
    unpack_event,
    view,
)
from nbelastic.membership.reasons import LossReason, Noticed, NoticeRevoked

from .ranks import Script
from .stories import batches, job, trained
from .world import World

LONG = Script(batches=20_000)


def noticed(world: World, name: str, seconds: float = 120.0) -> SlotLeaving:
    notice = NoticeGiven(name, NoticeSource.AWS, "terminate", seconds)
    return SlotLeaving(world.worker(name).slot.id, notice=notice)


def stays(world: World, name: str) -> SlotStays:
    return SlotStays(world.worker(name).slot.id)


def test_a_hundred_notices_cost_no_step() -> None:
    world = trained(job("A0", "B0", "C0", np=3, min_np=1, script=LONG))
    names = ["A0", "B0", "C0"]
    for number in range(100):
        world.add(f"N{number}")
        world.run_for(1.0)
        world.tell(noticed(world, names.pop(0)))
        names.append(f"N{number}")
        world.run_for(1.0)
    assert batches(world) == sorted(set(batches(world))), "none was trained again"
    assert len(world.records("notice")) == 100
    assert {record.reason.reason for record in world.records("left")} == {LossReason.LEFT}
    assert not world.records("lost")


def test_the_status_counts_down_until_the_worker_is_gone() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, script=LONG))
    world.tell(noticed(world, "B0"))
    world.run_for(20.0)
    (shown,) = view(world.machine.machine, world.now).reason.notices
    assert shown.name == "B0"
    assert 99.0 < shown.seconds <= 101.0
    world.kill("B0")
    world.run_for(1.0)
    assert not isinstance(view(world.machine.machine, world.now).reason, Noticed)


def test_a_notice_is_recorded_once() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, script=LONG))
    world.tell(noticed(world, "B0"))
    world.tell(noticed(world, "B0"))
    assert [record.name for record in world.records("notice")] == ["B0"]


def test_the_last_holder_stays_for_as_long_as_its_machine_does() -> None:
    world = trained(job("A0", np=1, min_np=1, script=LONG), 20)
    world.tell(noticed(world, "A0"))
    world.run_for(60.0)
    assert world.sizes() == [1]
    world.add("B0")
    world.run_for(5.0)
    assert [rank.slot.name for rank in world.machine.machine.roster.ranks.values()] == ["B0"]
    assert batches(world) == sorted(set(batches(world)))


def test_a_rank_that_was_not_sent_away_yet_stays_when_the_notice_is_revoked() -> None:
    world = trained(job("A0", np=1, min_np=1, script=LONG), 20)
    world.tell(noticed(world, "A0"))
    world.run_for(5.0)
    world.tell(stays(world, "A0"))
    world.run_for(200.0)
    assert world.sizes() == [1]
    assert [type(record.reason) for record in world.records("notice")] == [
        NoticeGiven,
        NoticeRevoked,
    ]


def test_a_slot_can_be_used_again_when_the_notice_is_revoked() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, script=LONG))
    world.tell(noticed(world, "B0"))
    world.run_for(5.0)
    slot = world.worker("B0").slot
    world.tell(SlotsFound((slot,)))
    world.run_for(5.0)
    assert world.sizes()[-1] == 1
    world.tell(stays(world, "B0"))
    world.tell(SlotsFound((slot,)))
    world.run_for(5.0)
    assert world.sizes()[-1] == 2


def test_a_revocation_of_nothing_changes_nothing() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, script=LONG))
    before = json.dumps(to_dict(world.machine.machine))
    assert world.machine.machine.handle(stays(world, "B0"), world.machine.machine.roster.now) == []
    assert json.dumps(to_dict(world.machine.machine)) == before


def test_events_and_machines_with_notices_travel() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, script=LONG))
    event = noticed(world, "B0")
    assert unpack_event(json.loads(json.dumps(pack_event(event)))) == event
    world.tell(event)
    copy = from_dict(json.loads(json.dumps(to_dict(world.machine.machine))))
    assert copy.roster.notices == world.machine.machine.roster.notices != {}
