"""Resets without progress end the job with their cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from nbelastic.membership import FRESH, Beat, Beats, LoopDone, Phase, RankNote, SlotDied, Tick
from nbelastic.membership.failure_policy import (
    ERROR_WORKERS,
    LOSSES,
    OWN_FAILURES,
    OWN_FAILURES_WITH_COMMITS,
    START_DEATHS,
    MemberLoss,
    OwnFailure,
    ProgressCheck,
)
from nbelastic.membership.reasons import (
    GenerationLeft,
    LoopsDiffer,
    LossReason,
    Lost,
    OperationsDiffer,
    OwnFailures,
    RankId,
    RepeatedLoss,
    StateLost,
)

from .ranks import Script
from .stories import job, trained
from .test_time_limits import stopped_beats
from .world import World

LONG = Script(batches=2000)
CAUSE = "rank 0 called allreduce of float32 (3,), rank 1 broadcast of int64 (1,)"
FIRST, SECOND = RankId(0, 0, "tcp://A0"), RankId(1, 1, "tcp://B0")
GAVE_UP = GenerationLeft(SECOND, True, CAUSE)


def in_each_generation(
    world: World, act: Callable[[int], None], batches: Callable[[int], int], most: int = 40
) -> None:
    """Let each generation train some batches, the number of which is asked for, then act."""
    world.run(until=lambda: bool(world.plans))
    while world.outcome is None and len(world.plans) < most:
        number = len(world.plans)
        world.run(until=lambda n=number: len(world.plans) == n and world.phase() == Phase.RUNNING)
        begun = len(world.trail)
        world.run(until=lambda b=begun, n=number: len(world.trail) >= b + batches(n))
        act(number)
        world.run(until=lambda n=number: len(world.plans) > n)


def alternating(number: int) -> int:
    return 3 + 4 * (number % 2)


# -- what the function does ----------------------------------------------------------------------


@pytest.mark.parametrize("redone", [0, 1])
def test_the_same_cause_at_the_same_commit_ends_the_job(redone: int) -> None:
    world = job("A0", "B0", np=2, script=LONG)
    in_each_generation(
        world, lambda _: world.ranks[1].give_up(CAUSE), lambda n: 5 if n == 1 else redone
    )
    assert world.outcome.error == "no_progress"
    assert len(world.plans) == 2
    assert world.outcome.reason == OwnFailures(GAVE_UP, 2, 5 + redone)


def test_causes_that_differ_in_their_generation_are_equal() -> None:
    world = job("A0", "B0", np=2, script=LONG)
    say = "a step of generation {} was left half-way"
    in_each_generation(world, lambda n: world.ranks[1].give_up(say.format(n)), lambda _: 1)
    assert len(world.plans) == 2


def test_the_cause_is_the_same_whichever_rank_reports_it() -> None:
    world = job("A0", "B0", np=2, script=LONG)
    in_each_generation(world, lambda n: world.ranks[n % 2].give_up(CAUSE), lambda _: 1)
    assert len(world.plans) == 2


def test_a_cause_may_be_told_after_what_follows_from_it() -> None:
    world = job("A0", "B0", np=2, script=LONG)

    def act(_: int) -> None:
        world.ranks[0].collective_failed()  # its connection to the other broke
        world.ranks[1].give_up(CAUSE)

    in_each_generation(world, act, lambda _: 1)
    assert len(world.plans) == 2
    assert world.outcome.reason.last == GAVE_UP


def test_different_causes_without_progress_end_the_job() -> None:
    world = job("A0", "B0", np=2, script=LONG)
    say = "ValueError: loss {}"
    in_each_generation(world, lambda n: world.ranks[0].give_up(say.format("x" * n)), lambda _: 1)
    assert world.outcome.error == "no_progress"
    assert len(world.plans) == OWN_FAILURES
    assert world.outcome.reason.last.detail == say.format("x" * OWN_FAILURES)


def test_repeating_several_commits_is_no_progress() -> None:
    world = job("A0", "B0", np=2, script=LONG)
    in_each_generation(world, lambda _: world.ranks[0].give_up(CAUSE), lambda _: 7)
    assert world.outcome.error == "no_progress"
    assert len(world.plans) == OWN_FAILURES_WITH_COMMITS


def test_with_progress_a_function_may_fail_again_and_again() -> None:
    world = job("A0", "B0", np=2, script=LONG)
    in_each_generation(world, lambda _: world.ranks[0].give_up("loss is nan"), alternating, 20)
    assert world.outcome is None


def test_broken_connections_are_no_fault_of_the_function() -> None:
    world = job("A0", "B0", np=2, script=LONG)
    in_each_generation(world, lambda _: world.ranks[0].collective_failed(), lambda _: 1, 20)
    assert world.outcome is None


def test_before_the_first_commit_it_is_the_same() -> None:
    world = job("A0", "B0", np=2, script=Script(batches=2000, commit_every=500))
    in_each_generation(world, lambda _: world.ranks[0].give_up(CAUSE), lambda _: 1)
    assert len(world.plans) == 2
    assert world.outcome.reason.commit == 0


# -- a loop that has ended on one rank -----------------------------------------------------------


def parted(asked: int, *, size: int = 2, told: bool = True) -> World:
    """Return a job in which rank 0 has come to the end of its loop after ten operations."""
    names = ["A0", "B0", "C0"][:size]
    world = trained(job(*names, np=size, stall_timeout=60.0, script=LONG), 10)
    stopped_beats(world)
    world.tell(LoopDone(0, 1, 10, operations=10))
    for _ in range(6):
        world.run_for(0.5)
        if world.outcome is None:
            beats = (
                Beat(0, 1, 7, True, 10, 10),
                Beat(1, 1, 7, True, 10, asked),
                Beat(2, 1, 7, False, 10),
            )
            world.tell(Beats(beats if told else beats[:2]))
    return world


def test_waiting_for_a_rank_whose_loop_has_ended_ends_the_job() -> None:
    world = parted(11)
    assert world.machine.roster.outcome.error == "no_progress"
    assert world.machine.roster.outcome.reason == LoopsDiffer(FIRST, SECOND)


def test_it_does_not_matter_what_a_third_rank_does() -> None:
    assert parted(11, size=3).machine.roster.ended


def test_it_may_wait_for_a_third_that_is_not_heard_of() -> None:
    assert parted(11, size=3, told=False).phase() == Phase.RUNNING


def test_a_rank_in_an_operation_begun_by_all_is_waited_for() -> None:
    world = parted(10)
    assert world.phase() == Phase.RUNNING
    world.tell(LoopDone(1, 1, 10, operations=10))
    assert world.phase() == Phase.FINISHING


def test_one_late_heartbeat_ends_nothing() -> None:
    world = trained(job("A0", "B0", np=2, script=LONG), 10)
    stopped_beats(world)
    world.tell(LoopDone(0, 1, 10, operations=3))
    world.tell(Beats((Beat(1, 1, 7, True, 10, 11),)))
    world.run_for(0.5)
    world.tell(Beats((Beat(1, 1, 8, False, 10, 3),)))
    world.tell(Tick())
    world.run_for(3.0)
    assert world.phase() == Phase.RUNNING


def test_a_heartbeat_from_before_the_end_of_the_loop_may_come_after_it() -> None:
    world = trained(job("A0", "B0", np=2, script=LONG), 10)
    stopped_beats(world)
    held_up = Beats((Beat(0, 1, 7, False, 10, 10), Beat(1, 1, 7, True, 10, 11)))
    for _ in range(8):
        world.tell(held_up)
        world.run_for(0.5)
    world.tell(LoopDone(0, 1, 12, operations=14))
    world.tell(held_up)
    world.run_for(1.0)
    assert world.outcome is None


def test_operations_of_an_earlier_generation_say_nothing_about_this_one() -> None:
    world = trained(job("A0", "B0", np=2, script=LONG), 10)
    world.ranks[1].collective_failed()
    world.run_for(2.0)
    assert (world.machine.roster.generation, world.phase()) == (2, Phase.RUNNING)
    stopped_beats(world)
    world.tell(LoopDone(0, 2, 10, operations=3))
    for _ in range(6):
        world.tell(Beats((Beat(0, 2, 7, True, 10, 3), Beat(1, 1, 7, True, 10, 900))))
        world.run_for(0.5)
    assert world.outcome is None


def test_a_new_generation_has_begun_no_operations() -> None:
    world = trained(job("A0", "B0", np=2, script=LONG), 10)
    stopped_beats(world)
    world.run_for(1.0)
    world.tell(Beats((Beat(0, 1, 7, False, 10, 900), Beat(1, 1, 7, False, 10, 900))))
    world.ranks[1].collective_failed()
    world.run_for(2.0)
    assert (world.machine.roster.generation, world.phase()) == (2, Phase.RUNNING)
    assert [rank.operations for rank in world.machine.roster.ranks.values()] == [0, 0]


# -- losses --------------------------------------------------------------------------------------


def restarting(np: int) -> World:
    world = World(job(np=np, min_np=np).machine.limits, LONG)
    world.add(*("A0", "B0")[:np], nanny=True)
    return world


@pytest.mark.parametrize("redone", [0, 1])
def test_a_worker_that_dies_at_the_same_commit_again_and_again(redone: int) -> None:
    world = restarting(2)
    in_each_generation(world, lambda _: world.kill("B0"), lambda n: 5 if n == 1 else redone)
    assert world.outcome.error == "no_progress"
    assert len(world.plans) == LOSSES
    lost = Lost(
        replace(SECOND, start=world.outcome.reason.losses[0].rank.start), LossReason.WORKER_GONE
    )
    place = 5 + (LOSSES - 1) * redone
    assert world.outcome.reason == RepeatedLoss((lost,), LOSSES, place, state_lost=False)


@pytest.mark.parametrize(("np", "deaths"), [(1, LOSSES), (3, ERROR_WORKERS * START_DEATHS)])
def test_processes_that_die_before_the_first_generation(np: int, deaths: int) -> None:
    """The function's set-up crashes: the job does not wait for `elastic_timeout`."""
    world = World(job(np=np, min_np=np).machine.limits, LONG)
    world.add(*("A0", "B0", "C0")[:np], nanny=True)
    ranks = world.machine.roster.ranks
    killed = 0
    while world.outcome is None and killed < 20:
        world.run(until=lambda: bool(ranks))
        rank = next(iter(ranks.values()))
        world.kill(rank.slot.worker.removeprefix("tcp://"))
        killed += 1
        world.run(until=lambda start=rank.start: start not in ranks)
    assert world.outcome.error == "no_progress"
    assert killed == deaths
    assert world.outcome.reason.commit == FRESH


