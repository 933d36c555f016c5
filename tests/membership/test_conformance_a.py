"""Elastic Horovod's own tests of failures and joins (A): 3 epochs of 10 batches, commit each."""

from __future__ import annotations

import pytest

from nbelastic.messages import (
    FRESH,
    EndRank,
    Presence,
    RankRaised,
    RepeatedError,
    StartRank,
    UserErrors,
)

from .ranks import Script
from .stories import batches, job, starts, times, when, workers
from .world import World

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


@pytest.mark.parametrize("how", FAILURES)
def test_A3_the_first_rank_0_dies_with_fixed_hosts(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = job("A0", "A1", "B0", "B1", np=2, min_np=2, max_np=4)
    monkeypatch.setattr(world, "freed", lambda worker, start: None)  # no discovery any more
    world.at(10, lambda: fail(world, "A0", how))
    world.run()
    assert world.outcome.kind == "finished"
    assert world.sizes() == [4, 3]
    assert world.leaders() == [0, 1]
    assert len(world.plans) == 2


def test_A4_all_ranks_raise_at_once() -> None:
    world = job("A0", "A1", "B0", "B1", np=4, min_np=2)
    world.at(10, lambda: [rank.raise_error("ValueError: 7") for rank in world.ranks.values()])
    world.run()
    assert world.outcome.kind == "failed"
    assert world.outcome.error == "rank_failed"
    assert world.outcome.reason == RepeatedError("ValueError: 7", 3, one_generation=True)
    assert sorted(world.outcome.starts) == [0, 1, 2, 3]
    assert len(world.plans) == 1


def test_A5_one_rank_on_each_host_dies_and_the_healthy_go_on() -> None:
    world = job("A0", "A1", "B0", "B1", np=4, min_np=2)
    world.at(10, lambda: [fail(world, name, "exception") for name in ("A0", "B1")])
    world.run()
    assert world.outcome.kind == "finished"
    assert world.sizes() == [4, 2, 4], "what both raise is not their workers' fault"
    assert workers(world.plans[1]) == ["A1", "B0"]


def test_A5_one_rank_on_each_host_dies_and_too_few_remain() -> None:
    world = job("A0", "A1", "B0", "B1", np=4, min_np=3, elastic_timeout=30.0)
    world.at(10, lambda: [world.rank_on(name).raise_error(name) for name in ("A0", "B1")])
    world.run()
    assert world.outcome.error == "rank_failed", "workers that are there are not replaced"
    assert world.outcome.reason == UserErrors(("A0", "B1"), Presence(2, 3, excluded=2))
    assert world.now < 20


def test_A6_below_min_np_for_too_long() -> None:
    world = job("A0", "A1", "B0", "B1", np=4, min_np=4, elastic_timeout=1.0)
    world.at(10, lambda: world.kill("B0"))
    world.run()
    assert world.outcome.kind == "failed"
    assert world.outcome.error == "not_enough_workers"
    reason = world.outcome.reason
    assert (reason.presence, reason.min_np, reason.timeout) == (Presence(3, 4), 4, 1.0)
    assert reason.waited == pytest.approx(1.0)
    ends = [effect for effect in world.of(EndRank) if effect.how == "cancel"]
    assert sorted(effect.start for effect in ends) == [0, 1, 3]
    assert world.now < 3.0


@pytest.mark.parametrize("limit", [1, 2])
def test_A7_reset_limit(limit: int) -> None:
    world = job("A0", np=1, min_np=1, max_np=2, reset_limit=limit)
    world.at(10, lambda: world.add("B0"))
    world.at(20, lambda: world.retire("A0"))
    world.run()
    if limit == 2:
        assert world.outcome.kind == "finished"
        assert world.sizes() == [1, 2, 1]
        assert len(world.records("reset")) == 2
    else:
        assert world.outcome.error == "reset_limit"
        assert world.outcome.reason.limit == 1
        assert world.sizes() == [1, 2]


@pytest.mark.parametrize("how", FAILURES)
def test_A8_a_worker_cools_down_and_is_used_again(how: str) -> None:
    script = Script(batches=80)
    world = World(job(np=4, min_np=2, cooldown=(1.5, 3.0)).machine.limits, script)
    world.add("A0", "A1", "B0", "B1", nanny=True)
    world.at(10, lambda: fail(world, "B0", how))
    world.run()
    assert world.outcome.kind == "finished"
    assert world.sizes() == [4, 3, 4]
    assert starts(world.plans[-1]) == [0, 1, 3, 4], "the newcomer follows those on its host"
    first, again = [
        now for now in when(world, lambda e: isinstance(e, StartRank) and e.slot.name == "B0")
    ]
    failed = [plan for plan in world.records("cooldown")]
    assert len(failed) == 1
    lost = when(world, lambda e: e in failed)[0]
    assert first == 0.0
    assert 1.5 <= again - lost <= 1.65 + 0.001
    if how == "exception":
        assert times(world, lambda e: isinstance(e, RankRaised)) == [lost]
    assert world.plans[-1].members[3].version == FRESH
