"""Time limits: stalls, and ranks that are not ready, connected, ended or in reach in time."""

from __future__ import annotations

import itertools

import pytest
from msgspec import structs

from nbelastic import messages as ev
from nbelastic.membership import Phase
from nbelastic.membership.placement import choose_removed

from .ranks import FakeRank, Script
from .world import World, batches, job, reached, trained, workers

LONG = Script(batches=2000)


def restarted(world: World) -> list[str]:
    return [effect.slot.name for effect in world.of(ev.RestartWorker)]


def evicted(world: World) -> list[str]:
    return [slot.name for slot in world.evicted()]


def stopped_beats(world: World) -> None:
    """Have no heartbeat arrive any more."""
    world._beat = lambda: world.later(1e9, lambda: None)


# -- stalls --------------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", ["A0", "B0", "C0"])
def test_only_the_rank_that_hangs_is_evicted(culprit: str) -> None:
    world = trained(job("A0", "B0", "C0", np=3, min_np=2, stall_timeout=20.0, script=LONG), 10)
    begun = world.now
    world.rank_on(culprit).hung = True
    world.run(until=lambda: len(world.plans) == 2)
    assert evicted(world) == [culprit]
    assert not restarted(world)
    assert culprit not in workers(world.plans[1])
    assert 19.0 < world.now - begun < 22.0
    assert world.reasons("lost")[0].reason == ev.LossReason.STALLED
    assert world.reasons("lost")[0].seconds == 20.0


def test_slow_steps_are_no_stall() -> None:
    script = Script(batches=3, step=30.0)
    world = job("A0", "B0", np=2, stall_timeout=20.0, script=script).run()
    assert world.outcome.kind == "finished"
    assert len(world.plans) == 1


def test_late_messages_evict_no_rank() -> None:
    world = trained(job("A0", "B0", np=2, stall_timeout=20.0, script=LONG), 10)
    world.rank_on("B0").hung = True
    world.run_for(15.0)
    stopped_beats(world)
    world.run_for(1000.0)
    assert world.phase() == Phase.RUNNING
    assert restarted(world) == []
    world.tell(
        ev.Beats(tuple(ev.Beat(r.start, 1, 999, False, r.version) for r in world.ranks.values()))
    )
    assert world.phase() == Phase.RUNNING


def test_a_rank_that_hangs_after_the_loop_is_evicted() -> None:
    script = Script(batches=5, after=1000.0)
    world = reached(Phase.FINISHING, job("A0", "B0", np=2, stall_timeout=20.0, script=script))
    stopped_beats(world)
    world.rank_on("B0").hung = True
    for _ in range(15):
        world.run_for(1.0)
        world.tell(ev.Beats((ev.Beat(0, 1, 7, True, 5), ev.Beat(1, 1, 7, False, 5))))
    assert not evicted(world)
    for _ in range(10):
        world.run_for(1.0)
        world.tell(ev.Beats((ev.Beat(0, 1, 7, True, 5), ev.Beat(1, 1, 7, False, 5))))
    assert evicted(world) == ["B0"]
    assert world.phase() == Phase.FINISHING
    world.tell(ev.RankRaised(0, "a collective failed", collective=True))
    assert world.run().outcome.error == "rank_lost"


# -- ranks that do not connect ---------------------------------------------------------------------


def never_connects(world: World, name: str) -> None:
    """Have the rank on a worker ignore its plans; it obeys aborts."""
    rank = world.rank_on(name)
    rank.on_plan = lambda plan: setattr(rank, "heard", max(rank.heard, plan.generation))


def test_a_frozen_newcomer_does_not_take_the_others_with_it() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, forming_timeout=8.0, script=LONG), 10)
    world.heartbeat_timeout = 1e9
    world.add("C0")
    world.run(until=lambda: len(world.plans) == 2)
    world.freeze("C0")
    world.run(until=lambda: len(world.plans) == 3)
    assert evicted(world) == ["C0"]
    assert workers(world.plans[2]) == ["A0", "B0"]
    cause = ev.Lost(ev.RankId(2, 2, "tcp://C0"), ev.LossReason.NOT_CONNECTED, seconds=8.0)
    assert world.words("reset")[-1] == f"{cause} → 2 ranks"


def test_a_newcomer_that_cannot_connect_is_removed() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, forming_timeout=8.0, script=LONG), 10)
    world.add("C0")
    world.run_for(0.1)
    never_connects(world, "C0")
    before = batches(world)[-1]
    world.run_for(30.0)
    assert workers(world.plans[-1]) == ["A0", "B0"]
    assert len(world.plans) == 4
    assert batches(world)[-1] > before + 100
    assert ("evict", 2) in [(effect.how, effect.start) for effect in world.of(ev.EndRank)]
    assert restarted(world) == [], "it ends when told"


def test_ranks_that_can_never_connect_fail_the_job() -> None:
    world = job("A0", "B0", np=2, min_np=2, forming_timeout=8.0, script=LONG).run_for(0.1)
    never_connects(world, "A0")
    world.run()
    assert world.outcome.error == "no_progress"
    assert world.outcome.reason.count == ev.Tally(ev.Counted.UNFORMED, 4, 4, 0)
    assert "not connected after 8 s: rank 0 on tcp://A0" in world.why
    assert len(world.plans) == 4


# -- ranks that do not end -------------------------------------------------------------------------


