"""Resets without progress end the job with their cause."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from nbelastic import messages as ev
from nbelastic.membership import Phase
from nbelastic.membership.failure_policy import ANY_KIND, SAME_KIND

from .ranks import Script
from .test_time_limits import stopped_beats
from .world import World, job, trained

LONG = Script(batches=2000)
MOST = 25
CAUSE = "rank 0 called allreduce of float32 (3,), rank 1 broadcast of int64 (1,)"
FIRST, SECOND = ev.RankId(0, 0, "tcp://A0"), ev.RankId(1, 1, "tcp://B0")


def restarting(np: int, **limits: Any) -> World:
    """Return a job whose workers have nannies."""
    names = ("A0", "B0", "C0")[:np]
    return job(*names, np=np, min_np=np, script=LONG, nanny=True, **limits)


def in_each_generation(
    world: World, act: Callable[[int], None], batches: Callable[[int], int], most: int = 25
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


def always(number: int) -> Callable[[int], int]:
    return lambda _: number


def alternating(number: int) -> int:
    return 3 + 4 * (number % 2)


# -- what ends a job, and what does not ------------------------------------------------------------


def give_up(world: World, number: int, cause: str = CAUSE, rank: int = 1) -> None:
    world.ranks[rank].give_up(cause)


def in_words_of_its_own(world: World, number: int) -> None:
    world.ranks[0].give_up("ValueError: loss " + "x" * number)


def in_words_of_the_generation(world: World, number: int) -> None:
    world.ranks[1].give_up(f"a step of generation {number} was left half-way")


def of_whichever_rank(world: World, number: int) -> None:
    world.ranks[number % 2].give_up(CAUSE)


def after_its_consequence(world: World, number: int) -> None:
    world.ranks[0].collective_failed()  # its connection to the other broke
    world.ranks[1].give_up(CAUSE)


def connection(world: World, number: int) -> None:
    world.ranks[0].collective_failed()


def all_wait(world: World, number: int) -> None:
    world.rings[world.plans[-1].generation].broken = True


def killed(world: World, number: int) -> None:
    world.kill("B0")


def by_turns(world: World, number: int) -> None:
    world.kill("AB"[number % 2] + "0")


def an_error_and_a_loss(world: World, number: int) -> None:
    give_up(world, number, rank=0) if number % 2 else killed(world, number)


FAILURES = [
    # each generation trains so many batches, then this happens: the count, and the plans until then
    (give_up, always(0), ev.Counted.SAME_ERROR, 2),
    (give_up, always(1), ev.Counted.SAME_ERROR, 2),
    (in_words_of_the_generation, always(1), ev.Counted.SAME_ERROR, 2),
    (of_whichever_rank, always(1), ev.Counted.SAME_ERROR, 2),
    (after_its_consequence, always(1), ev.Counted.SAME_ERROR, 2),
    (an_error_and_a_loss, always(0), ev.Counted.SAME_ERROR, 3),
    (in_words_of_its_own, always(1), ev.Counted.ERRORS, SAME_KIND),
    (give_up, always(7), ev.Counted.ANY, ANY_KIND + 1),  # it may be the same work done again
    (give_up, alternating, None, MOST),
    (connection, always(0), ev.Counted.ANY, ANY_KIND),
    (connection, always(1), None, MOST),
    (all_wait, always(0), ev.Counted.WAITS, SAME_KIND),
    (all_wait, always(7), None, MOST),
    (killed, always(0), ev.Counted.SAME_WORKER, SAME_KIND),
    (killed, always(1), ev.Counted.SAME_WORKER, SAME_KIND),
    (killed, alternating, None, MOST),
    (by_turns, always(0), ev.Counted.SAME_WORKER, 2 * SAME_KIND - 1),
]


@pytest.mark.parametrize(
    ("act", "batches", "counted", "plans"),
    FAILURES,
    ids=lambda each: getattr(each, "__name__", getattr(each, "name", each)),
)
def test_failures_in_a_row(act, batches, counted: ev.Counted | None, plans: int) -> None:
    world = restarting(2, stall_timeout=20.0)
    in_each_generation(world, lambda n: act(world, n), lambda n: 5 if n == 1 else batches(n), MOST)
    assert len(world.plans) == plans
    if counted is None:
        assert world.outcome is None
    else:
        assert world.outcome.error == "no_progress"
        count = world.outcome.reason.count
        assert (count.counted, count.times >= count.limit) == (counted, True)
        if act is killed:
            assert "(the same worker was lost 2 times in a row at commit" in world.words("reset")[1]


# -- a loop that has ended on one rank -----------------------------------------------------------


def told(*beats: ev.Beat, size: int = 2, done: ev.LoopDone | None = None) -> World:
    """Return a job that is told the same heartbeats for three seconds, after a loop's end."""
    names = ["A0", "B0", "C0"][:size]
    world = trained(job(*names, np=size, stall_timeout=60.0, script=LONG), 10)
    stopped_beats(world)
    if done is not None:
        world.tell(done)
    for _ in range(6):
        world.run_for(0.5)
        if world.outcome is None:
            world.tell(ev.Beats(beats))
    return world


