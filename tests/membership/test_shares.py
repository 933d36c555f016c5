"""A job that shares its cluster: its share bounds it, and costs it nothing."""

from __future__ import annotations

import pytest

from nbelastic.membership import Stage, pack_machine, place_of, unpack_machine, view
from nbelastic.membership.placement import choose_released
from nbelastic.messages import (
    EndOrder,
    EndRank,
    EndReason,
    LimitsChanged,
    LossReason,
    Lost,
    RankReturned,
    Record,
    SaveCommit,
    ShareChanged,
    ShareSet,
    Sharing,
    SlotsFound,
    StartRank,
)

from .invariants import contents
from .ranks import Script
from .stories import batches, job, trained, workers

LONG = Script(batches=2000)


def share(world, number, *, reclaimed=()):
    world.tell(ShareSet(number, 4, ("bert",), 1, tuple(reclaimed)))


def offer(world, *names):
    world.tell(SlotsFound(tuple(world.worker(name).slot for name in names)))


def test_a_share_takes_ranks_at_a_commit_and_nothing_is_redone() -> None:
    world = trained(job("A0", "B0", "C0", "D0", np=4, min_np=1, max_np=4, script=LONG))
    share(world, 2)
    world.run_for(5.0)
    assert world.sizes() == [4, 2]
    assert batches(world) == sorted(set(batches(world)))
    assert not world.records("lost")
    left = {(record.reason.reason, record.reason.detail) for record in world.records("left")}
    assert left == {(LossReason.LEFT, EndReason.SHARED.value)}
    orders = {effect.reason for effect in world.of(EndRank)}
    assert orders == {EndOrder(EndReason.SHARED)}


def test_a_job_does_not_take_back_what_it_gave_until_it_is_offered() -> None:
    world = trained(job("A0", "B0", "C0", np=3, min_np=1, script=LONG))
    share(world, 1)
    world.run_for(5.0)
    started = len(world.of(StartRank))
    share(world, 3)
    world.run_for(5.0)
    assert len(world.of(StartRank)) == started, "no slot was offered"
    offer(world, "B0", "C0")
    world.run_for(5.0)
    assert world.sizes() == [3, 1, 3]


def test_a_share_that_is_lifted_bounds_nothing() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, max_np=2, script=LONG))
    share(world, 1)
    world.run_for(5.0)
    world.tell(ShareSet(None))
    offer(world, "B0")
    world.run_for(5.0)
    assert world.sizes() == [2, 1, 2]
    assert view(world.machine.machine, world.now).share is None


def test_a_job_that_waits_starts_with_its_share_if_that_is_its_floor() -> None:
    world = job(np=4, min_np=2, script=LONG)
    share(world, 0)
    world.add("A0", "B0", "C0")
    world.run_for(5.0)
    assert not world.of(StartRank)
    share(world, 3)
    offer(world, "A0", "B0", "C0")
    trained(world)
    assert len(world.plans[0].members) == 3


def test_ranks_that_set_up_end_when_another_job_goes_first() -> None:
    world = job("A0", "B0", np=2, script=Script(batches=2000, setup=3.0))
    world.run_for(1.0)
    share(world, 0)
    world.run_for(1.0)
    assert {effect.how for effect in world.of(EndRank)} == {"leave"}
    assert not world.machine.roster.ranks
    assert world.outcome is None


@pytest.mark.parametrize("limit", [0, 1])
def test_resets_by_sharing_do_not_count_for_the_reset_limit(limit: int) -> None:
    script = Script(batches=400)
    world = trained(job("A0", "B0", "C0", np=3, min_np=1, reset_limit=limit, script=script))
    for number in (1, 2, 1):
        share(world, number)
        offer(world, "B0", "C0")
        world.run_for(2.0)
    assert world.machine.roster.policy.resets == 3
    world.tell(LimitsChanged(max_np=1, min_np=1))
    share(world, 3)
    world.run_for(1.0)
    world.tell(LimitsChanged(max_np=2))
    world.add("D0")
    world.run()
    assert world.outcome.kind == "finished"


def test_a_loss_is_allowed_after_resets_by_sharing() -> None:
    script = Script(batches=400)
    world = trained(job("A0", "B0", "C0", np=3, min_np=1, reset_limit=1, script=script))
    share(world, 2)
    world.run_for(2.0)
    world.kill("A0")
    world.run()
    assert world.outcome.kind == "finished"


