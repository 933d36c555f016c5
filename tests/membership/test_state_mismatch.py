"""Newcomers with a different state: the others go on, and their workers are not lost."""

from __future__ import annotations

from nbelastic.messages import CannotJoin, RankRaised, StartRank

from .ranks import Script
from .stories import job, trained
from .world import World

MISFIT = "StateMismatch: parameter model.late.weight: expected nothing, came float32 [1, 1]"
LONG = Script(batches=2000)


def misfit(world: World, name: str) -> None:
    rank = world.rank_on(name)
    rank.end(RankRaised(rank.start, MISFIT, state_mismatch=True))


def join(world: World, *names: str) -> None:
    """Let newcomers join, and have them find that their state does not fit."""
    plans = len(world.plans)
    world.run(until=lambda: len(world.plans) > plans)
    for name in names:
        misfit(world, name)


def starts_on(world: World, name: str) -> int:
    return sum(effect.slot.name == name for effect in world.of(StartRank))


def test_a_worker_whose_state_differed_is_tried_again_later() -> None:
    world = trained(job("A0", "B0", min_np=2, script=LONG))
    world.add("C0")
    join(world, "C0")
    world.run_for(5.0)
    assert starts_on(world, "C0") == 1
    assert world.sizes()[-1] == 2
    world.run(until=lambda: world.sizes()[-1] == 3)
    assert starts_on(world, "C0") == 2
    assert world.outcome is None


def test_several_of_them_do_not_end_the_job() -> None:
    world = trained(job("A0", "B0", min_np=2, script=LONG))
    world.add("C0", "D0", "E0", "F0")
    join(world, "C0", "D0", "E0", "F0")
    world.run_for(2.0)
    assert world.outcome is None
    assert world.sizes()[-1] == 2


def test_a_warning_says_what_was_added() -> None:
    world = trained(job("A0", "B0", min_np=2, script=LONG))
    world.add("C0")
    join(world, "C0")
    world.run_for(1.0)
    (warning,) = world.machine.machine.roster.warnings
    assert isinstance(warning, CannotJoin)
    assert warning.rank.worker == "tcp://C0"
    assert MISFIT in warning.error


def test_where_the_job_needs_them_it_ends_with_what_does_not_fit() -> None:
    world = trained(job("A0", "B0", min_np=2, max_np=2, script=LONG))
    world.add("C0", "D0")
    world.kill("A0")
    join(world, "C0")
    join(world, "D0")
    world.run()
    assert world.outcome.kind == "failed"
    assert MISFIT in str(world.outcome.reason)
