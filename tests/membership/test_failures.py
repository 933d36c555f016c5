"""Errors of user code, losses of some ranks or all, and exclusions of workers and hosts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from nbelastic import messages as ev
from nbelastic.membership import Machine, Phase
from nbelastic.membership.ranks import Rank

from .ranks import Script
from .world import World, job, reached, starts_on, trained, workers

LONG = Script(batches=2000)


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


def test_an_error_of_all_ranks_at_one_point_ends_the_job() -> None:
    world = trained(job("A0", "B0", "C0", np=3, min_np=1, script=LONG), 20)
    world.tell(ev.RankRaised(1, "RanksDisagree: a, b", version=20, on_all_ranks=True))
    world.run()
    assert world.outcome.error == "rank_failed"
    assert world.outcome.reason.detail == "RanksDisagree: a, b"
    assert not world.records("reset")


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
    assert world.words("reset") == [f"{cause} → 3 ranks"]
    assert not world.of(ev.RestartWorker)


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


# -- exclusions: their length, and their use by the machine ----------------------------------------


def excluded(world: World) -> list[tuple[str, str, int]]:
    """Return what was excluded, and for how many whole seconds."""
    reasons = world.reasons("cooldown")
    return [(each.kind, each.name, int(each.seconds)) for each in reasons]


def test_a_failed_process_is_excluded_for_good_its_successor_not() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, script=LONG))
    world.rank_on("B0").raise_error()
    world.run_for(60.0)
    assert len(starts_on(world, "B0")) == 1
    assert world.reasons("cooldown")[0] == ev.Exclusion("worker", "tcp://B0", None)
    world.kill("B0")
    world.add("B0")
    world.run_for(1.0)
    assert len(starts_on(world, "B0")) == 2


def test_a_newcomer_ends_when_its_worker_is_excluded() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, cooldown=(5.0, 60.0), script=LONG))
    old = world.worker("B0")
    old.alive = False
    world.add("B0")  # word of the new process comes before word of the end of the old one
    world.run_for(0.1)
    assert len(starts_on(world, "B0")) == 2
    old.alive = True
    world.kill(old.slot.id)
    world.run_for(1.0)
    assert [workers(plan) for plan in world.plans] == [["A0", "B0"], ["A0"]]
    world.run_for(6.0)
    assert workers(world.plans[-1]) == ["A0", "B0"]


def test_exclusions_of_a_host_double_until_it_makes_progress() -> None:
    machine = Machine(ev.Limits())
    rank = Rank(0, ev.Slot("B0#1", "tcp://B0", "B0", "B"), since=0.0)
    rests = []
    for failure in range(27):
        slot = structs.replace(rank.slot, name=f"B{failure}")
        machine.roster.now += 5.0
        machine._note_failure(replace(rank, slot=slot), None, process_gone=True)
        if failure % 3 == 2:
            rests.append(machine.roster.policy.repeated.until["B"] - machine.roster.now)
    assert rests == pytest.approx([10, 20, 40, 80, 160, 320, 600, 600, 600])
    machine.roster.note_version(rank, 1)
    for failure in range(3):
        machine.roster.now += 5.0
        slot = structs.replace(rank.slot, name=f"C{failure}")
        machine._note_failure(replace(rank, slot=slot, version=0), None, process_gone=True)
    assert machine.roster.policy.repeated.until["B"] - machine.roster.now == pytest.approx(10)


def test_a_worker_that_always_fails_cannot_starve_the_job() -> None:
    world = trained(
        job("A0", "B0", np=2, min_np=1, script=replace(LONG, batches=100_000, setup=4.0))
    )
    world.add("B9", nanny=True)

    def die_in_set_up() -> None:
        if world.worker("B9").holder is not None:
            world.kill("B9")
        world.later(2.5, die_in_set_up)

    world.later(2.5, die_in_set_up)
    world.kill("B0")  # no rank on its host makes progress
    world.run(until=lambda: bool(world.records("cooldown")))
    assert excluded(world)[0] == ("worker", "B/B9", 10)
    assert len(world.plans) == 2, "those who train are not disturbed"
    asked = world.now
    world.add("B1")
    world.run_for(6.0)
    assert starts_on(world, "B1")[0] == asked, "its host has no part in it"
    assert workers(world.plans[-1]) == ["A0", "B1"]
    world.run_for(600.0)
    assert 6 <= len(starts_on(world, "B9")) <= 9, "it is tried at longer and longer intervals"
    assert len(world.plans) == 3


def test_an_error_that_others_have_excludes_nobody_and_is_said() -> None:
    world = trained(job("A0", "A1", "A2", np=3, min_np=1, script=LONG), 20)
    world.rank_on("A1").raise_error("ValueError: bad row 7")
    world.run_for(1.0)
    assert workers(world.plans[-1]) == ["A0", "A2"], "it may be the worker"
    world.rank_on("A2").raise_error("ValueError: bad row 8")
    world.run_for(3.0)
    assert sorted(workers(world.plans[-1])) == ["A0", "A1", "A2"], "it is not"
    first, second = world.machine.roster.warnings
    assert "a rank raised ValueError: bad row 7\n" in str(first) and "row 8" in str(second)
    assert world.view().errors == 2
    world.rank_on("A1").raise_error("ValueError: bad row 9")
    world.run_for(1.0)
    assert world.why == "ValueError: bad row 9 (raised on 2 workers, one after another)"


# -- deaths of ranks' processes whose workers live -------------------------------------------------


CAUSE = "its process was killed by signal 11 (SIGSEGV)"


def about(world: World, name: str) -> list[str]:
    """Return the kinds of entries of a worker's ranks in the history."""
    kinds = ("joined", "lost", "died", "left")
    return [e.kind for kind in kinds for e in world.records(kind) if e.name == name]


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


def test_a_worker_that_is_gone_reports_no_death_any_more() -> None:
    world = trained(job("A0", "A1", "A2", np=3, min_np=2, script=LONG), 10)
    world.worker("A1").frozen = True
    world.crash("A1")
    world.run(until=lambda: bool(world.machine.roster.dead))
    world.tell(ev.SlotGone(world.worker("A1").slot.id))
    assert not world.machine.roster.dead


def test_a_death_is_counted_once_and_says_how_far_the_rank_had_come() -> None:
    two = trained(job("A0", "B0", np=2, min_np=2, script=LONG), 10)
    start = two.rank_on("B0").start
    for _ in range(2):
        two.tell(ev.RankDied(start, CAUSE, 10_000))
    assert two.machine.roster.newest == 10_000
    assert len(two.records("lost")) == 1
    assert sum(two.machine.roster.policy.worker_failures.values()) == 1


# -- evicted ranks ---------------------------------------------------------------------------------


def test_an_evicted_rank_whose_worker_goes_is_no_second_loss() -> None:
    world = trained(job("A0", "B0", "C0", np=3, min_np=2, stall_timeout=20.0, script=LONG), 10)
    rank = world.rank_on("B0")
    rank.hung = rank.deaf = True
    world.run(until=lambda: len(world.plans) == 2)
    world.kill("B0")
    world.run_for(1.0)
    assert about(world, "B0") == ["joined", "lost"]
    assert len(world.plans) == 2
