"""Errors of user code, losses of some ranks, and the loss of all."""

from __future__ import annotations

import pytest

from nbelastic import messages as ev
from nbelastic.membership import Phase
from nbelastic.membership.failure_policy import SAME_KIND

from .ranks import Script
from .world import World, job, reached, starts_on, trained, workers

LONG = Script(batches=1000)


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
    assert [(effect.start, effect.how) for effect in world.of(ev.EndRank)] == [(0, "cancel")]


def test_after_a_commit_the_rank_counts_as_failed() -> None:
    world = trained(job("A0", "B0", "C0", np=3, min_np=2, script=LONG), 20)
    world.rank_on("B0").raise_error("ValueError: sample 7")
    world.run()
    assert world.outcome.kind == "finished"
    assert workers(world.plans[-1]) == ["A0", "C0"]
    lost = ev.Lost(ev.RankId(1, 1, "tcp://B0"), ev.LossReason.RAISED, "ValueError: sample 7")
    assert world.reasons("lost")[0] == lost
    once = ev.Tally(ev.Counted.SAME_WORKER, 1, SAME_KIND, 20)
    assert world.reasons("reset")[0] == ev.Reset((lost,), 2, once)


def test_an_error_of_all_ranks_at_one_point_ends_the_job() -> None:
    world = trained(job("A0", "B0", "C0", np=3, min_np=1, script=LONG), 20)
    world.tell(ev.RankRaised(1, "RanksDisagree: a, b", version=20, on_all_ranks=True))
    world.run()
    assert world.outcome.error == "rank_failed"
    assert world.outcome.reason.detail == "RanksDisagree: a, b"
    assert not world.records("reset")


def test_the_only_rank_raises_after_commits() -> None:
    world = trained(job("A0", np=1, script=LONG), 20)
    world.rank_on("A0").raise_error("ValueError: x")
    world.run()
    assert world.outcome.error == "rank_failed"
    assert world.outcome.reason == ev.UserErrors(("ValueError: x",))


def test_after_the_loop_it_fails_the_job() -> None:
    world = reached(
        Phase.FINISHING, job("A0", "B0", np=2, min_np=1, script=Script(batches=5, after=1.0))
    )
    world.rank_on("B0").raise_error("OSError: disk full")
    world.run()
    assert world.outcome.error == "rank_failed"
    assert world.outcome.reason.detail == "OSError: disk full"


def test_a_collective_that_fails_without_a_loop_is_a_consequence() -> None:
    world = trained(job("A0", "B0", "C0", np=3, script=Script(loops=0, before=100)), 5)
    world.rank_on("B0").raise_error("the connection broke", collective=True)
    world.run()
    assert world.outcome.error == "rank_lost"
    assert world.outcome.starts == ()


def test_a_cause_that_is_heard_after_its_consequence_is_the_cause() -> None:
    world = trained(job("A0", "B0", np=2, script=Script(loops=0, before=100)), 5)
    cause, other = (world.rank_on(name).start for name in ("A0", "B0"))
    world.tell(ev.RankRaised(other, "rank 0 has left", collective=True))
    world.tell(ev.RankRaised(cause, "ValueError: bad"))
    world.run()
    assert world.outcome.error == "rank_failed"
    assert world.outcome.reason.detail == "ValueError: bad"
    assert world.outcome.starts == (cause,)


# -- losses --------------------------------------------------------------------------------------


def test_survivors_are_aborted_at_once_and_only_once() -> None:
    world = trained(job("A0", "B0", "C0", "D0", np=4, min_np=1, script=LONG), 10)
    killed = world.now
    world.kill("B0")
    world.run(until=lambda: len(world.plans) == 2)
    assert [effect.starts for effect in world.of(ev.Abort)] == [(0, 2, 3)]
    assert world.now - killed < 0.05
    cause = ev.Lost(ev.RankId(1, 1, "tcp://B0"), ev.LossReason.WORKER_GONE)
    once = ev.Tally(ev.Counted.SAME_WORKER, 1, SAME_KIND, 10)
    assert world.reasons("reset") == [ev.Reset((cause,), 3, once)]
    assert not world.of(ev.RestartWorker)


def test_all_are_lost_after_the_loop_and_workers_return() -> None:
    script = Script(batches=10, after=0.5)
    world = reached(Phase.FINISHING, job("A0", "B0", np=2, min_np=2, script=script, nanny=True))
    world.kill("A0")
    world.kill("B0")
    world.run()
    assert world.outcome.kind == "finished"
    assert world.outcome.starts == (2, 3)
    assert len(world.records("restarted")) == 1


# -- newcomers with a different state: the others go on, and their workers are not lost -----------


MISFIT = "StateMismatch: parameter model.late.weight: expected nothing, came float32 [1, 1]"


def join(world: World, *names: str) -> None:
    """Let newcomers join, and have them find that their state does not fit."""
    plans = len(world.plans)
    world.run(until=lambda: len(world.plans) > plans)
    for rank in map(world.rank_on, names):
        rank.end(ev.RankRaised(rank.start, MISFIT, state_mismatch=True))


def test_workers_whose_states_differed_end_nothing_and_are_tried_again_later() -> None:
    world = trained(job("A0", "B0", min_np=2, script=LONG))
    newcomers = ("C0", "D0", "E0", "F0")
    world.add(*newcomers)
    join(world, *newcomers)
    world.run_for(5.0)
    assert [len(starts_on(world, name)) for name in newcomers] == [1] * 4
    assert world.outcome is None and world.sizes()[-1] == 2
    world.run(until=lambda: world.sizes()[-1] == 6)


def test_where_the_job_needs_them_it_ends_with_what_does_not_fit() -> None:
    world = trained(job("A0", "B0", min_np=2, max_np=2, script=LONG))
    world.add("C0", "D0")
    world.kill("A0")
    join(world, "C0")
    join(world, "D0")
    world.run()
    assert world.outcome.kind == "failed"
    assert MISFIT in str(world.outcome.reason)
