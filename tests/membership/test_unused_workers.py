"""Workers that a job does not use are in its status and in its error."""

from __future__ import annotations

from nbelastic.membership import Machine, pack_machine, unpack_machine, view
from nbelastic.messages import (
    Limits,
    NotUsed,
    Presence,
    Reason,
    StopPending,
    StopRequested,
    Tick,
    UnusedGroup,
    UnusedReason,
    UnusedWorker,
    Waiting,
    WorkersUnused,
)

from .ranks import Script
from .stories import job, trained
from .world import World

TAKEN = [UnusedWorker(f"tcp://D{n}", UnusedReason.TAKEN, "other") for n in range(5)]
CHOSEN = UnusedWorker("tcp://E0", UnusedReason.NOT_IN_WORKERS)
ONE_TAKEN = UnusedGroup(UnusedReason.TAKEN, "other", 1, ("tcp://D0",))


def reason(world: World) -> Reason | None:
    return view(world.machine.machine, world.now).reason


def test_each_reason_is_named_with_its_workers() -> None:
    world = job("A0", np=2, elastic_timeout=100.0)
    world.tell(WorkersUnused((*TAKEN, CHOSEN)))
    taken = UnusedGroup(UnusedReason.TAKEN, "other", 5, ("tcp://D0", "tcp://D1", "tcp://D2"))
    chosen = UnusedGroup(UnusedReason.NOT_IN_WORKERS, "", 1, ("tcp://E0",))
    assert reason(world) == Waiting(Presence(1, 2, unused=(taken, chosen)), 0.0, 100.0)
    world.tell(WorkersUnused(()))
    assert reason(world) == Waiting(Presence(1, 2), 0.0, 100.0)


def test_the_error_names_them_too() -> None:
    world = job("A0", np=2, min_np=2, elastic_timeout=5.0)
    world.tell(WorkersUnused(tuple(TAKEN[:1])))
    world.run()
    assert world.outcome.error == "not_enough_workers"
    assert world.outcome.reason.presence == Presence(1, 2, unused=(ONE_TAKEN,))


def test_a_host_that_is_full_is_a_reason() -> None:
    world = job("A0", "A1", "A2", np=2, slots_per_host=1)
    world.run_for(0.1)
    (group,) = reason(world).presence.unused
    assert (group.reason, group.detail, group.number) == (UnusedReason.HOST_FULL, "1", 2)


def test_a_job_that_trains_names_them_while_it_may_have_more() -> None:
    world = trained(job("A0", np=1, min_np=1, max_np=2, script=Script(batches=100)))
    world.tell(WorkersUnused((TAKEN[0], CHOSEN)))
    assert reason(world) == NotUsed((ONE_TAKEN,)), "the user knows the other"
    world.tell(StopRequested())
    assert reason(world) == StopPending()


def test_a_job_that_is_complete_says_nothing() -> None:
    world = trained(job("A0", np=1, max_np=1, script=Script(batches=100)))
    world.tell(WorkersUnused(tuple(TAKEN)))
    assert reason(world) is None


def test_they_decide_nothing_and_survive_a_message_and_a_copy() -> None:
    machine = Machine(Limits(np=2))
    machine.handle(Tick(), 0.0)
    event = WorkersUnused((TAKEN[0], CHOSEN))
    assert machine.handle(event, 1.0) == []
    copy = unpack_machine(pack_machine(machine))
    assert copy.roster.unused == [TAKEN[0], CHOSEN]
