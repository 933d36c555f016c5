"""Workers that a job does not use, in its status and in its error; the view of a job."""

from __future__ import annotations

from typing import Any

import pytest

from nbelastic import messages as ev

from .ranks import Script
from .world import World, job, trained

TAKEN = [ev.UnusedWorker(f"tcp://D{n}", ev.UnusedReason.TAKEN, "other") for n in range(5)]
CHOSEN = ev.UnusedWorker("tcp://E0", ev.UnusedReason.NOT_IN_WORKERS)
ONE_TAKEN = ev.UnusedGroup(ev.UnusedReason.TAKEN, "other", 1, ("tcp://D0",))


def reason(world: World) -> ev.Reason | None:
    return world.view().reason


def test_each_reason_is_named_with_its_workers() -> None:
    world = job("A0", np=2, elastic_timeout=100.0)
    world.tell(ev.WorkersUnused((*TAKEN, CHOSEN)))
    taken = ev.UnusedGroup(ev.UnusedReason.TAKEN, "other", 5, ("tcp://D0", "tcp://D1", "tcp://D2"))
    chosen = ev.UnusedGroup(ev.UnusedReason.NOT_IN_WORKERS, "", 1, ("tcp://E0",))
    assert reason(world) == ev.Waiting(ev.Presence(1, 2, unused=(taken, chosen)), 0.0, 100.0)
    world.tell(ev.WorkersUnused(()))
    assert reason(world) == ev.Waiting(ev.Presence(1, 2), 0.0, 100.0)


def test_a_host_that_is_full_is_a_reason() -> None:
    world = job("A0", "A1", "A2", np=2, slots_per_host=1)
    world.run_for(0.1)
    (group,) = reason(world).presence.unused
    assert (group.reason, group.detail, group.number) == (ev.UnusedReason.HOST_FULL, "1", 2)


def test_a_job_that_trains_names_them_while_it_may_have_more() -> None:
    world = trained(job("A0", np=1, min_np=1, max_np=2, script=Script(batches=100)))
    world.tell(ev.WorkersUnused((TAKEN[0], CHOSEN)))
    assert reason(world) == ev.NotUsed((ONE_TAKEN,)), "the user knows the other"
    world.tell(ev.StopRequested())
    assert reason(world) == ev.STOP_PENDING


# -- workers with tasks of others: the job starts without them, and does not restart them ---------


def held(world: World, *names: str) -> None:
    """Have ranks wait for other tasks of these workers."""
    for name in names:
        world.occupy(name)
    busy = [ev.UnusedWorker(world.worker(name).slot.worker, ev.UnusedReason.BUSY) for name in names]
    world.tell(ev.WorkersUnused(tuple(busy)))


def free(world: World, *names: str) -> None:
    world.tell(ev.WorkersUnused(()))
    for name in names:
        world.thaw(name)


def busy_job(*names: str, busy: tuple[str, ...], batches: int = 400, **limits: Any) -> World:
    world = job(*names, script=Script(batches=batches), **limits)
    world.heartbeat_timeout = 1e9  # of a rank that has not begun, a worker says nothing
    held(world, *busy)
    return world


def test_a_job_starts_with_what_is_free_once_min_np_is_met() -> None:
    world = busy_job("A0", "A1", busy=("A1",), np=2, min_np=1, max_np=2, elastic_timeout=20.0)
    world.run_for(5.0)
    assert world.sizes() == [1]
    world.run()
    assert (world.outcome.kind, world.of(ev.RestartWorker)) == ("finished", [])


def test_a_rank_that_was_held_up_for_long_joins_when_its_worker_is_free() -> None:
    world = busy_job("A0", "A1", busy=("A1",), np=2, min_np=1, max_np=2, elastic_timeout=5.0)
    world.run_for(12.0)
    assert (world.sizes(), world.of(ev.RestartWorker)) == ([1], [])
    free(world, "A1")
    world.run_for(3.0)
    assert (world.sizes(), world.of(ev.RestartWorker)) == ([1, 2], [])


@pytest.mark.parametrize("names", [("A0", "A1"), ("A1",)], ids=["one is busy", "all are"])
def test_a_job_that_needs_busy_workers_fails_in_time_and_names_them(names) -> None:
    size = len(names)
    world = busy_job(*names, busy=("A1",), np=size, min_np=size, elastic_timeout=20.0).run()
    assert world.outcome.error == "not_enough_workers"
    (group,) = world.outcome.reason.presence.unused
    assert (group.reason, group.number) == (ev.UnusedReason.BUSY, 1)
    assert world.of(ev.RestartWorker) == []
    assert 20.0 <= world.now < 25.0


def test_a_rank_that_does_not_begin_though_its_worker_is_free_is_evicted_as_ever() -> None:
    world = busy_job("A0", "A1", busy=("A1",), np=2, min_np=1, max_np=2, elastic_timeout=5.0)
    world.run_for(12.0)
    world.freeze("A1")
    world.tell(ev.WorkersUnused(()))  # and yet its rank does not begin
    world.run_for(10.0)
    assert [slot.name for slot in world.evicted()] == ["A1"]
    world.run_for(10.0)
    assert [effect.slot.name for effect in world.of(ev.RestartWorker)] == ["A1"]


# -- the view of a job in its course ---------------------------------------------------------------


LONG = Script(batches=200)


def test_the_view_of_a_job_in_its_course() -> None:
    world = job(np=2, min_np=2, max_np=3, elastic_timeout=100.0, script=LONG)
    world.add("A0")
    world.run_for(10.0)
    first = world.view()
    assert (first.state, first.size, first.generation) == ("waiting", 0, 0)
    assert first.reason == ev.Waiting(ev.Presence(1, 2), pytest.approx(10.0), 100.0)
    world.add("B0")
    world.run_for(0.1)
    assert world.view().reason == ev.WaitingForRanks(2, generation=0)
    trained(world, 20)
    running = world.view()
    assert (running.state, running.size, running.min_np, running.max_np) == ("running", 2, 2, 3)
    assert [(r.rank, r.worker, r.state) for r in running.ranks] == [
        (0, "tcp://A0", "running"),
        (1, "tcp://B0", "running"),
    ]
    assert running.commits > 5
    world.add("C0")
    world.run_for(0.1)
    newcomer = world.view().ranks[-1]
    assert (newcomer.rank, newcomer.state) == (None, "starting")
    world.tell(ev.StopRequested())
    assert world.view().reason == ev.STOP_PENDING
    world.run()
    last = world.view()
    assert last.state == "stopped"
    assert last.reason == ev.Stopping(ev.StopReason.STOPPED, at_commit=True)
