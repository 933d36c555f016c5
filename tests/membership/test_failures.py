"""Errors of user code, losses of some ranks, and the loss of all."""

from __future__ import annotations

import pytest

from nbelastic.membership import Phase
from nbelastic.membership.failure_policy import SAME_KIND
from nbelastic.messages import (
    Abort,
    Counted,
    EndRank,
    LossReason,
    Lost,
    RankId,
    RankRaised,
    Reset,
    RestartWorker,
    StartRank,
    Tally,
    UserErrors,
)

from .ranks import Script
from .stories import batches, job, starts, trained, workers
from .world import World

LONG = Script(batches=400)


# -- user code raises ----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["setup", "training"])
def test_before_the_first_commit_it_fails_the_job(where: str) -> None:
    script = Script(batches=100, commit_every=50)
    world = job("A0", "B0", np=2, script=script).run_for(0.1)
    if where == "training":
        trained(world, 5)
    world.rank_on("B0").raise_error("ZeroDivisionError: by zero")
    world.run()
    assert world.outcome.error == "rank_failed"
    assert world.outcome.reason.rank.worker == "tcp://B0"
    assert world.outcome.reason.detail == "ZeroDivisionError: by zero"
    assert world.outcome.starts == (1,)
    assert [(effect.start, effect.how) for effect in world.of(EndRank)] == [(0, "cancel")]


def test_errors_of_others_while_the_job_ends_are_kept_too() -> None:
    world = job("A0", "B0", "C0", np=3, script=LONG).run_for(0.1)
    for name in ("B0", "A0"):
        world.rank_on(name).raise_error("KeyError: 1")
    world.run()
    assert sorted(world.outcome.starts) == [0, 1]


def test_after_a_commit_the_rank_counts_as_failed() -> None:
    world = trained(job("A0", "B0", "C0", np=3, min_np=2, script=LONG), 20)
    world.rank_on("B0").raise_error("ValueError: sample 7")
    world.run()
    assert world.outcome.kind == "finished"
    assert workers(world.plans[-1]) == ["A0", "C0"]
    lost = Lost(RankId(1, 1, "tcp://B0"), LossReason.RAISED, "ValueError: sample 7")
    assert world.records("lost")[0].reason == lost
    once = Tally(Counted.SAME_WORKER, 1, SAME_KIND, 20)
    assert world.records("reset")[0].reason == Reset((lost,), 2, once)


def test_an_error_of_all_ranks_at_one_point_ends_the_job() -> None:
    world = trained(job("A0", "B0", "C0", np=3, min_np=1, script=LONG), 20)
    world.tell(RankRaised(1, "RanksDisagree: a, b", version=20, on_all_ranks=True))
    world.run()
    assert world.outcome.error == "rank_failed"
    assert world.outcome.reason.detail == "RanksDisagree: a, b"
    assert not world.records("reset")


def test_the_only_rank_raises_after_commits() -> None:
    world = trained(job("A0", np=1, script=LONG), 20)
    world.rank_on("A0").raise_error("ValueError: x")
    world.run()
    assert world.outcome.error == "rank_failed"
    assert world.outcome.reason == UserErrors(("ValueError: x",))


def test_after_the_loop_it_fails_the_job() -> None:
    world = job("A0", "B0", np=2, min_np=1, script=Script(batches=5, after=1.0))
    world.run(until=lambda: world.phase() == Phase.FINISHING)
    world.rank_on("B0").raise_error("OSError: disk full")
    world.run()
    assert world.outcome.error == "rank_failed"
    assert world.outcome.reason.detail == "OSError: disk full"


def test_a_newcomer_that_raises_is_left_out_and_soon_forgotten() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, elastic_timeout=30.0, script=LONG), 20)
    world.add("C0")
    world.run_for(0.1)
    world.rank_on("C0").raise_error("ImportError: torchvision")
    world.run_for(1.0)
    assert len(world.plans) == 1, "the others do not notice"
    world.kill("A0")
    world.kill("B0")
    world.run()
    assert world.outcome.error == "not_enough_workers", "that error is not why"


def test_a_collective_that_fails_without_a_loop_is_a_consequence() -> None:
    world = trained(job("A0", "B0", "C0", np=3, script=Script(loops=0, before=100)), 5)
    world.rank_on("B0").raise_error("the connection broke", collective=True)
    world.run()
    assert world.outcome.error == "rank_lost"
    assert world.outcome.starts == ()


def test_a_cause_that_is_heard_after_its_consequence_is_the_cause() -> None:
    world = trained(job("A0", "B0", np=2, script=Script(loops=0, before=100)), 5)
    cause, other = (world.rank_on(name).start for name in ("A0", "B0"))
    world.tell(RankRaised(other, "rank 0 has left", collective=True))
    world.tell(RankRaised(cause, "ValueError: bad"))
    world.run()
    assert world.outcome.error == "rank_failed"
    assert world.outcome.reason.detail == "ValueError: bad"
    assert world.outcome.starts == (cause,)


