"""Elastic Horovod's own tests of its driver (C): ranks, and messages to them."""

from __future__ import annotations

import pytest

from nbelastic.membership import Phase, place_of
from nbelastic.messages import (
    Abort,
    EndRank,
    LossReason,
    Lost,
    Notify,
    Place,
    Presence,
    RankId,
    RankReturned,
    RanksMissing,
    ReturnedEarly,
    SlotsFound,
    StartRank,
)

from .ranks import Script
from .stories import hosts, job, places, starts, trained, workers

LONG = Script(batches=200)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["A0", "A1", "B0", "B1"], [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]),
        (["A0", "B0", "B1"], [(0, 1, 0, 2), (0, 2, 1, 2), (1, 2, 0, 1)]),
        (["A0", "B0", "A1"], [(0, 2, 0, 2), (1, 2, 0, 1), (0, 1, 1, 2)]),
    ],
)
def test_C1_ranks_at_first(names: list[str], expected: list[tuple[int, ...]]) -> None:
    world = trained(job(*names, np=len(names), script=LONG))
    (plan,) = world.plans
    assert places(plan) == [
        Place(rank, len(names), *numbers) for rank, numbers in enumerate(expected)
    ]
    foreseen = {effect.start: effect.place for effect in world.of(StartRank)}
    assert [foreseen[start] for start in starts(plan)] == places(plan)


def test_C2_ranks_after_a_failure() -> None:
    world = trained(job("A0", "A1", "B0", "B1", np=4, min_np=2, script=LONG))
    world.kill("A1")
    world.run(until=lambda: len(world.plans) == 2)
    assert workers(world.plans[-1]) == ["A0", "B0", "B1"]
    assert [
        (p.local_rank, p.local_size, p.cross_rank, p.cross_size) for p in places(world.plans[-1])
    ] == [(0, 1, 0, 2), (0, 2, 1, 2), (1, 2, 0, 1)]


def test_C3_ranks_after_a_growth() -> None:
    world = trained(job("A0", "B0", "B1", np=3, min_np=2, script=LONG))
    world.add("C0")
    world.run(until=lambda: len(world.plans) == 2)
    assert workers(world.plans[-1]) == ["A0", "B0", "B1", "C0"], "old ranks are unchanged"
    world.run(until=lambda: world.phase() == Phase.RUNNING)
    world.add("A1")
    world.run(until=lambda: len(world.plans) == 3)
    assert workers(world.plans[-1]) == ["A0", "A1", "B0", "B1", "C0"]
    assert starts(world.plans[-1]) == [0, 4, 1, 2, 3], "a newcomer follows those on its host"
    slots = [member.slot for member in world.plans[-1].members]
    assert place_of(slots, 3) == Place(3, 5, 1, 2, 1, 2)
    assert place_of(slots, 4) == Place(4, 5, 0, 1, 2, 3)


def test_C4_waits_for_slots_enough_then_starts_once() -> None:
    world = job("A0", "A1", np=4, min_np=4, script=LONG)
    world.run_for(1.0)
    world.tell(SlotsFound(()))
    world.add("B0")
    world.run_for(1.0)
    assert not world.of(StartRank)
    assert [record.reason for record in world.records("waiting")] == [Presence(2, 4)]
    world.add("B1")
    trained(world)
    assert len(world.of(StartRank)) == 4
    assert [len(plan.members) for plan in world.plans] == [4]


def test_C5_waits_for_hosts_enough_then_starts_once() -> None:
    world = job("A0", "A1", "A2", np=3, min_np=3, max_np=4, slots_per_host=2, script=LONG)
    world.tell(SlotsFound(()))
    world.run_for(1.0)
    assert not world.of(StartRank), "the third slot on A does not count"
    world.add("B0", "B1")
    trained(world)
    assert workers(world.plans[0]) == ["A0", "A1", "B0", "B1"]
    assert len(world.plans) == 1


