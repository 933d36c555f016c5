"""Machines that say they will go: left at a commit, shown with the time that is left."""

from __future__ import annotations

import pytest

from nbelastic import messages as ev
from nbelastic.membership import Phase
from nbelastic.membership.rules import LONGEST_STAY, STAY

from .ranks import Script
from .world import World, batches, job, trained, workers

LONG = Script(batches=20_000)


def noticed(world: World, name: str, seconds: float = 120.0) -> ev.SlotLeaving:
    notice = ev.Notice(ev.NoticeSource.AWS, "terminate", seconds, name)
    return ev.SlotLeaving(world.worker(name).slot.id, notice=notice)


def stays(world: World, name: str) -> ev.SlotStays:
    return ev.SlotStays(world.worker(name).slot.id)


def risk(world: World, name: str) -> ev.SlotLeaving:
    notice = ev.Notice(ev.NoticeSource.AWS, "rebalance", name=name, soft=True)
    return ev.SlotLeaving(world.worker(name).slot.id, notice=notice)


def names(world: World) -> list[str]:
    """Return the workers that have ranks."""
    return sorted(rank.slot.name for rank in world.machine.roster.ranks.values())


def test_a_hundred_notices_cost_no_step() -> None:
    """That of every third machine is revoked once, and given again."""
    world = trained(job("A0", "B0", "C0", np=3, min_np=1, script=LONG))
    workers = ["A0", "B0", "C0"]
    for number in range(100):
        world.add(f"N{number}")
        world.run_for(1.0)
        name = workers.pop(0)
        workers.append(f"N{number}")
        world.tell(noticed(world, name))
        world.run_for(1.0)
        if number % 3 == 0:
            world.tell(stays(world, name))
            world.tell(ev.SlotsFound((world.worker(name).slot,)))
            world.run_for(1.0)
            world.tell(noticed(world, name))
            world.run_for(1.0)
        world.kill(name)
    assert batches(world) == sorted(set(batches(world))), "none was trained again"
    assert {record.reason.reason for record in world.records("left")} == {ev.LossReason.LEFT}
    assert not world.records("lost")


def test_the_status_counts_down_until_the_worker_is_gone() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, script=LONG))
    world.tell(noticed(world, "B0"))
    world.run_for(20.0)
    assert world.reason() == "worker B0 leaves in 1:40: AWS spot (terminate)"
    world.kill("B0")
    world.run_for(1.0)
    assert world.present_reasons() == []


def test_a_rank_that_was_not_sent_away_yet_stays_when_the_notice_is_revoked() -> None:
    world = trained(job("A0", np=1, min_np=1, script=LONG), 20)
    world.tell(noticed(world, "A0"))
    world.run_for(5.0)
    world.tell(stays(world, "A0"))
    world.run_for(200.0)
    assert world.sizes() == [1]
    assert [record.reason.revoked for record in world.records("notice")] == [False, True]


# -- where all leave -------------------------------------------------------------------------------


def test_the_state_is_saved_by_one_rank_where_all_leave() -> None:
    """With half of the time left, so that the file is there before the machine is gone."""
    world = trained(job("A0", "B0", np=2, min_np=1, checkpoint=True, script=LONG), 20)
    world.tell(noticed(world, "A0"))
    world.tell(noticed(world, "B0"))
    world.run_for(50.0)
    assert world.sizes() == [2, 1], "the last one trains on while there is time"
    world.run_for(10.0)
    assert names(world) == []
    assert [effect.save > 20 for effect in world.of(ev.EndRank)] == [False, True]
    assert batches(world) == sorted(set(batches(world)))
    assert not world.records("warning")


