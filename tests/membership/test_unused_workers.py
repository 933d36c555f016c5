"""What a job says: unused workers, its view, and its warnings."""

from __future__ import annotations

from typing import Any

import pytest

from nbelastic import messages as ev
from nbelastic.membership.rules import differ, differs

from .ranks import Script
from .world import World, job, trained

TAKEN = [ev.UnusedWorker(f"tcp://D{n}", ev.UnusedReason.TAKEN, "other") for n in range(5)]
CHOSEN = ev.UnusedWorker("tcp://E0", ev.UnusedReason.NOT_IN_WORKERS)
REFUSED = ev.UnusedWorker("tcp://F0", ev.UnusedReason.REFUSED, "it is silent")
SOME = "5 taken by job 'other' (tcp://D0, tcp://D1, tcp://D2 and 2 more)"


def test_each_reason_is_named_with_its_workers() -> None:
    world = job("A0", np=2, elastic_timeout=100.0)
    world.tell(ev.WorkersUnused((*TAKEN, CHOSEN)))
    there, waiting = "1 of at least 2 workers", "; waiting 0 s of 100 s for 1 more"
    unused = f"{SOME}; 1 not among workers= (tcp://E0)"
    assert world.reason() == f"{there} (not used: {unused}){waiting}"
    world.tell(ev.WorkersUnused(()))
    assert world.reason() == f"{there}{waiting}"
    for _ in range(2):
        world.tell(ev.WorkersUnused((REFUSED, *TAKEN)))
    (refused,) = world.records("refused")
    assert (refused.worker, refused.detail) == ("tcp://F0", "refused, because it is silent")


def test_a_host_that_is_full_is_a_reason() -> None:
    world = job("A0", "A1", "A2", np=2, slots_per_host=1)
    world.run_for(0.1)
    full = "2 on a host that has slots_per_host=1 ranks already (tcp://A1, tcp://A2)"
    assert f"(not used: {full})" in world.reason()


def test_a_job_that_trains_names_them_while_it_may_have_more() -> None:
    world = trained(job("A0", np=1, min_np=1, max_np=2, script=Script(batches=100)))
    world.tell(ev.WorkersUnused((TAKEN[0], CHOSEN)))
    assert world.reason() == "not used: 1 taken by job 'other' (tcp://D0)", "the user knows of E0"
    world.tell(ev.StopRequested())
    assert world.reason() == str(ev.STOP_PENDING)


# -- workers with tasks of others: the job starts without them, and does not restart them ---------


def held(world: World, *names: str) -> None:
    """Have ranks wait for other tasks of these workers."""
    for name in names:
        world.occupy(name)
    busy = [ev.UnusedWorker(world.worker(name).slot.worker, ev.UnusedReason.BUSY) for name in names]
    world.tell(ev.WorkersUnused(tuple(busy)))


def busy_job(*names: str, busy: tuple[str, ...], batches: int = 400, **limits: Any) -> World:
    world = job(*names, script=Script(batches=batches), **limits)
    world.heartbeat_timeout = 1e9  # of a rank that has not begun, a worker says nothing
    held(world, *busy)
    return world


@pytest.mark.parametrize("names", [("A0", "A1"), ("A1",)], ids=["one is busy", "all are"])
def test_a_job_that_needs_busy_workers_fails_in_time_and_names_them(names) -> None:
    size = len(names)
    world = busy_job(*names, busy=("A1",), np=size, min_np=size, elastic_timeout=20.0).run()
    assert world.outcome.error == "not_enough_workers"
    assert "(not used: 1 busy with other tasks of Dask" in world.why
    assert world.of(ev.RestartWorker) == []
    assert 20.0 <= world.now < 25.0


def test_a_rank_that_does_not_begin_though_its_worker_is_free_is_evicted_as_ever() -> None:
    world = busy_job("A0", "A1", busy=("A1",), np=2, min_np=1, max_np=2, elastic_timeout=5.0)
    world.run_for(12.0)
    world.freeze("A1")
    world.tell(ev.WorkersUnused(()))  # and yet its rank does not begin
    world.run_for(10.0)
    assert [slot.name for slot in world.evicted()] == ["A1"]
    world.run_for(10.0)
    assert [effect.slot.name for effect in world.of(ev.RestartWorker)] == ["A1"]


# -- the view of a job in its course ---------------------------------------------------------------


LONG = Script(batches=200)


