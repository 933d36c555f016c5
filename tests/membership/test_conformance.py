"""Elastic Horovod's own tests, and its weak points.

A: failures and joins; B: whole runs; C: ranks, and messages to them; N: weak points, as far as the
machine decides them. By default 3 epochs of 10 batches, with a commit after each.
"""

from __future__ import annotations

import pytest

from nbelastic import messages as ev
from nbelastic.membership import TICK

from .ranks import Script
from .world import (
    World,
    batches,
    job,
    places,
    starts,
    starts_on,
    times,
    trained,
    when,
    workers,
)

LONG = Script(batches=200)
FAILURES = ["exception", "kill"]


def fail(world: World, name: str, how: str) -> None:
    if how == "kill":
        world.kill(name)
    else:
        world.rank_on(name).raise_error("ValueError: bad batch")


@pytest.mark.parametrize("s", [1, 2])
def test_A1_the_state_outlives_the_host_of_the_first_rank_0(s: int) -> None:
    a, b = [f"A{i}" for i in range(s)], [f"B{i}" for i in range(s)]
    world = job(*a, np=s, min_np=s, max_np=2 * s)
    world.at(10, lambda: world.add(*b))
    world.at(20, lambda: [world.retire(name) for name in a])
    world.run()
    assert world.outcome.kind == "finished"
    assert world.sizes() == [s, 2 * s, s]
    assert world.leaders() == [0, 0, s]
    assert len(world.plans) == 3
    assert workers(world.plans[-1]) == b
    assert batches(world) == list(range(1, 31)), "planned changes redo nothing and skip nothing"
    assert not world.records("restarted")


@pytest.mark.parametrize("how", FAILURES)
def test_A2_the_first_rank_0_dies(how: str) -> None:
    world = job("A0", "A1", "B0", "B1", np=2, min_np=2, max_np=4)
    world.at(10, lambda: fail(world, "A0", how))
    world.run()
    assert world.outcome.kind == "finished"
    assert world.sizes() == [4, 3], "the healthy worker on A stays"
    assert world.leaders() == [0, 1]
    assert len(world.plans) == 2
    assert starts(world.plans[-1]) == [1, 2, 3]
    assert len(batches(world)) <= 31, "at most the batch in flight is redone"


def test_A4_all_ranks_raise_at_once() -> None:
    world = job("A0", "A1", "B0", "B1", np=4, min_np=2)
    world.at(10, lambda: [rank.raise_error("ValueError: 7") for rank in world.ranks.values()])
    world.run()
    assert world.outcome.kind == "failed"
    assert world.outcome.error == "rank_failed"
    assert world.why == "ValueError: 7 (raised on 3 workers, in one generation)"
    assert sorted(world.outcome.starts) == [0, 1, 2, 3]
    assert len(world.plans) == 1


@pytest.mark.parametrize("limit", [1, 2])
def test_A7_reset_limit(limit: int) -> None:
    world = job("A0", np=1, min_np=1, max_np=2, reset_limit=limit)
    world.at(10, lambda: world.add("B0"))
    world.at(20, lambda: world.retire("A0"))
    world.run()
    if limit == 2:
        assert world.outcome.kind == "finished"
        assert world.sizes() == [1, 2, 1]
        assert world.words("reset") == ["1 rank joined → 2 ranks", "a planned change → 1 rank"]
    else:
        assert world.outcome.error == "reset_limit"
        assert world.why == "reset_limit=1 is reached; next reset: a planned change"
        assert world.sizes() == [1, 2]


@pytest.mark.parametrize("how", FAILURES)
def test_A8_a_worker_cools_down_and_is_used_again(how: str) -> None:
    script = Script(batches=80)
    limits = {"np": 4, "min_np": 2, "cooldown": (1.5, 3.0)}
    world = job("A0", "A1", "B0", "B1", script=script, nanny=True, **limits)
    world.at(10, lambda: fail(world, "B0", how))
    world.run()
    assert world.outcome.kind == "finished"
    assert world.sizes() == [4, 3, 4]
    assert starts(world.plans[-1]) == [0, 1, 3, 4], "the newcomer follows those on its host"
    first, again = starts_on(world, "B0")
    (failed,) = world.records("cooldown")
    (lost,) = when(world, lambda e: e is failed)
    assert first == 0.0
    assert 1.5 <= again - lost <= 1.65 + TICK
    if how == "exception":
        assert times(world, lambda e: isinstance(e, ev.RankRaised)) == [lost]
    assert world.plans[-1].members[3].version == ev.FRESH


# -- B: batches, sizes and the leading rank --------------------------------------------------------


