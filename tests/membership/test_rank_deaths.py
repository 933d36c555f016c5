"""Deaths of ranks' processes whose workers live: what is recorded, and what follows."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nbelastic import messages as ev
from nbelastic.membership import Phase
from nbelastic.membership.failure_policy import SAME_KIND

from .ranks import KILLED_AFTER, Script
from .world import World, batches, job, trained, workers

LONG = Script(batches=2000)
CAUSE = "its process was killed by signal 11 (SIGSEGV)"


def about(world: World, name: str) -> list[str]:
    """Return the kinds of entries of a worker's ranks in the history."""
    kinds = ("joined", "lost", "died", "left")
    return [e.kind for kind in kinds for e in world.records(kind) if e.name == name]


@pytest.fixture
def two() -> World:
    """Two ranks on two hosts, of which none can be missing."""
    return trained(job("A0", "B0", np=2, min_np=2, script=LONG), 10)


def test_the_history_has_the_cause_and_the_worker_starts_the_next_rank(two: World) -> None:
    two.crash("B0", CAUSE)
    died = two.now
    two.run(until=lambda: len(two.plans) == 2 and two.phase() == Phase.RUNNING)
    (lost,) = two.records("lost")
    assert (lost.rank, lost.name) == (1, "B0")
    assert (lost.reason.reason, lost.reason.detail) == (ev.LossReason.PROCESS_ENDED, CAUSE)
    assert workers(two.plans[1]) == ["A0", "B0"]
    assert two.rank_on("B0").start == 2
    assert two.now - died < two.script.setup + 0.1, "the slot is used again at once"
    assert not two.of(ev.RestartWorker)
    assert not two.records("died")


def test_a_neighbour_may_report_it_before_the_worker_does() -> None:
    world = trained(job("A0", "A1", "A2", np=3, min_np=2, script=LONG), 10)
    world.worker("A1").frozen = True  # its worker is late
    rank = world.rank_on("A1")
    rank.crash(CAUSE)
    world.run(until=lambda: len(world.plans) == 2)
    assert workers(world.plans[1]) == ["A0", "A2"]
    assert about(world, "A1") == ["joined", "lost"]
    world.thaw("A1")
    world.run(until=lambda: len(world.plans) == 3)
    assert about(world, "A1") == ["joined", "joined", "lost", "died"]
    (died,) = world.records("died")
    assert (died.start, died.reason) == (rank.start, ev.Text(CAUSE))
    assert not world.machine.roster.dead
    assert len(workers(world.plans[2])) == 3, "its worker is used again"


def test_a_death_is_counted_once_and_says_how_far_the_rank_had_come(two: World) -> None:
    start = two.rank_on("B0").start
    for _ in range(2):
        two.tell(ev.RankDied(start, CAUSE, 10_000))
    assert two.machine.roster.newest == 10_000
    assert len(two.records("lost")) == 1
    assert sum(two.machine.roster.policy.worker_failures.values()) == 1


def test_deaths_before_the_first_generation_end_the_job_with_their_cause() -> None:
    world = job("A0", np=1, script=Script(setup=1.0))
    for _ in range(SAME_KIND):
        world.run(until=lambda: world.worker("A0").holder is not None)
        world.crash("A0", CAUSE)
        world.run_for(0.1)
    assert world.outcome.error == "no_progress"
    assert world.outcome.reason.last_death == CAUSE
    assert world.outcome.reason.count.times == SAME_KIND


# -- evicted ranks ---------------------------------------------------------------------------------


def test_an_evicted_rank_that_is_killed_leaves_its_worker_free() -> None:
    world = trained(job("A0", "B0", "C0", np=3, min_np=2, stall_timeout=20.0, script=LONG), 10)
    rank = world.rank_on("B0")
    rank.hung = rank.deaf = True
    world.run(until=lambda: len(world.plans) == 2)
    evicted = world.now
    assert workers(world.plans[1]) == ["A0", "C0"]
    assert rank.where == "training", "the others do not wait for its end"
    world.run(until=lambda: len(world.plans) == 3)
    assert world.now - evicted >= KILLED_AFTER["evict"]
    assert "B0" in workers(world.plans[2])
    assert about(world, "B0") == ["joined", "joined", "lost"], "its end is no second loss"
    assert world.machine.roster.last_death == "", "that its worker killed it is no cause"
    assert not world.of(ev.RestartWorker)


def test_only_a_rank_that_cannot_be_killed_has_its_worker_restarted() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, stall_timeout=20.0, script=LONG), 10)
    rank = world.rank_on("B0")
    rank.hung = rank.deaf = rank.stuck = True
    world.run(until=lambda: bool(world.of(ev.RestartWorker)))
    (order,) = [effect for effect in world.of(ev.EndRank) if effect.how == "evict"]
    assert order.start == rank.start
    assert workers(world.plans[1]) == ["A0"]
    assert len(batches(world)) > 10


def test_an_evicted_rank_whose_worker_goes_is_no_second_loss() -> None:
    world = trained(job("A0", "B0", "C0", np=3, min_np=2, stall_timeout=20.0, script=LONG), 10)
    rank = world.rank_on("B0")
    rank.hung = rank.deaf = True
    world.run(until=lambda: len(world.plans) == 2)
    world.kill("B0")
    world.run_for(1.0)
    assert about(world, "B0") == ["joined", "lost"]
    assert len(world.plans) == 2


def test_reports_of_oneself_or_of_a_ready_rank_are_ignored() -> None:
    world = trained(job("A0", "B0", "C0", np=3, min_np=2, script=LONG), 10)
    report = ev.RankReady(0, 1, 10, 1, ("", 0), failed=True, gone=(0, 7))
    world.tell(report)
    world.tell(replace(report, start=1, gone=(0,)))
    assert set(world.machine.roster.ranks) == {0, 1, 2}