def test_a_collective_error_out_of_the_loop_costs_that_rank() -> None:
    script = Script(batches=100, commit_every=50)
    world = trained(job("A0", "B0", "C0", np=3, min_np=1, script=script), 5)
    world.rank_on("B0").raise_error("the connection broke", collective=True)
    world.run()
    assert world.outcome.kind == "finished"
    assert workers(world.plans[-1]) == ["A0", "C0"]


# -- losses --------------------------------------------------------------------------------------


def test_survivors_are_aborted_at_once_and_only_once() -> None:
    world = trained(job("A0", "B0", "C0", "D0", np=4, min_np=1, script=LONG), 10)
    killed = world.now
    world.kill("B0")
    world.run(until=lambda: len(world.plans) == 2)
    assert [effect.starts for effect in world.of(Abort)] == [(0, 2, 3)]
    assert world.now - killed < 0.05
    cause = Lost(RankId(1, 1, "tcp://B0"), LossReason.WORKER_GONE)
    once = Tally(Counted.SAME_WORKER, 1, SAME_KIND, 10)
    assert [record.reason for record in world.records("reset")] == [Reset((cause,), 3, once)]
    assert not world.of(RestartWorker)


def test_two_losses_in_one_reset() -> None:
    world = trained(job("A0", "B0", "C0", "D0", np=4, min_np=1, script=LONG), 10)
    world.kill("B0")
    world.kill("C0")
    world.run()
    assert world.outcome.kind == "finished"
    assert world.sizes() == [4, 2]
    assert len(world.records("reset")) == 1


def test_a_loss_while_the_next_generation_forms() -> None:
    world = trained(job("A0", "B0", "C0", "D0", np=4, min_np=1, script=LONG), 10)
    world.kill("B0")
    world.run(until=lambda: len(world.plans) == 2)
    world.kill("C0")
    world.run()
    assert world.outcome.kind == "finished"
    assert starts(world.plans[-1]) == [0, 3]
    assert len(batches(world)) <= 402


def test_a_newcomer_that_dies_while_joining() -> None:
    world = trained(job("A0", "B0", np=2, min_np=2, script=LONG), 10)
    world.add("C0")
    world.run(until=lambda: len(world.plans) == 2)
    world.kill("C0")
    world.run()
    assert world.outcome.kind == "finished"
    assert [workers(plan) for plan in world.plans] == [
        ["A0", "B0"],
        ["A0", "B0", "C0"],
        ["A0", "B0"],
    ]
    assert world.machine.roster.version >= 400


def test_members_that_fail_to_form_keep_their_order() -> None:
    world = job("A0", "B0", "A1", "C0", np=4, min_np=2, script=LONG)
    world.run(until=lambda: world.phase() == Phase.FORMING)
    assert starts(world.plans[0]) == [0, 2, 1, 3]
    world.kill("A0")
    world.run(until=lambda: len(world.plans) == 2)
    assert starts(world.plans[1]) == [2, 1, 3]


def test_all_are_lost_and_workers_return() -> None:
    world = job("A0", "B0", np=2, min_np=1, script=Script(batches=60))
    world.at(20, lambda: [world.kill("A0"), world.kill("B0")])
    world.at(20, lambda: world.later(1.0, lambda: world.add("C0", "D0")))
    world.run()
    assert world.outcome.kind == "finished"
    assert len(world.records("restarted")) == 1
    assert [starts(plan) for plan in world.plans] == [[0, 1], [2, 3]], "both begin together"


def test_all_are_lost_after_the_loop_and_workers_return() -> None:
    world = World(job(np=2, min_np=2).machine.limits, Script(batches=10, after=0.5))
    world.add("A0", "B0", nanny=True)
    world.run(until=lambda: world.phase() == Phase.FINISHING)
    world.kill("A0")
    world.kill("B0")
    world.run()
    assert world.outcome.kind == "finished"
    assert world.outcome.starts == (2, 3)
    assert len(world.records("restarted")) == 1


def test_after_the_loop_a_loss_costs_the_others_nothing() -> None:
    world = job("A0", "B0", "C0", np=3, script=Script(batches=5, after=2.0))
    world.run(until=lambda: world.phase() == Phase.FINISHING)
    world.kill("B0")
    world.run()
    assert world.outcome.error == "rank_lost", "its result is missing"
    assert not world.of(EndRank), "the others came to their end"
    assert world.now > 2.0


def test_a_worker_that_leaves_after_the_loop_is_let_return() -> None:
    world = job("A0", "B0", np=2, script=Script(batches=5, after=2.0))
    world.run(until=lambda: world.phase() == Phase.FINISHING)
    world.retire("B0")
    world.run()
    assert world.outcome.kind == "finished"
    assert world.outcome.starts == (0, 1)


def test_a_worker_cut_off_is_replaced_and_then_ignored() -> None:
    world = trained(job("A0", "B0", "C0", np=2, min_np=2, max_np=2, script=LONG), 10)
    world.cut("B0", after=3.0)
    world.run(until=lambda: len(world.plans) == 2)
    assert workers(world.plans[1]) == ["A0", "C0"]
    (start,) = [effect for effect in world.of(StartRank) if effect.slot.name == "B0"]
    world.tell(RankRaised(start.start, "ValueError: from the other side"))
    world.run()
    assert world.outcome.kind == "finished"