def test_a_loss_still_counts_for_the_reset_limit() -> None:
    world = trained(job("A0", "B0", "C0", np=3, min_np=1, reset_limit=0, script=LONG))
    share(world, 2)
    world.run_for(2.0)
    world.kill("A0")
    world.run()
    assert world.outcome.kind == "failed"


def test_a_preemptible_job_waits_with_one_rank_and_its_time_stands_still() -> None:
    world = trained(
        job("A0", "B0", "C0", np=3, min_np=2, preemptible=True, elastic_timeout=30.0, script=LONG),
        20,
    )
    share(world, 1)
    world.run_for(100.0)
    assert world.outcome is None
    seen = view(world.machine.machine, world.now)
    assert seen.state == "waiting"
    assert seen.sharing == Sharing(1, 4, ("bert",), 1, suspended=True)
    commits = seen.commits
    assert commits > 0
    share(world, 3)
    offer(world, "B0", "C0")
    world.run_for(5.0)
    assert (world.sizes()[0], world.sizes()[-1]) == (3, 3)
    assert batches(world) == sorted(set(batches(world))), "nothing is redone"
    assert view(world.machine.machine, world.now).commits > commits


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


@pytest.mark.parametrize("change", [ShareSet(1, 4, ("bert",), 1), LimitsChanged(1, 1)])
def test_ranks_are_not_too_many_while_the_others_return(change) -> None:
    world = job("A0", "B0", "C0", np=3, script=Script(setup=50.0))
    world.run_for(1.0)
    for start in (0, 1):
        world.tell(RankReturned(start))
    world.tell(change)
    world.run_for(1.0)
    assert not world.of(EndRank)
    world.tell(RankReturned(2))
    assert world.outcome.kind == "finished"


def suspended(*, resumable: bool):
    limits = {"np": 3, "min_np": 2, "preemptible": True, "elastic_timeout": 30.0}
    world = trained(job("A0", "B0", "C0", checkpoint=resumable, script=LONG, **limits), 20)
    share(world, 1)
    world.run_for(50.0)
    assert len(world.machine.roster.ranks) == 1
    return world


def test_a_suspended_job_with_a_checkpoint_writes_its_last_commit_once() -> None:
    world = suspended(resumable=True)
    (left,) = world.machine.roster.ranks
    assert [effect.start for effect in world.of(SaveCommit)] == [left]
    world.run_for(50.0)
    assert len(world.of(SaveCommit)) == 1
    share(world, 3)
    offer(world, "A0", "B0", "C0")
    world.run_for(10.0)
    assert world.sizes()[-1] > 1
    share(world, 1)
    world.run_for(50.0)
    assert len(world.of(SaveCommit)) == 2, "suspended again, with a newer one"


def test_without_a_checkpoint_or_where_workers_are_missing_none_is_written() -> None:
    assert suspended(resumable=False).of(SaveCommit) == []
    limits = {"np": 2, "min_np": 2, "preemptible": True, "checkpoint": True}
    world = trained(job("A0", "B0", script=LONG, elastic_timeout=30.0, **limits), 20)
    world.kill("B0")
    world.run_for(10.0)
    assert world.of(SaveCommit) == []


def test_a_suspended_job_that_yields_saves_its_state_and_starts_again() -> None:
    world = suspended(resumable=True)
    share(world, 0)
    world.run_for(50.0)
    saving = [effect for effect in world.of(EndRank) if effect.save > 0]
    assert [effect.how for effect in saving] == ["leave"]
    assert not world.machine.roster.ranks
    seen = view(world.machine.machine, world.now)
    assert (seen.state, seen.sharing) == ("waiting", Sharing(0, 4, ("bert",), 1, suspended=True))
    share(world, 2)
    offer(world, "A0", "B0")
    world.run_for(5.0)
    assert world.sizes()[-1] == 2
    assert world.outcome is None


def test_a_suspended_job_that_cannot_yield_fails_in_time_with_its_state() -> None:
    world = suspended(resumable=False)
    share(world, 0)
    world.run_for(20.0)
    assert len(world.machine.roster.ranks) == 1
    share(world, 1)
    world.run_for(50.0)
    assert world.outcome is None, "its time stands still again"
    share(world, 0)
    world.run_for(40.0)
    assert world.outcome.error == "not_enough_workers"


