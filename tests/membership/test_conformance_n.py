"""Where Elastic Horovod fails (N): what can be decided by the machine."""

from __future__ import annotations

import pytest

from nbelastic.membership import FRESH, Limits, RankFailed, StartRank

from .ranks import Script
from .stories import batches, job, starts, times, trained, when, workers

LONG = Script(batches=200)


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
    assert plan.members[2].version == FRESH
    assert len(batches(world)) <= 41
    assert not world.records("restarted")


def test_N8_two_changes_within_a_second() -> None:
    world = job("A0", "B0", "B1", np=3, min_np=1, script=LONG)
    world.at(20, lambda: world.retire("B0"))
    world.at(20, lambda: world.later(0.3, lambda: world.add("C0")))
    world.at(20, lambda: world.later(0.4, lambda: world.kill("A0")))
    world.at(20, lambda: world.later(0.5, lambda: world.add("A1")))
    trained(world, 20).run_for(3.0)
    assert workers(world.plans[-1]) == ["B1", "C0", "A1"]
    assert [plan.generation for plan in world.plans] == list(range(1, len(world.plans) + 1))
    kinds = {(e.kind, e.worker) for kind in ("lost", "left") for e in world.records(kind)}
    assert kinds == {("left", "tcp://B0"), ("lost", "tcp://A0")}, "each is taken for what it is"
    assert world.machine.roster.version > 20


def test_N8_a_change_while_another_is_being_made() -> None:
    world = trained(job("A0", "B0", "C0", "D0", np=4, min_np=1, script=LONG))
    world.retire("A0")
    world.run_for(0.05)
    world.kill("B0")
    world.retire("C0")
    world.run_for(2.0)
    assert workers(world.plans[-1]) == ["D0"]
    assert world.outcome is None
    assert not world.records("restarted")


def test_N10_one_process_dies_on_a_single_host() -> None:
    world = job("A0", "A1", "A2", "A3", np=4, min_np=2)
    world.at(10, lambda: world.kill("A2"))
    world.run()
    assert world.outcome.kind == "finished"
    assert world.sizes() == [4, 3]
    assert workers(world.plans[-1]) == ["A0", "A1", "A3"]


def test_N15_all_workers_of_the_first_generation_are_gone() -> None:
    world = job("A0", "B0", np=2, min_np=2, max_np=4, script=Script(batches=60))
    world.at(10, lambda: world.add("C0", "D0"))
    world.at(20, lambda: world.retire("A0"))
    world.at(25, lambda: world.retire("B0"))
    world.at(30, lambda: world.add("E0"))
    world.at(40, lambda: world.kill("C0"))
    world.run()
    assert world.outcome.kind == "finished"
    assert workers(world.plans[-1]) == ["D0", "E0"]
    assert not world.records("restarted")
    assert len(batches(world)) <= 61, "the state lives while any rank that synchronised remains"


def test_N15_the_state_is_lost_only_with_the_last_rank_that_had_it() -> None:
    world = job("A0", "B0", np=2, min_np=1, script=Script(batches=40))
    world.at(10, lambda: [world.kill("A0"), world.kill("B0")])
    world.at(10, lambda: world.later(1.0, lambda: world.add("C0")))
    world.run()
    assert world.outcome.kind == "finished"
    (record,) = world.records("restarted")
    assert "no rank is left that holds commit" in record.detail
    assert batches(world)[10] == 1, "it starts over, and says so"


def test_N16_cooldown_is_as_documented() -> None:
    script = Script(batches=10_000)
    world = job("A0", "B0", np=1, min_np=1, cooldown=(10.0, 40.0), script=script)
    for _ in range(4):
        world.run(until=lambda: world.worker("B0").holder is not None)
        world.run_for(1.0)
        world.rank_on("B0").raise_error()
        world.run_for(0.1)
    world.run(until=lambda: world.worker("B0").holder is not None)
    begun = when(world, lambda e: isinstance(e, StartRank) and e.slot.name == "B0")
    failed = times(world, lambda event: isinstance(event, RankFailed))
    waits = [start - end for start, end in zip(begun[1:], failed, strict=True)]
    for wait, least in zip(waits, [10.0, 20.0, 40.0, 40.0], strict=True):
        assert least <= wait <= min(least * 1.1, 40.0) + 0.001


@pytest.mark.parametrize("bounds", [(20.0, 10.0), (-1.0, 5.0)])
def test_N16_an_inverted_range_is_refused(bounds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="lo <= hi"):
        Limits(cooldown=bounds)


@pytest.mark.parametrize("there", [0, 1, 3])
def test_N17_the_failure_names_limit_present_and_wait(there: int) -> None:
    names = [f"A{i}" for i in range(there)]
    world = job(*names, np=4, min_np=4, elastic_timeout=12.5).run()
    assert world.outcome.error == "not_enough_workers"
    assert world.outcome.reason == (
        f"{there} of at least 4 workers (min_np=4) after waiting 12.5 s (elastic_timeout=12.5)"
    )
    assert world.now == pytest.approx(12.5, abs=0.01)