def test_the_view_of_a_job_in_its_course() -> None:
    world = job(np=2, min_np=2, max_np=3, elastic_timeout=100.0, script=LONG)
    world.add("A0")
    world.run_for(10.0)
    first = world.view()
    assert (first.state, first.size, first.generation) == ("waiting", 0, 0)
    assert world.reason() == "1 of at least 2 workers; waiting 10 s of 100 s for 1 more"
    world.add("B0")
    world.run_for(0.1)
    world.tell(ev.Beats((ev.Beat(0, 0, 0, False, ev.FRESH, operation="importing torch"),)))
    assert world.reason() == "waiting for 2 ranks to be ready: importing torch, 0 s"
    world.tell(ev.WorkersUnused((ev.UnusedWorker("tcp://A0", ev.UnusedReason.BUSY),)))
    assert "0 s (not used: 1 busy with other tasks of Dask, which" in world.reason()
    world.tell(ev.WorkersUnused(()))
    trained(world, 20)
    running = world.view()
    assert (running.state, running.size, running.min_np, running.max_np) == ("running", 2, 2, 3)
    assert [(r.rank, r.worker, r.state) for r in running.ranks] == [
        (0, "tcp://A0", "running"),
        (1, "tcp://B0", "running"),
    ]
    assert running.commits > 5
    world.add("C0")
    world.run_for(0.1)
    newcomer = world.view().ranks[-1]
    assert (newcomer.rank, newcomer.state) == (None, "starting")
    world.tell(ev.StopRequested())
    assert world.present_reasons() == [ev.STOP_PENDING]
    world.run()
    last = world.view()
    assert last.state == "stopped"
    assert world.present_reasons() == [ev.Text("stopped by its user at a commit")]


# -- warnings: ranks with different parameters, and ranks that never met ---------------------------


VALUES = (1.0, -2.0, 0.0, 1e-9)
OTHERS = (1.1, -2.2, 0.3, 2e-9)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        (VALUES, False),
        (OTHERS, True),
        ((1.0 + 1e-8, -2.0 - 1e-8, 0.0, 1e-9), False),
        ((1.0, -2.0, 0.0, 2e-9), False),
        ((1.0, -2.0, 0.3, 2e-9), True),
        (VALUES[:3], True),
        ((1.0, -2.0, 1e-3, 1e-9), True),
        ((1.0, -2.0, 1e-7, 1e-9), False),
        ((1.001, -2.0, 0.0, 1e-9), False),
    ],
)
def test_samples_differ_if_more_than_a_few_values_do(others, expected):
    assert differ(VALUES, others) is differ(others, VALUES) is expected


def test_moments_and_generations_are_compared_each_by_itself():
    seen = {}
    for sample in (
        ev.WeightsSampled(0, 1, 1, VALUES),
        ev.WeightsSampled(0, 1, 10, OTHERS),
        ev.WeightsSampled(1, 1, 1, VALUES),
        ev.WeightsSampled(1, 1, 10, OTHERS),
        ev.WeightsSampled(1, 2, 1, OTHERS),
        ev.WeightsSampled(0, 2, 1, OTHERS),
    ):
        assert not differs(seen, sample)
    assert differs(seen, ev.WeightsSampled(2, 2, 1, VALUES))


def test_a_job_records_it_once_and_nothing_of_former_generations():
    world = trained(job("A0", "B0", "C0", np=3, min_np=2, script=Script(batches=400)), 5)
    for start, values in enumerate((VALUES, OTHERS, OTHERS)):
        world.tell(ev.WeightsSampled(start, 1, 1, values))
    world.tell(ev.WeightsSampled(1, 1, 0, VALUES))
    world.tell(ev.WeightsSampled(2, 1, 0, OTHERS))
    assert len(world.records("warning")) == 1
    assert world.of(ev.Record)[-1].kind == "warning"
    fresh = trained(job("A0", "B0", np=2, script=Script(batches=400)), 5)
    for generation in (0, 2):
        fresh.tell(ev.WeightsSampled(0, generation, 1, VALUES))
        fresh.tell(ev.WeightsSampled(1, generation, 1, OTHERS))
    fresh.tell(ev.WeightsSampled(7, 1, 1, VALUES))
    fresh.tell(ev.WeightsSampled(0, 1, 1, OTHERS))
    assert fresh.records("warning") == []


# -- ranks that never exchanged anything -----------------------------------------------------------


@pytest.mark.parametrize(("np", "apart", "warned"), [(2, True, 1), (2, False, 0), (1, True, 0)])
def test_a_job_says_so_as_it_ends(np, apart, warned) -> None:
    world = job(*("A0", "B0")[:np], np=np)
    for start in range(np):
        world.tell(ev.RankReturned(start, isolated=apart))
    assert len(world.records("warning")) == warned
    assert world.of(ev.Record)[-1].kind == "finished"
