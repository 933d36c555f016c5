"""Elastic Horovod's own tests of whole runs (B): batches, sizes and the leading rank."""

from __future__ import annotations

from nbelastic.messages import Abort, Presence, RepeatedError, Shortage, StartRank

from .ranks import Script
from .stories import batches, hosts, job, starts, workers


def test_B1_nothing_happens_in_10_epochs() -> None:
    script = Script(batches=100)
    world = job("A0", "B0", "B1", "C0", "C1", "C2", np=5, min_np=5, max_np=5, script=script)
    world.run()
    assert world.outcome.kind == "finished"
    assert len(world.plans) == 1
    assert world.sizes() == [5]
    assert batches(world) == list(range(1, 101))
    assert [world.ranks[start].version for start in world.outcome.starts] == [100] * 5
    assert world.machine.roster.version == 100
    assert not world.records("reset")


def test_B2_rolling_hosts() -> None:
    world = job("A0", "B0", np=2, min_np=2, max_np=2)
    world.at(10, lambda: [world.add("C0"), world.retire("A0")])
    world.at(20, lambda: [world.add("D0"), world.retire("B0")])
    world.run()
    assert world.outcome.kind == "finished"
    assert world.sizes() == [2, 2, 2]
    assert [hosts(plan) for plan in world.plans] == [["A", "B"], ["B", "C"], ["C", "D"]]
    assert world.leaders() == [0, 1, 2], "rank 0 moves only when its host leaves"
    assert batches(world) == list(range(1, 31))


def test_B3_spare_hosts_come_and_go() -> None:
    world = job("A0", "B0", np=2, min_np=2, max_np=2)
    for batch, name in ((5, "C0"), (10, "D0")):
        world.at(batch, lambda name=name: world.add(name))
    world.at(15, lambda: world.retire("C0", grace=0.1))
    world.at(20, lambda: world.kill("D0"))
    world.run()
    assert world.outcome.kind == "finished"
    assert len(world.plans) == 1
    assert not world.records("reset")
    assert len(world.of(StartRank)) == 2


def test_B6_the_first_rank_0_raises_and_a_spare_slot_exists() -> None:
    world = job("A0", "B0", "C0", np=2, min_np=2, max_np=2)
    world.at(10, lambda: world.rank_on("A0").raise_error())
    world.run()
    assert world.outcome.kind == "finished"
    assert world.sizes() == [2, 2]
    assert len(world.plans) == 2
    assert workers(world.plans[-1]) == ["B0", "C0"]
    assert world.plans[-1].behind == (1,)


def test_B7_all_raise() -> None:
    world = job("A0", "B0", np=2, min_np=2)
    world.at(10, lambda: [rank.raise_error("KeyError: 'x'") for rank in world.ranks.values()])
    world.run()
    assert world.outcome.error == "rank_failed"
    assert world.outcome.reason == RepeatedError("KeyError: 'x'", 2, one_generation=True)
    assert world.now < 2.0


def test_B8_too_few_remain() -> None:
    world = job("A0", "B0", "C0", np=3, min_np=2, elastic_timeout=20.0)
    world.at(10, lambda: [world.kill("A0"), world.kill("C0")])
    world.run()
    assert world.outcome.error == "not_enough_workers"
    assert isinstance(world.outcome.reason, Shortage)
    assert world.outcome.reason.presence == Presence(1, 2)
    assert world.now < 25.0


def test_B11_hosts_leave_one_by_one() -> None:
    world = job("A0", "B0", "C0", np=3, min_np=1)
    world.at(10, lambda: world.retire("B0"))
    world.at(20, lambda: world.retire("A0"))
    world.run()
    assert world.outcome.kind == "finished"
    assert world.sizes() == [3, 2, 1]
    assert world.leaders() == [0, 0, 2]
    assert len(world.plans) == 3
    assert batches(world) == list(range(1, 31))
    assert not world.of(Abort)
    assert not world.records("lost")
    assert [record.worker for record in world.records("left")] == ["tcp://B0", "tcp://A0"]


def test_B12_one_leader_dies_after_another() -> None:
    world = job("A0", "B0", "C0", "D0", np=4, min_np=2)
    world.at(10, lambda: world.kill("A0"))
    world.at(20, lambda: world.kill("B0"))
    world.run()
    assert world.outcome.kind == "finished"
    assert world.sizes() == [4, 3, 2]
    assert world.leaders() == [0, 1, 2]
    assert [hosts(plan)[0] for plan in world.plans] == ["A", "B", "C"]


def test_B13_a_replacement_comes() -> None:
    world = job("A0", "A1", "B0", "B1", np=4, min_np=2, max_np=4, script=Script(batches=60))
    world.at(10, lambda: world.kill("A0"))
    world.at(20, lambda: world.add("C0"))
    world.run()
    assert world.outcome.kind == "finished"
    assert world.sizes() == [4, 3, 4]
    assert starts(world.plans[-1]) == [1, 2, 3, 4]
    assert world.plans[-1].behind == (3,)
    assert batches(world)[-1] == 60
