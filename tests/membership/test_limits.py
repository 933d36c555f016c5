"""The owner's limits: waiting for workers, resets, and scaling while the job runs."""

from __future__ import annotations

import itertools

import pytest

from nbelastic import messages as ev
from nbelastic.membership import Machine, Phase

from .ranks import Script
from .test_time_limits import stopped_beats
from .world import batches, job, reached, trained, when, workers

LONG = Script(batches=2000)


# -- waiting for workers -------------------------------------------------------------------------


def test_a_job_waits_for_np_and_then_starts_with_min_np() -> None:
    world = job("A0", "B0", "C0", np=4, min_np=2, elastic_timeout=30.0, script=LONG)
    world.run_for(29.9)
    assert not world.of(ev.StartRank)
    trained(world)
    assert workers(world.plans[0]) == ["A0", "B0", "C0"]
    assert when(world, lambda e: isinstance(e, ev.StartRank)) == [30.0] * 3


# -- newcomers every so many commits -------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 7, 40])
def test_newcomers_join_after_so_many_commits_of_a_generation(every: int) -> None:
    world = job("A0", np=1, min_np=1, max_np=3, check_every=every, script=LONG)
    for name in ("B0", "C0"):
        trained(world, len(world.trail) + 3)
        world.add(name)
        world.run(until=lambda name=name: name in workers(world.plans[-1]))
    versions = [max(plan.version, 0) for plan in world.plans]
    assert [len(plan.members) for plan in world.plans] == [1, 2, 3]
    for before, after in itertools.pairwise(versions):
        assert after - before >= every
    if every == 40:  # not much later, either: a heartbeat, a notice, and the step under way
        assert versions[-1] < 2 * 40 + 60


def test_the_last_holder_of_the_state_does_not_wait_for_commits() -> None:
    world = trained(job("A0", np=1, min_np=1, max_np=2, check_every=10_000, script=LONG))
    world.add("B0")
    world.run_for(3.0)
    world.retire("A0", grace=20.0)
    world.run(until=lambda: workers(world.plans[-1]) == ["B0"])
    assert world.plans[-1].version > 0


# -- scaling -------------------------------------------------------------------------------------


def test_who_stays_of_a_job_that_shrinks_is_known_to_have_the_state() -> None:
    world = job("A0", "B0", "B1", "A1", "C0", np=5, min_np=1, script=LONG)
    stopped_beats(world)
    reached(Phase.RUNNING, world)
    ranks = world.machine.roster.ranks.values()
    assert {rank.version for rank in ranks} == {ev.FRESH}
    # The ranks of hosts A and C have been heard of since.
    world.tell(
        ev.Beats(tuple(ev.Beat(r.start, 1, 1, False, 0) for r in ranks if r.slot.host != "B"))
    )
    world.tell(ev.LimitsChanged(max_np=2))
    staying = [rank.version for rank in ranks if not rank.leaving]
    assert len(staying) == 2
    assert 0 in staying


def test_scale_down() -> None:
    world = trained(job("A0", "B0", "C0", "D0", np=4, min_np=1, script=LONG), 10)
    world.tell(ev.LimitsChanged(max_np=2))
    assert [(e.start, e.how, e.reason) for e in world.of(ev.EndRank)] == [
        (2, "leave", ev.SCALED_DOWN),
        (3, "leave", ev.SCALED_DOWN),
    ]
    world.run_for(2.0)
    assert workers(world.plans[-1]) == ["A0", "B0"]
    assert batches(world) == list(range(1, len(batches(world)) + 1)), "nothing is redone"
    assert len(world.of(ev.StartRank)) == 4, "their slots are not used again"
    assert not world.records("cooldown")


def test_scale_down_lets_newcomers_go_first() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, script=Script(batches=2000, setup=1.0)), 5)
    world.add("C0")
    world.run_for(0.5)
    world.tell(ev.LimitsChanged(max_np=2))
    assert [(effect.start, effect.how) for effect in world.of(ev.EndRank)] == [(2, "leave")]
    world.run_for(3.0)
    assert len(world.plans) == 1
    assert not world.of(ev.Notify)


def test_of_two_contradicting_limits_the_later_counts() -> None:
    world = job(np=2, min_np=2, max_np=8)
    world.tell(ev.LimitsChanged(min_np=5))
    world.tell(ev.LimitsChanged(max_np=4))
    limits = world.machine.roster.limits
    assert (limits.min_np, limits.max_np) == (4, 4)
    world.tell(ev.LimitsChanged(min_np=6))
    limits = world.machine.roster.limits
    assert (limits.min_np, limits.np, limits.max_np) == (6, 6, 6)


# -- time -----------------------------------------------------------------------------------------


def test_what_is_due_at_the_very_moment_of_a_message_is_done() -> None:
    machine = Machine(ev.Limits(np=3, min_np=3, elastic_timeout=1.0))
    one, other = (ev.Slot(name, f"tcp://{name}", name, name) for name in ("A0", "B0"))
    machine.handle(ev.SlotsFound((one,)), 1.0)
    effects = machine.handle(ev.SlotsFound((other,)), 2.0)
    assert any(isinstance(effect, ev.End) for effect in effects)