def test_the_time_of_a_suspended_job_runs_while_the_cluster_is_too_small() -> None:
    world = suspended(resumable=True)
    world.tell(ShareSet(1, 1, ("bert",), 1))
    world.run_for(20.0)
    share(world, 1)
    world.run_for(50.0)
    assert world.outcome is None
    world.tell(ShareSet(1, 1, ("bert",), 1))
    world.run_for(40.0)
    assert world.outcome.error == "not_enough_workers"


def test_a_job_that_is_not_preemptible_fails_in_time_without_its_floor() -> None:
    world = trained(job("A0", "B0", np=2, min_np=2, elastic_timeout=30.0, script=LONG))
    share(world, 1)
    world.run_for(40.0)
    assert world.outcome.error == "not_enough_workers"


def test_a_job_leaves_the_slot_that_another_needs_and_takes_another() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, max_np=2, script=LONG))
    share(world, 2, reclaimed=[world.worker("A0").slot.id])
    world.add("C0")
    world.run_for(5.0)
    assert workers(world.plans[-1]) == ["B0", "C0"]
    assert not world.records("lost")
    assert batches(world) == sorted(set(batches(world)))


def test_the_last_holder_of_the_state_stays_until_another_has_it() -> None:
    world = trained(job("A0", np=1, min_np=1, max_np=1, script=LONG), 30)
    share(world, 1, reclaimed=[world.worker("A0").slot.id])
    world.run_for(50.0)
    assert set(world.sizes()) == {1}
    assert len(world.plans) < 5
    copy = unpack_machine(pack_machine(world.machine.machine))
    assert contents(copy) == contents(world.machine.machine)
    world.add("B0")
    world.run_for(10.0)
    assert workers(world.plans[-1]) == ["B0"]
    assert not world.records("restarted")


def test_a_worker_that_leaves_does_not_wait_because_of_other_jobs() -> None:
    world = trained(job("A0", np=1, min_np=1, max_np=1, script=LONG), 30)
    share(world, 1, reclaimed=[world.worker("A0").slot.id])
    world.run_for(5.0)
    world.retire("A0", grace=60.0)
    world.run_for(40.0)
    assert [record.reason.reason for record in world.records("left")] == [LossReason.LEFT]


def test_history_and_view_have_the_share() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, script=LONG))
    share(world, 1)
    share(world, 1)
    assert [record.reason for record in world.records("share")] == [
        ShareChanged(None, 1, ("bert",), 1)
    ]
    seen = view(world.machine.machine, world.now)
    assert (seen.share, seen.sharing) == (1, Sharing(1, 4, ("bert",), 1))
    world.tell(LimitsChanged(max_np=1))
    assert view(world.machine.machine, world.now).sharing is None, "it wants no more"
    assert isinstance(world.records("share")[0], Record)
    assert not isinstance(world.records("share")[0].reason, Lost)


class On:
    """A member on a slot."""

    def __init__(self, world, name):
        self.slot = world.worker(name).slot


@pytest.mark.parametrize(
    ("names", "number", "gone"),
    [
        ("A0 A1 A2", 1, "A2"),
        ("A0 B0 C0", 2, "C0 B0"),
        ("A0 B0 B1", 1, "A0"),
        ("A0 A1 B0 B1", 2, "B1 B0"),
        ("A0 A1 B0 B1", 1, "B1"),
        ("A0 A1 A2 B0", 2, "B0 A2"),
        ("A0 A1", 2, "A1 A0"),
    ],
)
def test_the_youngest_leave_and_small_hosts_as_a_whole(names, number, gone) -> None:
    world = job(*names.split())
    members = [On(world, name) for name in names.split()]
    released = choose_released(members, number)
    assert [member.slot.name for member in released] == gone.split()
    left = [member.slot for member in members if member not in released]
    assert all(place_of(left, rank).size == len(left) for rank in range(len(left)))


def test_the_only_holder_of_the_newest_state_stays() -> None:
    world = job("A0", "B0", "C0")
    members = [On(world, name) for name in ("A0", "B0", "C0")]
    assert choose_released(members, 2, keep=members[2]) == [members[1], members[0]]
