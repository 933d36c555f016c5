"""Workers with tasks of others: the job starts without them, and does not restart them."""

from __future__ import annotations

from typing import Any

from nbelastic.messages import RestartWorker, UnusedReason, UnusedWorker, WorkersUnused

from .ranks import Script
from .stories import job
from .world import World


def held(world: World, *names: str) -> None:
    """Have ranks wait for other tasks of these workers."""
    for name in names:
        world.occupy(name)
    busy = [UnusedWorker(world.worker(name).slot.worker, UnusedReason.BUSY) for name in names]
    world.tell(WorkersUnused(tuple(busy)))


def free(world: World, *names: str) -> None:
    world.tell(WorkersUnused(()))
    for name in names:
        world.thaw(name)


def busy_job(*names: str, busy: tuple[str, ...], batches: int = 400, **limits: Any) -> World:
    world = job(*names, script=Script(batches=batches), **limits)
    world.heartbeat_timeout = 1e9  # of a rank that has not begun, a worker says nothing
    held(world, *busy)
    return world


def restarts(world: World) -> list[RestartWorker]:
    return world.of(RestartWorker)


def test_a_job_starts_with_what_is_free_once_min_np_is_met() -> None:
    world = busy_job("A0", "A1", busy=("A1",), np=2, min_np=1, max_np=2, elastic_timeout=20.0)
    world.run_for(5.0)
    assert world.sizes() == [1]
    world.run()
    assert (world.outcome.kind, restarts(world)) == ("finished", [])


def test_a_rank_that_was_held_up_for_long_joins_when_its_worker_is_free() -> None:
    world = busy_job("A0", "A1", busy=("A1",), np=2, min_np=1, max_np=2, elastic_timeout=5.0)
    world.run_for(12.0)
    assert (world.sizes(), restarts(world)) == ([1], [])
    free(world, "A1")
    world.run_for(3.0)
    assert (world.sizes(), restarts(world)) == ([1, 2], [])


def test_it_waits_for_the_others_that_were_started_with_it() -> None:
    names = ("A0", "A1", "A2")
    world = busy_job(*names, busy=("A2",), np=3, min_np=1, max_np=3, elastic_timeout=20.0)
    world.run_for(5.0)
    assert world.sizes() == [2]


def test_a_job_that_needs_busy_workers_fails_in_time_and_names_them() -> None:
    world = busy_job("A0", "A1", busy=("A1",), np=2, min_np=2, elastic_timeout=20.0)
    world.run()
    assert world.outcome.error == "not_enough_workers"
    (group,) = world.outcome.reason.presence.unused
    assert (group.reason, group.number) == (UnusedReason.BUSY, 1)
    assert restarts(world) == []
    assert 20.0 <= world.now < 25.0


def test_all_workers_busy_is_the_same() -> None:
    world = busy_job("A0", busy=("A0",), np=1, elastic_timeout=20.0)
    world.run()
    assert (world.outcome.error, restarts(world)) == ("not_enough_workers", [])


def test_a_rank_that_does_not_begin_though_its_worker_is_free_is_evicted_as_ever() -> None:
    world = busy_job("A0", "A1", busy=("A1",), np=2, min_np=1, max_np=2, elastic_timeout=5.0)
    world.run_for(12.0)
    world.freeze("A1")
    world.tell(WorkersUnused(()))  # and yet its rank does not begin
    world.run_for(10.0)
    assert [slot.name for slot in world.evicted()] == ["A1"]
    world.run_for(10.0)
    assert [effect.slot.name for effect in restarts(world)] == ["A1"]