@pytest.mark.parametrize("size", [2, 3])
def test_waiting_for_a_rank_whose_loop_has_ended_ends_the_job(size: int) -> None:
    """It does not matter what a third rank does."""
    beats = (
        ev.Beat(0, 1, 7, True, 10, 10),
        ev.Beat(1, 1, 7, True, 10, 11),
        ev.Beat(2, 1, 7, False, 10),
    )
    world = told(*beats[:size], size=size, done=ev.LoopDone(0, 1, 10, operations=10))
    assert world.machine.roster.outcome.error == "no_progress"
    said = str(world.machine.roster.outcome.reason)
    assert said.startswith(f"{FIRST} has reached the end of its elastic loop, but {SECOND} waits")


def test_a_heartbeat_from_before_the_end_of_the_loop_may_come_after_it() -> None:
    world = trained(job("A0", "B0", np=2, script=LONG), 10)
    stopped_beats(world)
    held_up = ev.Beats((ev.Beat(0, 1, 7, False, 10, 10), ev.Beat(1, 1, 7, True, 10, 11)))
    for _ in range(8):
        world.tell(held_up)
        world.run_for(0.5)
    world.tell(ev.LoopDone(0, 1, 12, operations=14))
    world.tell(held_up)
    world.run_for(1.0)
    assert world.outcome is None


# -- losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("np", "deaths"), [(1, SAME_KIND), (3, 3 * (SAME_KIND - 1) + 1)])
def test_processes_that_die_before_the_first_generation(np: int, deaths: int) -> None:
    """The function's set-up crashes: the job does not wait for `elastic_timeout`."""
    world = restarting(np)
    ranks = world.machine.roster.ranks
    while world.outcome is None and len(world.records("lost")) < 20:
        world.run(until=lambda: bool(ranks))
        rank = next(iter(ranks.values()))
        world.kill(rank.slot.worker.removeprefix("tcp://"))
        world.run(until=lambda start=rank.start: start not in ranks)
    assert world.outcome.error == "no_progress"
    assert len(world.records("lost")) == deaths
    assert world.outcome.reason.count.commit == ev.FRESH


def test_a_job_that_lacks_workers_says_what_the_last_has_died_of() -> None:
    world = trained(job("A0", "B0", np=2, min_np=2, elastic_timeout=30.0, script=LONG))
    world.tell(ev.RankDied(1, "B0 was killed by signal 11 (SIGSEGV)"))
    world.kill("B0")
    world.run_for(40.0)
    assert world.outcome.error == "not_enough_workers"
    assert world.why.endswith("; the last process that died: B0 was killed by signal 11 (SIGSEGV)")


@pytest.mark.parametrize(("every", "outcome"), [(10, None), (100_000, "no_progress")])
def test_deaths_after_another_commit_on_disk_do_not_add_up(every: int, outcome: str | None) -> None:
    world = restarting(1, checkpoint=True)
    seen: list[int] = []

    def die(number: int) -> None:
        rank = world.ranks[world.plans[-1].members[0].start]
        commits = math.floor(rank.version)
        seen.append(world.machine.roster.version)
        world.kill("A0")
        world.run(until=lambda: len(world.plans) > number or world.outcome is not None)
        if world.outcome is not None:
            return
        shown = world.machine.roster.version
        assert shown >= seen[-1], "until it is known how many the checkpoint has"
        world.run(until=lambda: world.phase() == Phase.RUNNING)
        world.ranks[world.plans[-1].members[0].start].version = commits // every * every

    in_each_generation(world, die, lambda _: 30, 10)
    assert (world.outcome and world.outcome.error) == outcome
    assert len(world.records("restarted")) == len(world.plans) - 1
    if outcome is None:
        assert seen == sorted(seen) and seen[-1] > 100


# -- ranks that wait for each other in different operations ----------------------------------------


def waits(start: int, operation: str, *, asked: int = 11, waiting: bool = True) -> ev.Beat:
    return ev.Beat(start, 1, 7, waiting, 10, asked, operation)


def test_waiting_in_different_operations_ends_the_job() -> None:
    world = told(waits(0, "allreduce 'loss'"), waits(1, "the reduction of gradients"))
    assert world.machine.roster.outcome.error == "no_progress"
    sides = f"{FIRST}: allreduce 'loss'; {SECOND}: the reduction of gradients. All"
    assert sides in str(world.machine.roster.outcome.reason)


@pytest.mark.parametrize(
    "other",
    [
        (waits(1, "allreduce"),),
        (waits(1, ""),),
        (waits(1, "broadcast", asked=10),),
        (waits(1, "broadcast", waiting=False),),
        (),
    ],
    ids=["the same", "unknown", "one operation earlier", "computes", "not heard of"],
)
def test_ranks_that_may_reach_the_same_operation_are_waited_for(other: tuple[ev.Beat, ...]) -> None:
    assert told(waits(0, "allreduce"), *other).phase() == Phase.RUNNING
