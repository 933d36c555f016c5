"""The last holders of the state, asked to leave, stay until another rank has it."""

from __future__ import annotations

import pytest

from nbelastic.membership import Phase
from nbelastic.membership.rules import LONGEST_STAY, STAY
from nbelastic.messages import EndRank, Publish

from .ranks import Script
from .stories import batches, job, trained, workers
from .world import World

LONG = Script(batches=2000, setup=3.0)


def told(world: World) -> list[int]:
    return [each.start for each in world.of(EndRank) if each.how == "leave"]


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


def test_the_last_one_trains_on_until_others_are_ready() -> None:
    world = retired("A0", new=0, min_np=1)
    before = len(world.trail)
    world.run_for(5.0)
    assert len(world.trail) > before
    assert told(world) == []
    assert len(world.plans) == 1


def test_who_stays_until_its_time_is_over_is_told_then() -> None:
    world = retired("A0", "A1", new=0, min_np=1)
    world.run_for(STAY - 0.5)
    assert told(world) == [0]
    world.run_for(1.0)
    assert told(world) == [0, 1]
    world.run_for(5.0)
    world.add("N0")
    world.run(until=lambda: bool(world.records("restarted")))


@pytest.mark.parametrize("number", [1, 2])
def test_the_last_one_stays_longer_while_newcomers_are_prepared(number: int) -> None:
    slow = Script(batches=20_000, setup=60.0)
    names = [f"A{each}" for each in range(number)]
    world = trained(job(*names, np=number, min_np=number, script=slow), 20)
    world.add("N0", "N1")
    world.retire(names[0], grace=200.0)
    world.run_for(30.0)
    if number > 1:
        world.retire(names[1], grace=200.0)
    world.run_for(70.0)
    assert not world.records("restarted")
    assert batches(world) == sorted(batches(world)), "nothing is done again"
    assert set(workers(world.plans[-1])) <= {"N0", "N1"}


def test_newcomers_that_never_come_keep_nobody_for_ever() -> None:
    world = trained(job("A0", np=1, script=Script(batches=20_000, setup=500.0)), 20)
    world.add("N0")
    world.retire("A0", grace=1000.0)
    world.run_for(LONGEST_STAY - 5.0)
    assert told(world) == []
    world.run_for(10.0)
    assert told(world) == [0]


def test_a_worker_that_closes_soon_does_not_stay() -> None:
    from nbelastic.messages import SlotLeaving

    world = trained(job("A0", np=1, script=LONG), 20)
    world.tell(SlotLeaving(world.worker("A0").slot.id))
    assert told(world) == []
    world.tell(SlotLeaving(world.worker("A0").slot.id, soon=True))
    assert told(world) == [0]


def test_a_newcomer_that_dies_without_the_state_changes_nothing() -> None:
    world = retired("A0", new=1, min_np=1)
    world.run(until=lambda: len(world.of(Publish)) == 2)
    world.kill("N0")
    world.run_for(2.0)
    assert workers(world.plans[-1]) == ["A0"]
    world.add("N1")
    world.run_for(6.0)
    assert workers(world.plans[-1]) == ["N1"]
    assert not world.records("restarted")


def test_a_job_of_one_has_two_for_a_moment() -> None:
    world = retired("A0", new=2, min_np=1, max_np=1)
    world.run_for(10.0)
    assert [len(plan.members) for plan in world.plans] == [1, 2, 1]
    assert not world.records("restarted")


def test_a_host_with_no_room_has_one_more_for_a_moment() -> None:
    world = trained(job("A0", np=1, min_np=1, script=LONG, slots_per_host=1), 20)
    world.add("A1")
    world.retire("A0", grace=30.0)
    world.run_for(10.0)
    assert workers(world.plans[-1]) == ["A1"]
    assert not world.records("restarted")


def test_a_loop_that_ends_meanwhile_ends_the_job_well() -> None:
    world = trained(job("A0", np=1, script=Script(batches=60)), 20)
    world.retire("A0", grace=30.0)
    world.run()
    assert world.outcome.kind == "finished"
