"""Serialization of the machine, of events and of plans; the view of a machine."""

from __future__ import annotations

import pytest

from nbelastic.membership import pack_machine, unpack_machine, view
from nbelastic.messages import (
    Presence,
    StopPending,
    Stopping,
    StopReason,
    StopRequested,
    Tick,
    Waiting,
    WaitingForRanks,
)

from .ranks import Script
from .stories import job, trained

LONG = Script(batches=200)


def test_a_copy_knows_the_time() -> None:
    world = trained(job("A0", "B0", np=2, script=LONG))
    copy = unpack_machine(pack_machine(world.machine.machine))
    assert copy.deadline() == world.machine.deadline()
    assert copy.handle(Tick(), 0.0) == []
    assert copy.roster.now == world.machine.roster.now, "time never goes back"


def test_the_view_of_a_job_in_its_course() -> None:
    world = job(np=2, min_np=2, max_np=3, elastic_timeout=100.0, script=LONG)
    world.add("A0")
    world.run_for(10.0)
    first = view(world.machine.machine, world.now)
    assert (first.state, first.size, first.generation) == ("waiting", 0, 0)
    assert first.reason == Waiting(Presence(1, 2), pytest.approx(10.0), 100.0)
    world.add("B0")
    world.run_for(0.1)
    assert view(world.machine.machine, world.now).reason == WaitingForRanks(2, generation=0)
    trained(world, 20)
    running = view(world.machine.machine, world.now)
    assert (running.state, running.size, running.min_np, running.max_np) == ("running", 2, 2, 3)
    assert [(r.rank, r.worker, r.state) for r in running.ranks] == [
        (0, "tcp://A0", "running"),
        (1, "tcp://B0", "running"),
    ]
    assert running.commits > 5
    world.add("C0")
    world.run_for(0.1)
    newcomer = view(world.machine.machine, world.now).ranks[-1]
    assert (newcomer.rank, newcomer.state) == (None, "starting")
    world.tell(StopRequested())
    assert view(world.machine.machine, world.now).reason == StopPending()
    world.run()
    last = view(world.machine.machine, world.now)
    assert last.state == "stopped"
    assert last.reason == Stopping(StopReason.STOPPED, at_commit=True)
