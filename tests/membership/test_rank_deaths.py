"""Deaths of ranks' processes whose workers live: what is recorded, and what follows."""

from __future__ import annotations

import pytest

from nbelastic.membership import Phase
from nbelastic.membership.failure_policy import SAME_KIND
from nbelastic.messages import (
    Counted,
    EndRank,
    LossReason,
    RankDied,
    RestartWorker,
    SlotGone,
    StopRequested,
    Text,
)

from .ranks import KILLED_AFTER, Script
from .stories import batches, job, trained, workers
from .test_no_progress import in_each_generation
from .world import World

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
    assert (lost.reason.reason, lost.reason.detail) == (LossReason.PROCESS_ENDED, CAUSE)
    assert workers(two.plans[1]) == ["A0", "B0"]
    assert two.rank_on("B0").start == 2
    assert two.now - died < two.script.setup + 0.1, "the slot is used again at once"
    assert not two.of(RestartWorker)
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
    assert (died.start, died.reason) == (rank.start, Text(CAUSE))
    assert not world.machine.roster.dead
    assert len(workers(world.plans[2])) == 3, "its worker is used again"


def test_a_neighbour_reports_what_was_the_end_of_a_worker() -> None:
    world = trained(job("A0", "A1", "A2", np=3, min_np=2, script=LONG), 10)
    world.rank_on("A1").crash(CAUSE)
    world.worker("A1").alive = False  # with its rank; the scheduler is the last to know
    world.run(until=lambda: len(world.plans) == 2)
    assert list(world.machine.roster.dead.values()) == [world.worker("A1").slot]
    world.tell(SlotGone(world.worker("A1").slot.id))
    assert not world.machine.roster.dead
    assert about(world, "A1") == ["joined", "lost"]


def test_a_death_is_counted_once_whoever_reports_it(two: World) -> None:
    start = two.rank_on("B0").start
    for _ in range(2):
        two.tell(RankDied(start, CAUSE))
    assert len(two.records("lost")) == 1
    assert sum(two.machine.roster.policy.worker_failures.values()) == 1


def test_the_death_of_a_rank_that_has_returned_changes_nothing() -> None:
    world = job("A0", "B0", np=2, script=Script(batches=3, after=5.0))
    world.run(until=lambda: world.phase() == Phase.FINISHING)
    rank = world.rank_on("A0")
    rank.worker.holder, rank.where = None, "outside"
    rank.enter()
    world.run_for(0.1)
    world.tell(RankDied(rank.start, CAUSE))
    assert world.run().outcome.kind == "finished"


def test_deaths_at_the_same_commit_again_and_again_end_the_job() -> None:
    world = trained(job("A0", "B0", np=2, min_np=2, script=LONG), 5)
    in_each_generation(world, lambda _: world.crash("B0", CAUSE), lambda _: 1)
    reason = world.outcome.reason
    assert (reason.count.counted, reason.count.times) == (Counted.SAME_WORKER, SAME_KIND)
    assert [lost.detail for lost in reason.causes] == [CAUSE]
    assert reason.last_death == CAUSE
    assert world.outcome.error == "no_progress"


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
    assert not world.of(RestartWorker)


def test_only_a_rank_that_cannot_be_killed_has_its_worker_restarted() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, stall_timeout=20.0, script=LONG), 10)
    rank = world.rank_on("B0")
    rank.hung = rank.deaf = rank.stuck = True
    world.run(until=lambda: bool(world.of(RestartWorker)))
    (order,) = [effect for effect in world.of(EndRank) if effect.how == "evict"]
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


def test_a_rank_that_dies_when_the_job_ends_is_its_end(two: World) -> None:
    two.rank_on("B0").hung = two.rank_on("B0").deaf = True
    two.tell(StopRequested(now=True))
    assert two.phase() == Phase.ENDING
    assert two.run().outcome.kind == "stopped"
    assert not two.of(RestartWorker)
    assert not two.records("lost")
