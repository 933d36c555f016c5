"""Single messages that come late, twice, out of order, or where they make no sense."""

from __future__ import annotations

import pytest

from nbelastic import messages as ev
from nbelastic.membership import Phase

from .invariants import Checked
from .ranks import Script
from .world import World, job, reached, trained

LONG, STORE = Script(batches=2000), ("host", 1)


def ready(start: int, left: int, version: int = ev.FRESH, *, failed: bool = False) -> ev.RankReady:
    return ev.RankReady(start, left, version, 1, STORE, failed)


def running() -> tuple[World, Checked]:
    """Return the world of a running job of three, and its machine."""
    world = trained(job("A0", "B0", "C0", np=3, min_np=1, script=LONG), 10)
    return world, world.machine


@pytest.mark.parametrize("reports", [True, False])
def test_a_rank_may_come_to_its_next_loop_before_all_have_reported(reports: bool) -> None:
    world = reached(Phase.FORMING, job("A0", "B0", np=2))
    next_loop = [ev.RankReady(start, 1, 0, loop=2, store=STORE) for start in (0, 1)]
    for event in (ev.RankFormed(0, 1, "shm"), next_loop[0]):
        world.tell(event)
    assert not world.records("formed")
    if reports:
        world.tell(ev.RankFormed(1, 1, "shm"))
    world.tell(next_loop[1])
    assert world.words("formed") == ["2 ranks over shared memory"]
    assert len(world.plans) == 2


def test_each_generation_is_recorded_with_its_own_communicator() -> None:
    world = reached(Phase.FORMING, job("A0", "B0", np=2, min_np=1, script=LONG))
    for start in (0, 1):
        world.tell(ev.RankFormed(start, 1, "shm"))
    world.kill("B0")
    world.run(until=lambda: len(world.plans) == 2)
    world.tell(ev.RankFormed(0, 1, "shm"))  # late, of the generation before
    assert world.view().backend == ""
    world.tell(ev.RankFormed(0, 2, "solo"))
    assert world.words("formed") == ["2 ranks over shared memory", "1 rank"]


def test_why_there_is_nothing_faster_is_said_once() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, script=LONG), 10)
    for start in (0, 1):
        world.tell(ev.RankFormed(start, 1, "gloo", "no native part on 1 of 2 ranks"))
    assert world.words("backend") == ["tensors go over Gloo: no native part on 1 of 2 ranks"]
    world.tell(ev.RankFormed(0, 1, "gloo", "no native part on 2 of 2 ranks"))
    assert len(world.records("backend")) == 2


# -- ends in an unusual order ----------------------------------------------------------------------


def test_some_come_to_the_end_of_the_loop_and_others_leave_it() -> None:
    world, machine = running()
    world.add("D0")
    world.run(until=lambda: bool(world.of(ev.Notify)))
    machine.handle(ev.LoopDone(0, 1, 20), world.now, 0.0)
    effects = machine.handle(ready(1, 1, 21), world.now, 0.0)
    (abort,) = [effect for effect in effects if isinstance(effect, ev.Abort)]
    assert abort.starts == (0, 2)
    assert abort.reason == ev.STEPS_DIFFER


def test_a_leaving_rank_may_return_in_spite_of_the_order() -> None:
    world, machine = running()
    world.tell(ev.SlotLeaving(world.worker("B0").slot.id))
    machine.handle(ev.RankReturned(1), world.now, 0.0)
    assert machine.roster.outcome is None
    assert world.phase() == Phase.GATHERING
    assert 1 not in machine.roster.ranks


def test_ranks_that_wait_at_different_places_of_the_function() -> None:
    world = job("A0", "B0", np=2, min_np=2, script=Script(setup=100.0)).run_for(1.0)
    world.tell(ev.RankReady(0, 0, ev.FRESH, 1, STORE))
    world.tell(ev.RankReady(1, 0, ev.FRESH, 0, STORE))
    world.run()
    assert world.outcome.error == "no_progress"
    assert world.outcome.reason == ev.PLACES_DIFFER
