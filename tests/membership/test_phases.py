"""Stopping in every phase, several loops, and functions without a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nbelastic import messages as ev
from nbelastic.membership import Phase

from .invariants import Checked
from .ranks import Script
from .world import World, batches, job, reached, starts, trained

LONG = Script(batches=200)


def waiting() -> World:
    return job("A0", np=2, min_np=2, script=LONG).run_for(1.0)


def setting_up() -> World:
    return job("A0", "B0", np=2, script=LONG).run_for(0.1)


def forming() -> World:
    return reached(Phase.FORMING, job("A0", "B0", np=2, script=LONG))


def running() -> World:
    return trained(job("A0", "B0", np=2, script=LONG), 10)


def aborting() -> World:
    world = trained(job("A0", "B0", "C0", np=3, min_np=1, script=LONG), 10)
    world.kill("C0")
    world.run(until=lambda: bool(world.of(ev.Abort)))
    assert world.reason() == "waiting for 2 ranks to leave generation 1"
    return world


def short_of_workers() -> World:
    world = trained(job("A0", "B0", np=2, script=LONG, min_np=2), 10)
    world.kill("B0")
    return world.run_for(2.0)


def finishing() -> World:
    return reached(Phase.FINISHING, job("A0", "B0", np=2, script=Script(batches=5, after=1.0)))


PHASES = [waiting, setting_up, forming, running, aborting, short_of_workers, finishing]


@pytest.mark.parametrize("now", [False, True], ids=["at_commit", "now"])
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
def test_stop(phase: Callable[[], World], now: bool) -> None:
    world = phase()
    plans, begun = len(world.plans), world.now
    world.tell(ev.StopRequested(now=now))
    world.run()
    finishes = phase is finishing and not now
    assert world.outcome.kind == ("finished" if finishes else "stopped")
    assert world.outcome.error is None
    assert len(world.plans) == plans
    assert world.now < begun + 1.5
    assert not world.of(ev.RestartWorker)
    hows = {effect.how for effect in world.of(ev.EndRank)}
    assert hows <= ({"cancel"} if now else {"stop"})
    world.run_for(1.0)
    assert all(rank.where == "ended" for rank in world.ranks.values()), "the workers are free"


def test_the_last_members_are_in_the_view_after_the_end() -> None:
    world = running()
    before = world.view().ranks
    world.tell(ev.StopRequested())
    world.run()
    after = world.view()
    assert (after.state, after.size) == ("stopped", 0)
    assert [(r.rank, r.worker, r.name) for r in after.ranks] == [
        (r.rank, r.worker, r.name) for r in before
    ]
    assert {rank.state for rank in after.ranks} <= {"ending", "ended"}
    world.run_for(1.0)
    assert {rank.state for rank in world.view().ranks} == {"ended"}


def test_stop_at_commit_waits_for_the_commit() -> None:
    script = Script(batches=100, commit_every=20)
    world = trained(job("A0", "B0", np=2, script=script), 5)
    world.tell(ev.StopRequested())
    assert len(world.of(ev.Notify)) == 1
    world.run()
    assert world.outcome.kind == "stopped"
    assert batches(world) == list(range(1, 21))


def test_stop_twice_while_ranks_end() -> None:
    world = setting_up()
    for rank in world.ranks.values():
        rank.deaf = True
    world.tell(ev.StopRequested())
    world.tell(ev.StopRequested(now=True))
    assert [effect.how for effect in world.of(ev.EndRank)] == ["stop", "stop", "cancel", "cancel"]
    world.run()
    assert world.outcome.kind == "stopped"


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
def test_the_scheduler_is_gone(phase: Callable[[], World]) -> None:
    world = phase()
    effects = len(world.effects)
    world.tell(ev.ClusterGone("the scheduler is gone"))
    assert world.outcome.error == "cluster_lost"
    assert world.outcome.reason == ev.Text("the scheduler is gone")
    assert [type(effect).__name__ for effect in world.effects[effects:]] == ["Record", "End"]


# -- loops ---------------------------------------------------------------------------------------


def test_two_loops() -> None:
    world = job("A0", "B0", np=2, reset_limit=0, script=Script(batches=10, loops=2)).run()
    assert world.outcome.kind == "finished"
    assert [plan.loop for plan in world.plans] == [1, 2]
    assert starts(world.plans[0]) == starts(world.plans[1])
    assert batches(world) == [*range(1, 11), *range(1, 11)]
    assert world.plans[1].version == 10
    assert world.machine.roster.version == 20, "a loop's last commit is known as it ends"
    assert world.machine.roster.policy.resets == 0, "the next loop is no change of membership"


def in_second_loop(*names: str, **limits: Any) -> World:
    world = job(*names, script=Script(batches=60, loops=2), elastic_timeout=600.0, **limits)
    world.run(until=lambda: bool(world.plans) and world.plans[-1].loop == 2)
    return world.run_for(0.2)


def test_a_job_with_too_few_ranks_in_a_later_loop_says_at_once_that_none_can_join() -> None:
    world = in_second_loop("A0", "B0", np=2, min_np=2)
    world.kill("A0")
    world.add("C0")
    lost_at = world.now
    world.run()
    assert world.outcome.error == "not_enough_workers"
    assert world.outcome.reason == ev.PastFirstLoop(2, 1, 2)
    assert world.now < lost_at + 30.0


@pytest.mark.parametrize("comes", [True, False])
def test_a_worker_that_is_back_in_a_later_loop_is_an_event(comes: bool) -> None:
    world = in_second_loop("A0", "B0", np=2, min_np=1)
    world.kill("A0")
    if comes:
        world.add("C0", "D0")
    world.run()
    assert world.outcome.kind == "finished"
    assert len(world.of(ev.StartRank)) == 2, "newcomers cannot join it"
    said = world.reasons("warning")
    assert said == [ev.PastFirstLoop(2)] * comes


# -- without a loop ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "retire"])
def test_a_loss_without_a_loop_fails_the_job(how: str) -> None:
    world = job("A0", "B0", "C0", np=3, min_np=1, script=Script(loops=0, before=300))
    trained(world, 10)
    getattr(world, how)("B0")
    world.run()
    assert world.outcome.error == "rank_lost"
    assert "the function has no elastic loop, so it cannot go back" in world.why


def test_a_late_rank_of_a_function_without_a_loop_is_ended() -> None:
    world = job("A0", "B0", np=2, script=Script(loops=0, before=40)).run_for(0.1)
    world.add("C0")
    world.run()
    assert world.outcome.kind == "finished"
    assert world.outcome.starts == (0, 1)
    assert [(e.start, e.how) for e in world.of(ev.EndRank)] == [(2, "stop")]
    assert not world.of(ev.Notify)


def test_without_collectives_a_rank_lost_after_one_returned() -> None:
    world = job("A0", "B0", np=2, script=Script(loops=0, setup=5.0)).run_for(1.0)
    world.ranks[0].end(ev.RankReturned(0))
    world.run_for(0.5)
    world.kill("B0")
    world.run()
    assert world.outcome.error == "rank_lost"
    assert world.why == "1 of 2 ranks ended before they returned"


def test_a_newcomer_left_behind_by_a_plan_ends_with_the_plan() -> None:
    """The messages that come next need no rules, so nothing else would end it."""
    machine = Checked(ev.Limits(np=2, min_np=1))
    slots = [ev.Slot(name, f"tcp://{name}", name, name) for name in ("A0", "B0", "C0")]
    ready = [ev.RankReady(start, 0, ev.FRESH, 0, ("", 0)) for start in (0, 1)]
    effects: list[ev.Effect] = []
    for number, event in enumerate(
        (ev.SlotsFound((*slots[:2],)), ev.SlotsFound((slots[2],)), *ready)
    ):
        effects = machine.handle(event, 0.001 * number, 0.5)
    assert any(isinstance(effect, ev.Publish) for effect in effects)
    assert [effect.start for effect in effects if isinstance(effect, ev.EndRank)] == [2]
    assert not machine.handle(ev.RankFormed(0, 1), 0.005, 0.5)
    machine.replay()
