"""Weak points of Elastic Horovod (N), as far as the machine decides them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbelastic.messages import (
    FRESH,
    Presence,
    RepeatedError,
    Shortage,
    StateLost,
    UserErrors,
)

from .ranks import Script
from .stories import batches, job, starts, trained, workers
from .world import World

LONG = Script(batches=200)


def test_N3_below_min_np_then_a_new_host_comes() -> None:
    world = job("A0", "A1", "B0", np=3, min_np=3, script=Script(batches=40))
    world.at(10, lambda: world.kill("A0"))
    trained(world, 10).run_for(5.0)
    assert world.machine.roster.version >= 10
    assert len(world.plans) == 1
    world.add("C0")
    world.run()
    assert world.outcome.kind == "finished"
    plan = world.plans[-1]
    assert starts(plan) == [1, 2, 3]
    assert plan.version >= 10, "who has the state is part of the plan"
    assert plan.source in (0, 1)
    assert 2 in plan.behind
    assert plan.members[2].version == FRESH
    assert len(batches(world)) <= 41
    assert not world.records("restarted")


def test_N8_two_changes_within_a_second() -> None:
    world = job("A0", "B0", "B1", np=3, min_np=1, script=LONG)
    world.at(20, lambda: world.retire("B0"))
    world.at(20, lambda: world.later(0.3, lambda: world.add("C0")))
    world.at(20, lambda: world.later(0.4, lambda: world.kill("A0")))
    world.at(20, lambda: world.later(0.5, lambda: world.add("A1")))
    trained(world, 20).run_for(3.0)
    assert workers(world.plans[-1]) == ["B1", "C0", "A1"]
    assert [plan.generation for plan in world.plans] == list(range(1, len(world.plans) + 1))
    kinds = {(e.kind, e.worker) for kind in ("lost", "left") for e in world.records(kind)}
    assert kinds == {("left", "tcp://B0"), ("lost", "tcp://A0")}, "each is taken for what it is"
    assert world.machine.roster.version > 20


def test_N8_a_change_while_another_is_being_made() -> None:
    world = trained(job("A0", "B0", "C0", "D0", np=4, min_np=1, script=LONG))
    world.retire("A0")
    world.run_for(0.05)
    world.kill("B0")
    world.retire("C0")
    world.run_for(2.0)
    assert workers(world.plans[-1]) == ["D0"]
    assert world.outcome is None
    assert not world.records("restarted")


POISON = "ValueError: sample 17 cannot be read"


def poisoned(world: World, *names: str, apart: float = 2.0, error: str = POISON) -> World:
    """Have workers raise the same error, each some time after the one before."""
    for name in names:
        world.run_for(apart)
        if world.outcome is None and world.worker(name).holder is not None:
            world.rank_on(name).raise_error(error)
            world.run_for(0.1)
    return world


def test_N14_the_same_error_on_three_workers_ends_the_job() -> None:
    world = trained(job("A0", "A1", "A2", "A3", "A4", "A5", np=6, min_np=1, script=LONG), 20)
    poisoned(world, "A1", "A4", "A0", "A2").run(seconds=10.0)
    assert world.outcome.error == "rank_failed"
    assert world.outcome.reason == RepeatedError(POISON, 3, one_generation=False)
    assert sorted(world.outcome.starts) == [0, 1, 4], "their tracebacks are what the user is shown"
    assert len(world.records("lost")) == 3


def test_N14_addresses_in_the_message_do_not_hide_it() -> None:
    world = trained(job("A0", "A1", "A2", "A3", np=4, min_np=1, script=LONG), 20)
    for number, name in enumerate(("A1", "A2", "A3")):
        poisoned(world, name, error=f"TypeError: <Image object at 0x7f{number}c> is empty")
    assert world.machine.roster.outcome.error == "rank_failed"


@pytest.mark.parametrize(
    "error",
    [
        "ValueError: rank {} has a bad sample",
        "FileNotFoundError: [Errno 2] No such file or directory: 'part-{}.csv'",
        "FloatingPointError: loss is not finite: tensor([{}.5071, -3e-0{}])",
    ],
)
def test_N14_numbers_in_the_message_do_not_hide_it(error: str) -> None:
    world = trained(job("A0", "A1", "A2", "A3", np=4, min_np=1, script=LONG), 20)
    for number, name in enumerate(("A1", "A2", "A3")):
        poisoned(world, name, error=error.format(number, number))
    assert world.machine.roster.outcome.error == "rank_failed"


def test_N14_two_are_enough_where_too_few_are_left() -> None:
    world = trained(job("A0", "A1", "A2", np=3, min_np=2, script=LONG), 20)
    poisoned(world, "A1", "A2").run(seconds=10.0)
    assert world.outcome.error == "rank_failed"
    assert sorted(world.outcome.starts) == [1, 2]


def test_N14_a_job_of_two_that_may_shrink_fails_with_the_second() -> None:
    world = trained(job("A0", "A1", np=2, min_np=1, script=LONG), 20)
    poisoned(world, "A1", "A0").run(seconds=10.0)
    assert world.outcome.error == "rank_failed"
    assert world.outcome.reason == RepeatedError(POISON, 2, one_generation=False)


def test_N14_without_another_worker_the_end_names_the_error() -> None:
    world = trained(job("A0", "A1", np=2, min_np=2, script=LONG), 20)
    poisoned(world, "A1").run(seconds=1.0)
    assert world.outcome.error == "rank_failed"
    assert world.outcome.reason == UserErrors((POISON,), Presence(1, 2, excluded=1))
    assert world.outcome.starts == (1,)


def test_N14_a_worker_that_may_come_back_is_waited_for() -> None:
    world = trained(job("A0", "A1", "A2", np=3, min_np=2, elastic_timeout=20.0, script=LONG), 20)
    world.kill("A2")
    poisoned(world, "A1").run_for(1.0)
    assert world.outcome is None
    world.add("A3")
    world.run_for(1.0)
    assert workers(world.plans[-1]) == ["A0", "A3"]
    poisoned(world, "A3", error="KeyError: 3").run()
    assert world.outcome.reason == UserErrors(("KeyError: 3",), Presence(1, 2, excluded=2))
    assert world.now > 20.0, "A2 has had its time"


@pytest.mark.parametrize("how", ["kill", "retire"])
def test_N14_a_worker_that_has_come_back_is_not_waited_for(how: str) -> None:
    world = trained(job("A0", "A1", np=2, min_np=2, elastic_timeout=600.0, script=LONG), 20)
    getattr(world, how)("A1")
    world.run_for(6.0)
    world.add("A1")  # as its nanny starts it, or its owner: under its name
    world.run_for(1.0)
    assert workers(world.plans[-1]) == ["A0", "A1"]
    poisoned(world, "A0").run(seconds=5.0)
    assert world.outcome.error == "rank_failed"
    assert world.outcome.reason == UserErrors((POISON,), Presence(1, 2, excluded=1))


def test_N14_a_few_commits_in_between_make_no_difference() -> None:
    rarely = Script(batches=100_000, step=1.0, commit_every=10_000)
    for apart, script in ((8.0, Script(batches=2000)), (1000.0, rarely)):
        world = trained(job("A0", "A1", "A2", "A3", np=4, min_np=1, script=script))
        world.ranks[0].version = 1  # there is something to go back to
        poisoned(world, "A1", "A2", "A3", apart=apart)
        assert world.machine.roster.outcome.error == "rank_failed"


def test_N14_the_same_error_of_machines_hours_apart_ends_nothing() -> None:
    script = Script(batches=10_000_000, step=100.0)
    names = [f"A{number}" for number in range(8)]
    world = trained(job(*names, np=8, min_np=1, script=script))
    poisoned(world, *names[1:], apart=3600.0, error="RuntimeError: CUDA error: ECC error")
    assert world.machine.roster.outcome is None
    assert workers(world.plans[-1]) == ["A0"]


def test_N14_different_errors_are_no_chain() -> None:
    names = [f"A{number}" for number in range(10)]
    world = trained(job(*names, np=10, min_np=1, script=LONG), 20)
    for name in names[1:3]:
        world.rank_on(name).raise_error(POISON)
    for kind, name in zip(("KeyError", "OSError", "TypeError"), names[5:8], strict=True):
        poisoned(world, name, error=f"{kind}: 7")
    assert world.machine.roster.outcome is None
    assert sorted(workers(world.plans[-1])) == ["A0", "A1", "A2", "A3", "A4", "A8", "A9"]


@pytest.mark.parametrize(("hosts", "ends"), [("A", True), ("ABC", True), ("BBB", False)])
def test_N14_several_ranks_of_one_generation_that_raise_the_same(hosts: str, ends: bool) -> None:
    names = [f"{host}{number}" for number, host in enumerate((hosts * 3)[:3])]
    spared = "A9" if hosts == "A" else "D0"
    world = trained(job(*names, spared, np=4, min_np=1, script=LONG), 20)
    for name in names:
        world.rank_on(name).raise_error(POISON)
    world.run_for(1.0)
    assert len(world.plans) == (1 if ends else 2)
    assert (world.outcome is not None) == ends


def test_N14_one_bad_host_of_several_is_left_out_instead() -> None:
    world = trained(job("A0", "B0", "B1", "B2", np=4, min_np=1, script=LONG), 20)
    poisoned(world, "B0", "B1", "B2", error="OSError: [Errno 28] No space left on device")
    assert world.machine.roster.outcome is None
    assert workers(world.plans[-1]) == ["A0"]


def test_N14_newcomers_that_raise_in_their_set_up_end_nothing() -> None:
    world = trained(job("A0", np=1, max_np=2, script=replace(LONG, setup=1.0)), 20)
    for name in ("A1", "A2", "A3", "A4"):
        world.add(name)
        poisoned(world, name, apart=0.2, error="ImportError: torchvision")
    assert world.machine.roster.outcome is None
    assert len(world.plans) == 1
    assert not world.machine.roster.policy.errors.last, "it does not explain anything later either"


def test_N14_a_worker_that_repeats_itself_is_one_worker() -> None:
    world = trained(job("A0", "A1", "A2", np=3, min_np=1, cooldown=(1.0, 1.0), script=LONG), 20)
    poisoned(world, "A1", "A1", "A1", "A1")
    assert len(world.records("lost")) == 4
    assert world.machine.roster.outcome is None


def test_N15_all_workers_of_the_first_generation_are_gone() -> None:
    world = job("A0", "B0", np=2, min_np=2, max_np=4, script=Script(batches=60))
    world.at(10, lambda: world.add("C0", "D0"))
    world.at(20, lambda: world.retire("A0"))
    world.at(25, lambda: world.retire("B0"))
    world.at(30, lambda: world.add("E0"))
    world.at(40, lambda: world.kill("C0"))
    world.run()
    assert world.outcome.kind == "finished"
    assert workers(world.plans[-1]) == ["D0", "E0"]
    assert not world.records("restarted")
    assert len(batches(world)) <= 61, "the state lives while any rank that synchronised remains"


def test_N15_the_state_is_lost_with_its_last_holder_only() -> None:
    world = job("A0", "B0", np=2, min_np=1, script=Script(batches=40))
    world.at(10, lambda: [world.kill("A0"), world.kill("B0")])
    world.at(10, lambda: world.later(1.0, lambda: world.add("C0")))
    world.run()
    assert world.outcome.kind == "finished"
    (record,) = world.records("restarted")
    assert isinstance(record.reason, StateLost)
    assert record.reason.commit > 0
    assert batches(world)[10] == 1, "it starts over, and says so"


@pytest.mark.parametrize("there", [0, 1, 3])
def test_N17_the_failure_names_limit_present_and_wait(there: int) -> None:
    names = [f"A{i}" for i in range(there)]
    world = job(*names, np=4, min_np=4, elastic_timeout=12.5).run()
    assert world.outcome.error == "not_enough_workers"
    assert world.outcome.reason == Shortage(Presence(there, 4), 4, 12.5, 12.5)
    assert world.now == pytest.approx(12.5, abs=0.01)