def test_what_it_has_died_of_is_said_where_a_nanny_knows() -> None:
    world = restarting(2)

    def die(_: int) -> None:
        slot = world.worker("B0").slot.id
        world.kill("B0")
        world.later(0.1, lambda: world.tell(SlotDied(slot, "B0 was killed by signal 11 (SIGSEGV)")))

    in_each_generation(world, die, lambda _: 1)
    assert world.outcome.reason.last_death == "B0 was killed by signal 11 (SIGSEGV)"


def test_a_job_that_lacks_workers_says_what_the_last_has_died_of() -> None:
    world = trained(job("A0", "B0", np=2, min_np=2, elastic_timeout=30.0, script=LONG))
    slot = world.worker("B0").slot.id
    world.kill("B0")
    world.run_for(1.0)
    world.tell(SlotDied(slot, "B0 was killed by signal 11 (SIGSEGV)"))
    world.run_for(40.0)
    assert world.outcome.error == "not_enough_workers"
    assert world.outcome.reason.last_death == "B0 was killed by signal 11 (SIGSEGV)"


def test_a_worker_that_takes_the_state_with_it_again_and_again() -> None:
    world = restarting(1)
    in_each_generation(world, lambda _: world.kill("A0"), lambda _: 30)
    assert world.outcome.error == "no_progress"
    assert len(world.records("restarted")) == len(world.plans) - 1
    assert world.outcome.reason.state_lost
    assert world.outcome.reason.commit == world.machine.roster.newest