def test_of_ranks_that_leave_together_one_saves() -> None:
    """Their time is over at the same moment."""
    world = trained(job("A0", "B0", np=2, min_np=1, checkpoint=True, script=LONG), 20)
    for name in ("A0", "B0"):
        slot = world.worker(name).slot.id
        for rank in world.machine.roster.on_slot(slot):
            rank.leaving, rank.gone_at = True, world.now + 50.0
    world.run_for(5.0)
    assert sorted(effect.save for effect in world.of(ev.EndRank)) == [
        0.0,
        pytest.approx(25.0, abs=3.0),
    ]


def test_that_nothing_keeps_the_state_is_said_in_time_and_once() -> None:
    world = trained(job("A0", "B0", np=2, min_np=2, script=LONG), 20)
    world.tell(noticed(world, "A0"))
    assert not world.records("warning")
    world.tell(noticed(world, "B0"))
    world.tell(noticed(world, "B0", 60.0))
    assert world.reasons("warning") == [ev.NONE_STAYS]


# -- machines at risk ------------------------------------------------------------------------------


def test_a_rank_at_risk_is_replaced_in_one_reset_and_nothing_is_redone() -> None:
    world = trained(job("A0", "B0", np=2, min_np=2, max_np=2, script=LONG), 20)
    world.tell(risk(world, "A0"))
    world.run_for(300.0)
    assert world.sizes() == [2], "nothing happens while none joins"
    world.add("C0")
    world.run_for(10.0)
    assert names(world) == ["B0", "C0"]
    assert world.sizes() == [2, 2]
    assert batches(world) == sorted(set(batches(world)))
    assert not world.records("lost")


# -- the last holders of the state, asked to leave, stay until another rank has it ----------------


SLOW = Script(batches=2000, setup=3.0)


def told(world: World) -> list[int]:
    return [each.start for each in world.of(ev.EndRank) if each.how == "leave"]


def retired(*names: str, new: int, **limits: int) -> World:
    """Return a job that has trained, whose workers are all retired while others have just come."""
    world = trained(job(*names, np=len(names), script=LONG, **limits), 20)
    world.add(*(f"N{number}" for number in range(new)))
    for name in names:
        world.retire(name, grace=30.0)
    return world


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("grows", [True, False])
def test_the_state_outlives_all_who_held_it(number: int, grows: bool) -> None:
    names = [f"A{each}" for each in range(number)]
    limits = {"min_np": 1} if grows else {"min_np": number, "max_np": number}
    world = retired(*names, new=number, **limits)
    world.run_for(20.0)
    assert not world.records("restarted")
    assert set(workers(world.plans[-1])) == {f"N{each}" for each in range(number)}
    assert world.phase() == Phase.RUNNING
    assert batches(world) == sorted(batches(world)), "nothing is done again"
    assert sorted(told(world)) == list(range(number))


def test_who_stays_until_its_time_is_over_is_told_then() -> None:
    world = retired("A0", "A1", new=0, min_np=1, checkpoint=True)
    world.run_for(STAY - 0.5)
    assert told(world) == [0]
    world.run_for(1.0)
    assert told(world) == [0, 1]
    assert [effect.save for effect in world.of(ev.EndRank)] == [0.0, pytest.approx(15.0, abs=1.0)]
    world.run_for(5.0)
    world.add("N0")
    world.run(until=lambda: bool(world.records("restarted")))


def test_newcomers_that_never_come_keep_nobody_for_ever() -> None:
    world = trained(job("A0", np=1, script=Script(batches=20_000, setup=500.0)), 20)
    world.add("N0")
    world.retire("A0", grace=1000.0)
    world.run_for(LONGEST_STAY - 5.0)
    assert told(world) == []
    world.run_for(10.0)
    assert told(world) == [0]


def test_a_worker_that_closes_soon_does_not_stay() -> None:
    world = trained(job("A0", np=1, script=SLOW), 20)
    world.tell(ev.SlotLeaving(world.worker("A0").slot.id))
    assert told(world) == []
    world.tell(ev.SlotLeaving(world.worker("A0").slot.id, soon=True))
    assert told(world) == [0]