# -- C: ranks, and messages to them ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["A0", "A1", "B0", "B1"], [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]),
        (["A0", "B0", "B1"], [(0, 1, 0, 2), (0, 2, 1, 2), (1, 2, 0, 1)]),
        (["A0", "B0", "A1"], [(0, 2, 0, 2), (1, 2, 0, 1), (0, 1, 1, 2)]),
    ],
)
def test_C1_ranks_at_first(names: list[str], expected: list[tuple[int, ...]]) -> None:
    world = trained(job(*names, np=len(names), script=LONG))
    (plan,) = world.plans
    assert places(plan) == [
        ev.Place(rank, len(names), *numbers) for rank, numbers in enumerate(expected)
    ]
    foreseen = {effect.start: effect.place for effect in world.of(ev.StartRank)}
    assert [foreseen[start] for start in starts(plan)] == places(plan)


def test_C4_waits_for_slots_enough_then_starts_once() -> None:
    world = job("A0", "A1", np=4, min_np=4, script=LONG)
    world.run_for(1.0)
    world.tell(ev.SlotsFound(()))
    world.add("B0")
    world.run_for(1.0)
    assert not world.of(ev.StartRank)
    assert world.words("waiting") == ["2 of at least 4 workers"]
    world.add("B1")
    trained(world)
    assert len(world.of(ev.StartRank)) == 4
    assert [len(plan.members) for plan in world.plans] == [4]


def test_C5_waits_for_hosts_enough_then_starts_once() -> None:
    world = job("A0", "A1", "A2", np=3, min_np=3, max_np=4, slots_per_host=2, script=LONG)
    world.tell(ev.SlotsFound(()))
    world.run_for(1.0)
    assert not world.of(ev.StartRank), "the third slot on A does not count"
    world.add("B0", "B1")
    trained(world)
    assert workers(world.plans[0]) == ["A0", "A1", "B0", "B1"]
    assert len(world.plans) == 1


def test_C7_one_rank_returns_while_others_train() -> None:
    world = trained(job("A0", "B0", "C0", np=3, script=LONG))
    world.rank_on("B0").end(ev.RankReturned(1))
    world.run()
    assert world.outcome.kind == "failed"
    assert world.outcome.error == "returned_early"
    assert world.why == "rank 1 on tcp://B0 returned while others train"
    assert {effect.start for effect in world.of(ev.EndRank)} == {0, 2}, (
        "the others are told to stop"
    )


def test_C7_one_rank_returns_while_others_are_ready() -> None:
    world = trained(job("A0", "B0", np=2, script=Script(batches=5, loops=2)))
    world.at(5, lambda: setattr(world.ranks[1], "loop", 2))  # its function ends after one loop
    world.run()
    assert world.outcome.error == "returned_early"
    assert world.why.startswith("ranks returned while others wait to train: rank 0 on tcp://A0. Al")


def test_C7_success_only_if_all_returned() -> None:
    world = job("A0", "B0", np=2, script=Script(batches=5, after=1.0))
    world.at(5, lambda: world.later(0.5, lambda: world.kill("B0")))
    world.run()
    assert world.outcome.kind == "failed"
    assert world.outcome.error == "rank_lost"
    lost = "rank 1 on tcp://B0: its worker left the cluster"
    assert world.why == f"1 of 2 ranks ended before they returned; {lost}"
    assert world.ranks[0].where == "ended"


# -- N: weak points --------------------------------------------------------------------------------


def test_N3_below_min_np_then_a_new_host_comes() -> None:
    world = job("A0", "A1", "B0", np=3, min_np=3, script=Script(batches=40))
    world.at(10, lambda: world.kill("A0"))
    trained(world, 10).run_for(5.0)
    assert world.machine.roster.version >= 10
    assert len(world.plans) == 1
    world.add("C0")
    world.run()
    assert world.outcome.kind == "finished"
    plan = world.plans[-1]
    assert starts(plan) == [1, 2, 3]
    assert plan.version >= 10, "who has the state is part of the plan"
    assert plan.source in (0, 1)
    assert 2 in plan.behind
    assert plan.members[2].version == ev.FRESH
    assert len(batches(world)) <= 41
    assert not world.records("restarted")


POISON = "ValueError: sample 17 cannot be read"


def poisoned(world: World, *names: str, apart: float = 2.0, error: str = POISON) -> World:
    """Have workers raise the same error, each some time after the one before."""
    for name in names:
        world.run_for(apart)
        if world.outcome is None and world.worker(name).holder is not None:
            world.rank_on(name).raise_error(error)
            world.run_for(0.1)
    return world


@pytest.mark.parametrize(
    "error", [POISON, "OSError: No such file: 'part-{}.csv'", "Error: tensor([{}.5071, -3e-0{}])"]
)
def test_N14_the_same_error_on_three_workers_ends_the_job(error: str) -> None:
    world = trained(job("A0", "A1", "A2", "A3", "A4", "A5", np=6, min_np=1, script=LONG), 20)
    for number, name in enumerate(("A1", "A4", "A0", "A2")):
        poisoned(world, name, error=error.format(number, number))
    assert world.outcome.error == "rank_failed"
    assert world.why == f"{error.format(2, 2)} (raised on 3 workers, one after another)"
    assert sorted(world.outcome.starts) == [0, 1, 4], "their tracebacks are what the user is shown"
    assert len(world.records("lost")) == 3