def test_deaths_after_another_commit_on_disk_do_not_add_up() -> None:
    world = restarting(1)

    def die(number: int) -> None:
        world.kill("A0")
        world.run(until=lambda: len(world.plans) > number)
        (member,) = world.plans[-1].members
        world.tell(RankNote(member.start, "checkpoint", "goes on", resumed=(number, 10)))

    in_each_generation(world, die, lambda _: 30, 10)
    assert world.outcome is None


def test_a_worker_killed_at_different_places_does_not_end_a_job() -> None:
    world = restarting(2)
    in_each_generation(world, lambda _: world.kill("B0"), alternating, 20)
    assert world.outcome is None


def test_different_workers_killed_in_turn_do_not_end_the_job() -> None:
    names = [f"{letter}0" for letter in "ABCDEFGH"]
    world = job(*names, np=8, min_np=1, script=LONG)
    in_each_generation(world, lambda n: world.kill(names[n]), lambda _: 1, 8)
    assert len(world.plans) == 8


def test_the_commit_that_is_lost_is_the_newest_that_was_heard_of() -> None:
    world = trained(restarting(1), 30)
    world.run_for(0.5)
    known = world.machine.roster.newest
    assert known >= 30
    world.kill("A0")
    world.run(until=lambda: bool(world.records("restarted")))
    assert world.records("restarted")[0].reason == StateLost(known)


