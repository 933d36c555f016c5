"""A start that fails by no fault of the function is tried once more, on the same worker."""

from __future__ import annotations

import pytest

from nbelastic.membership import RankRaised, StartRank

from .ranks import Script
from .stories import job, trained
from .world import World

MISMATCH = "SystemError: AST constructor recursion depth mismatch (before=30, after=31)"


def fail(world: World, name: str, *, interpreter: bool = True) -> None:
    rank = world.rank_on(name)
    rank.end(RankRaised(rank.start, MISMATCH, interpreter=interpreter))


def starts_on(world: World, name: str) -> int:
    return sum(effect.slot.name == name for effect in world.of(StartRank))


def test_a_first_start_that_fails_so_is_tried_once_more() -> None:
    world = job("A0", "B0", np=2)
    world.run_for(0.1)
    fail(world, "A0")
    world.run()
    assert world.outcome.kind == "finished"
    assert len(world.plans[-1].members) == 2
    assert starts_on(world, "A0") >= 2


def test_it_is_tried_once_and_no_more() -> None:
    world = job("A0", "B0", np=2)
    world.run_for(0.1)
    fail(world, "A0")
    world.run_for(0.1)
    fail(world, "A0")
    world.run()
    assert (world.outcome.kind, world.outcome.error) == ("failed", "rank_failed")
    assert MISMATCH in world.outcome.reason.detail


def test_an_error_of_the_function_fails_at_once() -> None:
    world = job("A0", "B0", np=2)
    world.run_for(0.1)
    fail(world, "A0", interpreter=False)
    world.run()
    assert (world.outcome.error, starts_on(world, "A0")) == ("rank_failed", 1)


@pytest.mark.parametrize("cooldown", [None, (0.5, 4.0)])
def test_a_newcomer_that_fails_so_is_not_left_out(cooldown: tuple[float, float] | None) -> None:
    script = Script(batches=200)
    world = trained(job("A0", np=1, max_np=2, script=script, cooldown=cooldown))
    world.add("B0")
    world.run_for(0.1)
    fail(world, "B0")
    world.run()
    assert world.outcome.kind == "finished"
    assert len(world.plans[-1].members) == 2
    assert not world.records("cooldown")


def test_every_worker_of_a_job_has_its_second_try() -> None:
    world = job("A0", "B0", "C0", np=3)
    world.run_for(0.1)
    for name in ("A0", "B0", "C0"):
        fail(world, name)
    world.run()
    assert world.outcome.kind == "finished"
    assert len(world.plans[-1].members) == 3