def test_N14_a_worker_that_may_come_back_is_waited_for() -> None:
    world = trained(job("A0", "A1", "A2", np=3, min_np=2, elastic_timeout=20.0, script=LONG), 20)
    world.kill("A2")
    poisoned(world, "A1").run_for(1.0)
    assert world.outcome is None
    world.add("A3")
    world.run_for(1.0)
    assert workers(world.plans[-1]) == ["A0", "A3"]
    poisoned(world, "A3", error="KeyError: 3").run()
    assert world.why.startswith("KeyError: 3; 1 of at least 2 workers (2 more are there, but excl")
    assert world.now > 20.0, "A2 has had its time"


@pytest.mark.parametrize("how", ["kill", "retire"])
def test_N14_a_worker_that_has_come_back_is_not_waited_for(how: str) -> None:
    world = trained(job("A0", "A1", np=2, min_np=2, elastic_timeout=600.0, script=LONG), 20)
    getattr(world, how)("A1")
    world.run_for(6.0)
    world.add("A1")  # as its nanny starts it, or its owner: under its name
    world.run_for(1.0)
    assert workers(world.plans[-1]) == ["A0", "A1"]
    poisoned(world, "A0").run(seconds=5.0)
    assert world.outcome.error == "rank_failed"
    assert world.why.startswith(f"{POISON}; 1 of at least 2 workers (1 more are there, but excl")


def test_N14_a_few_commits_in_between_make_no_difference() -> None:
    rarely = Script(batches=100_000, step=1.0, commit_every=10_000)
    for apart, script in ((8.0, Script(batches=2000)), (1000.0, rarely)):
        world = trained(job("A0", "A1", "A2", "A3", np=4, min_np=1, script=script))
        world.ranks[0].version = 1  # there is something to go back to
        poisoned(world, "A1", "A2", "A3", apart=apart)
        assert world.machine.roster.outcome.error == "rank_failed"


def test_N14_the_same_error_of_machines_minutes_apart_ends_nothing() -> None:
    script = Script(batches=10_000_000, step=100.0)
    names = [f"A{number}" for number in range(4)]
    world = trained(job(*names, np=4, min_np=1, script=script))
    poisoned(world, *names[1:], apart=300.0, error="RuntimeError: CUDA error: ECC error")
    assert world.machine.roster.outcome is None
    assert workers(world.plans[-1]) == ["A0"]


def test_N14_different_errors_are_no_chain() -> None:
    names = [f"A{number}" for number in range(10)]
    world = trained(job(*names, np=10, min_np=1, script=LONG), 20)
    for name in names[1:3]:
        world.rank_on(name).raise_error(POISON)
    for kind, name in zip(("KeyError", "OSError", "TypeError"), names[5:8], strict=True):
        poisoned(world, name, error=f"{kind}: 7")
    assert world.machine.roster.outcome is None
    assert sorted(workers(world.plans[-1])) == ["A0", "A1", "A2", "A3", "A4", "A8", "A9"]


@pytest.mark.parametrize(("hosts", "ends"), [("A", True), ("ABC", True), ("BBB", False)])
def test_N14_several_ranks_of_one_generation_that_raise_the_same(hosts: str, ends: bool) -> None:
    names = [f"{host}{number}" for number, host in enumerate((hosts * 3)[:3])]
    spared = "A9" if hosts == "A" else "D0"
    world = trained(job(*names, spared, np=4, min_np=1, script=LONG), 20)
    for name in names:
        world.rank_on(name).raise_error(POISON)
    world.run_for(1.0)
    assert len(world.plans) == (1 if ends else 2)
    assert (world.outcome is not None) == ends


def test_N15_the_state_is_lost_with_its_last_holder_only() -> None:
    world = job("A0", "B0", np=2, min_np=1, script=Script(batches=40))
    world.at(10, lambda: [world.kill("A0"), world.kill("B0")])
    world.at(10, lambda: world.later(1.0, lambda: world.add("C0")))
    world.run()
    assert world.outcome.kind == "finished"
    (record,) = world.records("restarted")
    assert "no rank is left that holds commit 5," in str(record.reason)
    assert batches(world)[10] == 1, "it starts over, and says so"


@pytest.mark.parametrize("there", [0, 1, 3])
def test_N17_the_failure_names_limit_present_and_wait(there: int) -> None:
    names = [f"A{i}" for i in range(there)]
    world = job(*names, np=4, min_np=4, elastic_timeout=12.5).run()
    assert world.outcome.error == "not_enough_workers"
    waited = "after waiting 12.5 s (elastic_timeout=12.5)"
    assert world.why == f"{there} of at least 4 workers (min_np=4) {waited}"
    assert world.now == pytest.approx(12.5, abs=0.01)
