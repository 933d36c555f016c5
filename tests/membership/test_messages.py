"""Single messages that come late, twice, out of order, or where they make no sense."""

from __future__ import annotations

import pytest

from nbelastic import messages as ev
from nbelastic.membership import Phase

from .invariants import Checked, contents
from .ranks import Script
from .world import World, job, reached, trained

LONG, STORE = Script(batches=2000), ("host", 1)


def ready(start: int, left: int, version: int = ev.FRESH, *, failed: bool = False) -> ev.RankReady:
    return ev.RankReady(start, left, version, 1, STORE, failed)


def running() -> tuple[World, Checked]:
    """Return the world of a running job of three, and its machine."""
    world = trained(job("A0", "B0", "C0", np=3, min_np=1, script=LONG), 10)
    return world, world.machine


# -- older generations ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        ready(0, 0),
        ready(0, 1, 5, failed=True),
        ev.RankFormed(0, 1),
        ev.LoopDone(0, 1, 5),
        ev.RankReturned(1),
        ev.RankRaised(1, "ValueError: old"),
        ev.RankLeft(1),
        ev.Beats((ev.Beat(1, 1, 5, True, 99),)),
        ready(7, 0),
    ],
    ids=lambda event: f"{type(event).__name__}-{getattr(event, 'start', '')}",
)
def test_a_message_from_before_changes_nothing(event: ev.Event) -> None:
    world, machine = running()
    world.kill("B0")
    world.run(until=lambda: len(world.plans) == 2 and world.phase() == Phase.RUNNING)
    before = contents(machine.machine)
    assert machine.handle(event, world.now, 0.0) == []
    after = contents(machine.machine)
    assert {**after, "now": 0} == {**before, "now": 0}


def test_a_rank_that_was_ready_before_an_abort_overtook_its_plan() -> None:
    world, machine = running()
    world.kill("B0")
    world.run(until=lambda: len(world.plans) == 2)
    machine.handle(ev.SlotGone(world.worker("C0").slot.id), world.now, 0.0)
    assert world.phase() == Phase.GATHERING
    effects = machine.handle(ready(0, 2, 12), world.now, 0.0)
    (plan,) = [effect.plan for effect in effects if isinstance(effect, ev.Publish)]
    assert [member.start for member in plan.members] == [0]


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
    assert world.reasons("formed") == [ev.Connected(2, "shm")]
    assert len(world.plans) == 2


def test_each_generation_is_recorded_with_its_own_communicator() -> None:
    world = reached(Phase.FORMING, job("A0", "B0", np=2, min_np=1, script=LONG))

    def backend() -> str:
        return world.view().backend

    assert backend() == ""
    for start in (0, 1):
        world.tell(ev.RankFormed(start, 1, "shm"))
    assert backend() == "shm"
    world.kill("B0")
    world.run(until=lambda: len(world.plans) == 2)
    assert backend() == ""
    world.tell(ev.RankFormed(0, 1, "shm"))  # late, of the generation before
    assert backend() == ""
    world.tell(ev.RankFormed(0, 2, "solo"))
    assert backend() == "solo"
    formed = world.reasons("formed")
    assert formed == [ev.Connected(2, "shm"), ev.Connected(1, "solo")]


def test_why_there_is_nothing_faster_is_said_once() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, script=LONG), 10)
    for start in (0, 1):
        world.tell(ev.RankFormed(start, 1, "gloo", "no native part on 1 of 2 ranks"))
    assert world.reasons("backend") == [ev.Connected(2, "gloo", "no native part on 1 of 2 ranks")]
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


def test_a_planned_leave_while_another_rank_has_ended_its_loop() -> None:
    world, machine = running()
    world.retire("B0")
    machine.handle(ev.LoopDone(0, 1, 20), world.now, 0.0)
    effects = machine.handle(ev.RankLeft(1), world.now, 0.0)
    (abort,) = [effect for effect in effects if isinstance(effect, ev.Abort)]
    assert abort.starts == (0, 2)


def test_a_leaving_rank_may_return_in_spite_of_the_order() -> None:
    world, machine = running()
    world.tell(ev.SlotLeaving(world.worker("B0").slot.id))
    machine.handle(ev.RankReturned(1), world.now, 0.0)
    assert machine.roster.outcome is None
    assert world.phase() == Phase.GATHERING
    assert 1 not in machine.roster.ranks


def test_what_comes_after_a_rank_returned_is_ignored() -> None:
    world = reached(Phase.FINISHING, job("A0", "B0", np=2, script=Script(batches=5, after=1.0)))
    world.ranks[0].end(ev.RankReturned(0))
    world.run_for(0.1)
    for event in (
        ev.RankRaised(0, "ValueError: late"),
        ev.RankLeft(0),
        ev.SlotGone("A0#1"),
        ready(0, 1),
    ):
        assert world.machine.handle(event, world.now, 0.0) == []
    assert world.run().outcome.kind == "finished"


def test_ready_in_the_wrong_place_after_the_loop() -> None:
    world = reached(Phase.FINISHING, job("A0", "B0", np=2, script=Script(batches=5, after=1.0)))
    world.tell(ready(0, 1, 5, failed=True))
    world.run()
    assert world.outcome.error == "rank_lost"


def test_ranks_that_wait_at_different_places_of_the_function() -> None:
    world = job("A0", "B0", np=2, min_np=2, script=Script(setup=100.0)).run_for(1.0)
    world.tell(ev.RankReady(0, 0, ev.FRESH, 1, STORE))
    world.tell(ev.RankReady(1, 0, ev.FRESH, 0, STORE))
    world.run()
    assert world.outcome.error == "no_progress"
    assert world.outcome.reason == ev.PLACES_DIFFER


def test_a_note_of_a_rank_is_recorded_and_decides_nothing() -> None:
    world, machine = running()
    before = contents(machine.machine)
    (record,) = machine.handle(
        ev.RankNote(1, "checkpoint", "commit 3 is in a file"), world.now, 0.0
    )
    assert isinstance(record, ev.Record)
    assert (record.kind, record.start) == ("checkpoint", 1)
    assert record.reason == ev.Text("commit 3 is in a file")
    assert machine.handle(ev.RankNote(7, "checkpoint", "of no rank"), world.now, 0.0) == []
    times = {"now": 0.0, "advanced": 0.0}
    assert contents(machine.machine) | times == before | times


# -- after the end -------------------------------------------------------------------------------


def test_a_rank_that_dies_while_the_job_ends() -> None:
    world, machine = running()
    world.rank_on("A0").deaf = True
    machine.handle(ev.RankReturned(1), world.now, 0.0)
    effects = machine.handle(ev.SlotGone(world.worker("A0").slot.id), world.now, 0.0)
    effects += machine.handle(ev.RankLeft(2), world.now, 0.0)
    assert not any(isinstance(effect, ev.RestartWorker) for effect in effects)
    assert world.phase() == Phase.ENDED
