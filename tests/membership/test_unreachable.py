"""Ranks that cannot reach each other, while the scheduler reaches all of them."""

from __future__ import annotations

import itertools

import pytest
from msgspec import structs

from nbelastic.membership import Machine
from nbelastic.membership.placement import choose_removed
from nbelastic.messages import RankId, RankReady, Unreachable

from .ranks import FakeRank, Script
from .world import World, job, trained, workers

LONG = Script(batches=400)
BROKEN = Unreachable(RankId(1, 1, "tcp://B0"), RankId(2, 2, "tcp://C0"))


# -- choice of removed ranks ----------------------------------------------------------------------


def test_of_two_separated_hosts_the_smaller_one_is_removed() -> None:
    two_and_two = list(itertools.product((0, 1), (2, 3)))
    assert choose_removed([0, 1, 2, 3], two_and_two) == [3, 2]
    one_and_three = list(itertools.product((0,), (1, 2, 3)))
    assert choose_removed([0, 1, 2, 3], one_and_three) == [0]


@pytest.mark.parametrize("size", [3, 4, 5])
def test_those_who_go_on_reach_each_other_whatever_is_broken(size: int) -> None:
    all_pairs = list(itertools.combinations(range(size), 2))
    for number in range(2 ** len(all_pairs)):
        broken = [pair for bit, pair in enumerate(all_pairs) if number >> bit & 1]
        gone = choose_removed(range(size), broken)
        assert len(set(gone)) == len(gone) < size
        assert not [pair for pair in broken if not set(pair) & set(gone)]


# -- what becomes of the job ---------------------------------------------------------------------


def separate(world: World, *names: str) -> None:
    """Have two workers be unable to reach each other; plans with both do not form."""
    starts = [world.rank_on(name).start for name in names]
    for name, other in zip(names, reversed(starts), strict=True):
        rank = world.rank_on(name)
        rank.on_plan = _deaf_to_plans_with(rank, other)
    tell = world.tell

    def with_doubts(event: object, *chance: float) -> None:
        failures = world.machine.roster.policy.forming_failures
        if isinstance(event, RankReady) and event.start in starts and failures >= 2:
            other = starts[1 - starts.index(event.start)]
            event = structs.replace(event, unreached=(other,))
        tell(event, *chance)  # type: ignore[arg-type]

    world.tell = with_doubts  # type: ignore[method-assign]


def _deaf_to_plans_with(rank: FakeRank, other: int):  # type: ignore[no-untyped-def]
    listen = rank.on_plan

    def on_plan(plan) -> None:  # type: ignore[no-untyped-def]
        if plan.rank_of(other) is None:
            listen(plan)
        else:
            rank.heard = max(rank.heard, plan.generation)

    return on_plan


def test_a_job_goes_on_with_those_who_reach_each_other() -> None:
    world = trained(job("A0", "B0", "C0", np=3, min_np=2, forming_timeout=4.0, script=LONG), 20)
    separate(world, "B0", "C0")
    world.rank_on("A0").collective_failed()
    world.run(until=lambda: len(world.plans) == 4)
    assert workers(world.plans[3]) == ["A0", "B0"]
    assert [slot.worker for slot in world.evicted()] == ["tcp://C0"]
    assert BROKEN in world.reasons("reset")[-1].causes


def test_of_two_the_newcomer_without_a_commit_is_removed() -> None:
    world = trained(job("A0", "B0", "C0", np=3, min_np=2, forming_timeout=4.0, script=LONG), 20)
    world.add("A1")  # its rank comes before those of B0 and C0
    world.run_for(0.1)
    separate(world, "A1", "C0")
    world.run(until=lambda: len(world.plans) == 4)
    assert [workers(plan) for plan in world.plans[1:3]] == [["A0", "A1", "B0", "C0"]] * 2
    assert workers(world.plans[3]) == ["A0", "B0", "C0"]


def test_a_job_that_needs_both_fails_and_names_them() -> None:
    world = trained(job("A0", "B0", "C0", np=3, min_np=3, forming_timeout=4.0, script=LONG), 20)
    separate(world, "B0", "C0")
    world.rank_on("A0").collective_failed()
    world.run()
    assert world.outcome.error == "no_progress"
    assert BROKEN in world.outcome.reason.causes


def test_reports_of_unreachable_ranks_are_made_anew_each_time() -> None:
    world = trained(job("A0", "B0", np=2, script=LONG), 5)
    machine: Machine = world.machine
    rank = machine.roster.ranks[0]
    world.tell(RankReady(0, left=1, version=5, loop=1, store=("", 0), failed=True, unreached=(1,)))
    assert rank.unreached == (1,)
    world.run(until=lambda: len(world.plans) == 2)
    world.run_for(1.0)
    world.rank_on("A0").collective_failed()
    world.run(until=lambda: len(world.plans) == 3)
    assert rank.unreached == ()