def test_where_no_commit_was_heard_of_none_is_named() -> None:
    world = trained(restarting(1), 2)
    world.kill("A0")
    world.run(until=lambda: bool(world.records("restarted")))
    assert world.records("restarted")[0].reason == StateLost(0)


# -- the count itself ----------------------------------------------------------------------------


def test_progress_ends_a_row() -> None:
    progress = ProgressCheck()
    assert progress.note(OwnFailure("a", 3, 3)) == 0
    assert progress.note(OwnFailure("a", 9, 6)) == 0
    assert progress.note(OwnFailure("b", 9, 0)) == 0
    assert progress.own == [OwnFailure("b", 9, 0)]


def test_a_loss_ends_a_row_of_causes_and_a_cause_one_of_losses() -> None:
    progress = ProgressCheck()
    progress.note(OwnFailure("a", 3, 0))
    progress.note_loss(MemberLoss(("A/w",), 3, False))
    assert not progress.own
    assert progress.note(OwnFailure("a", 3, 0)) == 0
    assert not progress.losses


# -- ranks that wait for each other in different operations ----------------------------------------


def at_odds(
    first: str, second: str, *, asked: int = 11, waits: bool = True, told: bool = True
) -> World:
    """Return a job whose ranks say for three seconds in which operation they wait."""
    world = trained(job("A0", "B0", np=2, stall_timeout=60.0, script=LONG), 10)
    stopped_beats(world)
    for _ in range(6):
        world.run_for(0.5)
        if world.outcome is None:
            beats = (
                Beat(0, 1, 7, True, 10, 11, first),
                Beat(1, 1, 7, waits, 10, asked, second),
            )
            world.tell(Beats(beats if told else beats[:1]))
    return world


def test_waiting_in_different_operations_ends_the_job() -> None:
    world = at_odds("allreduce 'loss'", "the reduction of gradients")
    assert world.machine.roster.outcome.error == "no_progress"
    assert world.machine.roster.outcome.reason == OperationsDiffer(
        (FIRST, SECOND), ("allreduce 'loss'", "the reduction of gradients")
    )


@pytest.mark.parametrize(
    "world",
    [
        lambda: at_odds("allreduce", "allreduce"),
        lambda: at_odds("allreduce", ""),
        lambda: at_odds("allreduce", "broadcast", asked=10),
        lambda: at_odds("allreduce", "broadcast", waits=False),
        lambda: at_odds("allreduce", "broadcast", told=False),
    ],
    ids=["the same", "unknown", "one operation earlier", "computes", "not heard of"],
)
def test_ranks_that_may_reach_the_same_operation_are_waited_for(world) -> None:
    assert world().phase() == Phase.RUNNING
