"""A job that shares its cluster: its share bounds it, and costs it nothing."""

from __future__ import annotations

import pytest

from nbelastic import messages as ev
from nbelastic.membership import Stage

from .ranks import Script
from .world import batches, job, trained

LONG = Script(batches=2000)


def share(world, number, *, reclaimed=()):
    world.tell(ev.ShareSet(ev.Sharing(number, 4, ("bert",), 1), tuple(reclaimed)))


def offer(world, *names):
    world.tell(ev.SlotsFound(tuple(world.worker(name).slot for name in names)))


def test_a_share_takes_ranks_at_a_commit_and_nothing_is_redone() -> None:
    world = trained(job("A0", "B0", "C0", "D0", np=4, min_np=1, max_np=4, script=LONG))
    share(world, 2)
    world.run_for(5.0)
    assert world.sizes() == [4, 2]
    assert batches(world) == sorted(set(batches(world)))
    assert not world.records("lost")
    left = {(record.reason.reason, record.reason.detail) for record in world.records("left")}
    assert left == {(ev.LossReason.LEFT, str(ev.SHARED))}
    orders = {effect.reason for effect in world.of(ev.EndRank)}
    assert orders == {ev.SHARED}


def test_a_preemptible_job_waits_with_one_rank_and_its_time_stands_still() -> None:
    world = trained(
        job("A0", "B0", "C0", np=3, min_np=2, preemptible=True, elastic_timeout=30.0, script=LONG),
        20,
    )
    share(world, 1)
    world.run_for(100.0)
    assert world.outcome is None
    seen = world.view()
    assert seen.state == "waiting"
    assert world.present_reasons()[-1] == ev.Sharing(1, 4, ("bert",), 1, suspended=True)
    commits = seen.commits
    assert commits > 0
    share(world, 3)
    offer(world, "B0", "C0")
    world.run_for(5.0)
    assert (world.sizes()[0], world.sizes()[-1]) == (3, 3)
    assert batches(world) == sorted(set(batches(world))), "nothing is redone"
    assert world.view().commits > commits


@pytest.mark.parametrize("lost", [True, False])
def test_a_suspended_job_that_gathers_gives_up_all_ranks_but_one(lost: bool) -> None:
    limits = {"np": 4, "min_np": 3, "preemptible": True, "elastic_timeout": 30.0}
    world = trained(job("A0", "B0", "C0", "D0", script=LONG, **limits), 30)
    if lost:
        world.kill("D0")
        world.kill("C0")
        world.run_for(2.0)
    else:
        world.kill("D0")
        world.run(until=lambda: len(world.machine.roster.in_stage(Stage.READY)) == 2)
    share(world, 1)
    world.run_for(2.0)
    assert len(world.machine.roster.ranks) == 1
    assert not world.records("restarted")


@pytest.mark.parametrize(
    "change", [ev.ShareSet(ev.Sharing(1, 4, ("bert",), 1)), ev.LimitsChanged(1, 1)]
)
def test_ranks_are_not_too_many_while_the_others_return(change) -> None:
    world = job("A0", "B0", "C0", np=3, script=Script(setup=50.0))
    world.run_for(1.0)
    for start in (0, 1):
        world.tell(ev.RankReturned(start))
    world.tell(change)
    world.run_for(1.0)
    assert not world.of(ev.EndRank)
    world.tell(ev.RankReturned(2))
    assert world.outcome.kind == "finished"


def test_the_time_of_a_suspended_job_runs_while_it_cannot_go_on() -> None:
    """The cluster has too few slots, besides those of suspended jobs that come first."""
    limits = {"np": 3, "min_np": 2, "preemptible": True, "elastic_timeout": 30.0}
    world = trained(job("A0", "B0", "C0", script=LONG, **limits), 20)
    for slots, seconds in ((4, 50.0), (1, 20.0), (4, 50.0)):
        world.tell(ev.ShareSet(ev.Sharing(1, slots, ("bert",), 1)))
        world.run_for(seconds)
        assert world.outcome is None
        assert len(world.machine.roster.ranks) == 1, "with its state"
    world.tell(ev.ShareSet(ev.Sharing(1, 1, ("bert",), 1)))
    world.run_for(40.0)
    assert world.outcome.error == "not_enough_workers"


def test_history_and_view_have_the_share() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, script=LONG))
    share(world, 1)
    share(world, 1)
    assert world.words("share") == ["all → 1: shares with bert"]
    seen = world.view()
    assert (seen.share, world.present_reasons()) == (1, [ev.Sharing(1, 4, ("bert",), 1)])
    world.tell(ev.LimitsChanged(max_np=1))
    assert world.present_reasons() == [], "it wants no more"
    world.tell(ev.ShareSet(None))
    assert world.words("share")[1] == "1 → all"