def test_a_rank_that_does_not_end_has_its_worker_restarted() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, max_np=2, ending_timeout=7.0, script=LONG), 5)
    world.add("C0")
    world.kill("B0")
    world.run(until=lambda: len(world.of(ev.EndRank)) > 0 or 2 in world.ranks)
    world.rank_on("C0").deaf = True
    world.retire("C0", grace=100.0)
    begun = world.now
    world.run(until=lambda: bool(restarted(world)))
    assert restarted(world) == ["C0"]
    assert world.now - begun == pytest.approx(7.0, abs=0.1)
    (said,) = world.words("warning")
    assert said.startswith("start 2 on tcp://C0 did not end within 7 s")


def test_a_job_whose_ranks_all_set_up_for_too_long_says_so_at_once() -> None:
    world = job("A0", "B0", np=2, min_np=1, elastic_timeout=8.0, script=Script(setup=60.0))
    world.run(seconds=600.0)
    assert world.outcome.error == "not_enough_workers" and 8.0 <= world.now < 12.0
    assert world.why.startswith("ranks are neither at the elastic loop nor") and not evicted(world)
    assert [each.start for each in world.outcome.reason.ranks] == [0, 1]


# -- processes whose functions have returned -------------------------------------------------------


def returned(**limits: float) -> World:
    """Have all ranks of a job return while the process of one goes on."""
    world = reached(Phase.FINISHING, job("A0", "B0", np=2, script=Script(batches=3), **limits))
    for rank in world.ranks.values():
        rank.where = "ended"
        world.tell(ev.RankReturned(rank.start, exits=rank.start == 0))
    return world


def test_a_job_ends_after_what_its_ranks_still_do() -> None:
    world = returned()
    assert world.outcome is None and world.view().state == "running"
    assert "of 1 rank still run" in world.reason()
    world.tell(ev.RankExited(0))
    assert world.outcome.kind == "finished" and not world.machine.roster.warnings


@pytest.mark.parametrize(
    "event", [ev.RankExited(0, "why"), ev.SlotGone("A0"), ev.SlotSilent("A0"), ev.Tick()], ids=type
)
def test_what_was_cut_off_after_a_function_is_said(event: ev.Event) -> None:
    world = returned(exit_timeout=30.0, ending_timeout=5.0)
    if isinstance(event, ev.SlotGone | ev.SlotSilent):
        event = structs.replace(event, slot=world.ranks[0].worker.slot.id)
    if isinstance(event, ev.Tick):
        world.run_for(34.0)
        assert world.outcome is None
        world.run_for(2.0)
    world.tell(event)
    assert world.outcome.kind == "finished"
    (warning,) = world.machine.roster.warnings
    assert isinstance(warning, ev.CutOff) and world.view().errors == 1


def test_whoever_cancels_does_not_wait_for_exit_handlers() -> None:
    world = returned()
    world.tell(ev.StopRequested(now=True))
    assert [(each.start, each.how) for each in world.of(ev.EndRank)] == [(0, "cancel")]


# -- ranks that cannot reach each other, while the scheduler reaches all of them -------------------


BROKEN = "rank 1 on tcp://B0 cannot reach rank 2 on tcp://C0"


# -- choice of removed ranks ----------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 4, 5])
def test_those_who_go_on_reach_each_other_whatever_is_broken(size: int) -> None:
    all_pairs = list(itertools.combinations(range(size), 2))
    for number in range(2 ** len(all_pairs)):
        broken = [pair for bit, pair in enumerate(all_pairs) if number >> bit & 1]
        gone = choose_removed(range(size), broken)
        assert len(set(gone)) == len(gone) < size
        assert not [pair for pair in broken if not set(pair) & set(gone)]


# -- what becomes of the job ---------------------------------------------------------------------


def separate(world: World, *names: str) -> None:
    """Have two workers be unable to reach each other; plans with both do not form."""
    starts = [world.rank_on(name).start for name in names]
    for name, other in zip(names, reversed(starts), strict=True):
        rank = world.rank_on(name)
        rank.on_plan = _deaf_to_plans_with(rank, other)
    tell = world.tell

    def with_doubts(event: object, *chance: float) -> None:
        failures = world.machine.roster.policy.forming_failures
        if isinstance(event, ev.RankReady) and event.start in starts and failures >= 2:
            other = starts[1 - starts.index(event.start)]
            event = structs.replace(event, unreached=(other,))
        tell(event, *chance)  # type: ignore[arg-type]

    world.tell = with_doubts  # type: ignore[method-assign]


def _deaf_to_plans_with(rank: FakeRank, other: int):  # type: ignore[no-untyped-def]
    listen = rank.on_plan

    def on_plan(plan) -> None:  # type: ignore[no-untyped-def]
        if plan.rank_of(other) is None:
            listen(plan)
        else:
            rank.heard = max(rank.heard, plan.generation)

    return on_plan


def test_a_job_goes_on_with_those_who_reach_each_other() -> None:
    world = trained(job("A0", "B0", "C0", np=3, min_np=2, forming_timeout=4.0, script=LONG), 20)
    separate(world, "B0", "C0")
    world.rank_on("A0").collective_failed()
    world.run(until=lambda: len(world.plans) == 4)
    assert workers(world.plans[3]) == ["A0", "B0"]
    assert [slot.worker for slot in world.evicted()] == ["tcp://C0"]
    assert BROKEN in world.words("reset")[-1]


def test_of_two_the_newcomer_without_a_commit_is_removed() -> None:
    world = trained(job("A0", "B0", "C0", np=3, min_np=2, forming_timeout=4.0, script=LONG), 20)
    world.add("A1")  # its rank comes before those of B0 and C0
    world.run_for(0.1)
    separate(world, "A1", "C0")
    world.run(until=lambda: len(world.plans) == 4)
    assert [workers(plan) for plan in world.plans[1:3]] == [["A0", "A1", "B0", "C0"]] * 2
    assert workers(world.plans[3]) == ["A0", "B0", "C0"]