def test_C7_one_rank_returns_while_others_train() -> None:
    world = trained(job("A0", "B0", "C0", np=3, script=LONG))
    world.rank_on("B0").end(RankReturned(1))
    world.run()
    assert world.outcome.kind == "failed"
    assert world.outcome.error == "returned_early"
    assert world.outcome.reason == ReturnedEarly((RankId(1, 1, "tcp://B0"),), waiting=False)
    assert {effect.start for effect in world.of(EndRank)} == {0, 2}, "the others are told to stop"


def test_C7_one_rank_returns_while_others_are_ready() -> None:
    world = trained(job("A0", "B0", np=2, script=Script(batches=5, loops=2)))
    world.at(5, lambda: setattr(world.ranks[1], "loop", 2))  # its function ends after one loop
    world.run()
    assert world.outcome.error == "returned_early"
    early = ReturnedEarly((RankId(0, 0, "tcp://A0"),), waiting=True, lines=(None,))
    assert world.outcome.reason == early


def test_C7_success_only_if_all_returned() -> None:
    world = job("A0", "B0", np=2, script=Script(batches=5, after=1.0))
    world.at(5, lambda: world.later(0.5, lambda: world.kill("B0")))
    world.run()
    assert world.outcome.kind == "failed"
    assert world.outcome.error == "rank_lost"
    lost = Lost(RankId(1, 1, "tcp://B0"), LossReason.WORKER_GONE)
    assert world.outcome.reason == RanksMissing(1, 2, (lost,))
    assert world.ranks[0].where == "ended"


def test_C10_members_below_min_np_are_told_all_the_same() -> None:
    world = trained(job("A0", "B0", "C0", np=3, min_np=3, script=LONG))
    world.kill("B0")
    world.run(until=lambda: bool(world.of(Abort)))
    (abort,) = world.of(Abort)
    assert abort.starts == (0, 2)
    assert abort.generation == 1
    assert abort.reason == Lost(RankId(1, 1, "tcp://B0"), LossReason.WORKER_GONE)
    world.run_for(1.0)
    assert world.records("waiting")[-1].reason == Presence(2, 3)


def test_C10_members_below_min_np_are_told_of_a_planned_leave() -> None:
    world = trained(job("A0", "B0", np=2, min_np=2, script=LONG))
    world.retire("B0")
    world.run_for(1.0)
    assert [effect.starts for effect in world.of(Notify)] == [(0, 1)]
    assert world.phase() == Phase.GATHERING


def test_C11_the_order_of_hosts_outlives_their_coming_and_going() -> None:
    world = trained(job("A0", "B0", "C0", np=3, min_np=2, max_np=3, script=LONG))
    world.add("D0")
    world.retire("A0")
    world.run(until=lambda: len(world.plans) >= 2 and len(world.plans[-1].members) == 3)
    assert hosts(world.plans[-1]) == ["B", "C", "D"]


@pytest.mark.parametrize(
    ("added", "removed"),
    [(["D0"], []), ([], ["A0"]), (["D0"], ["A0"]), ([], [])],
    ids=["added", "removed", "both", "none"],
)
def test_C12_each_difference_is_named(added: list[str], removed: list[str]) -> None:
    world = trained(job("A0", "B0", "C0", np=3, min_np=2, script=LONG))
    seen = len(world.effects)
    if added:
        world.add(*added)
    for name in removed:
        world.retire(name)
    world.run_for(3.0)
    news = [e for e in world.records("joined") + world.records("left") if e in world.effects[seen:]]
    assert [e.worker for e in news if e.kind == "joined"] == [f"tcp://{name}" for name in added]
    assert [e.worker for e in news if e.kind == "left"] == [f"tcp://{name}" for name in removed]
    assert (
        hosts(world.plans[-1])
        == [h for h in "ABCD" if f"{h}0" not in removed][: 3 + len(added) - len(removed)]
    )
    assert bool(added or removed) == (len(world.plans) > 1)
