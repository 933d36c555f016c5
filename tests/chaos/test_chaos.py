"""Faults on order, on real workers: each does what it says, and the job gets through."""

import itertools
import os
import time

import pytest

from nbelastic import chaos
from nbelastic.errors import OptionError
from tests.chaos.plans import WORKERS, random_plan
from tests.support.clusters import a_crew, kinds, sizes, until
from tests.support.training import Workload, check

MINUTES = float(os.environ.get("CHAOS_MINUTES", "0"))

PATIENT = {"np": 4, "min_np": 1, "stall_timeout": 3, "heartbeat_timeout": 5, "block": False}


def under(crew, work, *faults, **options):
    """Run a job with faults to its end; return it and the report."""
    job = crew.fit(work, **{**PATIENT, **options})
    until(lambda: job.status.state == "running" or job.done(), "it runs")
    plan = chaos.inject(job, *faults)
    check(job.results(120), work)
    assert plan.wait(10)
    return job, plan.report()


def test_a_kill_happens_at_its_step_and_what_was_not_committed_is_redone(crew, tmp_path):
    work = Workload(tmp_path, epochs=12, seconds=0.05, commit_every=10)
    job, report = under(crew, work, chaos.kill(rank=2, step=27))
    times = next(result["times"] for result in job.results() if not result["newcomer"])
    steps_with_four = [size for _, size in times].index(3)
    assert steps_with_four == 26
    (injection,) = report.injections
    assert (injection.kind, injection.rank, injection.problem) == ("kill", 2, "")
    assert injection.recovery is not None and injection.recovery > 0
    # Rank 0 may have been in the last reduction still when the killed one had left it.
    assert report.steps_redone in (6, 7)


def test_a_fault_waits_for_its_generation(crew, tmp_path):
    work = Workload(tmp_path, epochs=16, seconds=0.05)
    faults = (chaos.fail(rank=3, after=1.0), chaos.fail(rank=1, generation=2))
    job, report = under(crew, work, *faults)
    assert [injection.rank for injection in report.injections] == [3, 1]
    assert sizes(job)[:3] == [4, 3, 2]


def test_a_worker_closes_in_the_middle_of_forming(crew, tmp_path):
    work = Workload(tmp_path, epochs=16, seconds=0.05)
    faults = (chaos.close(rank=1, forming=True), chaos.restart(rank=3, after=1.0))
    job, report = under(crew, work, *faults)
    assert not report.skipped
    lost = {e.worker for e in job.history if e.kind in ("lost", "left")}
    assert {injection.worker for injection in report.injections} <= lost


def test_what_harms_nobody_for_long_costs_no_rank(crew, tmp_path):
    """Cut connections are made anew, among the same ranks."""
    work = Workload(tmp_path, epochs=16, seconds=0.05)
    faults = (
        chaos.stop(rank=0, seconds=0.1, step=10),
        chaos.slow(rank=1, seconds=0.1, steps=5, step=15),
        chaos.pause(seconds=1.0, after=1.0),
        chaos.partition(rank=2, step=60),
    )
    job, report = under(crew, work, *faults, heartbeat_timeout=20, stall_timeout=20)
    assert not report.skipped
    assert sizes(job) == [4, 4]
    assert "lost" not in kinds(job)
    assert [each.kind for each in report.injections if each.recovery] == ["partition"]


def test_a_worker_whose_rank_crashes_starts_another(crew, tmp_path):
    work = Workload(tmp_path, epochs=20, seconds=0.05)
    before = crew.workers()
    job, report = under(crew, work, chaos.crash(rank=1, step=20))
    assert not report.skipped
    died = "; ".join(event.detail for event in job.history if event.kind in ("lost", "died"))
    assert "its process was killed by signal 9 (SIGKILL)" in died
    assert sizes(job)[-1] == 4
    assert crew.workers() == before


def test_a_plan_that_was_stopped_injects_nothing_more(crew, tmp_path):
    work = Workload(tmp_path, epochs=30)
    job = crew.fit(work, **PATIENT)
    faults = (chaos.kill(rank=0, step=200), chaos.kill(rank=1, after=60), chaos.kill(rank=7))
    plan = chaos.inject(job, *faults)
    until(lambda: job.status.commits > 5 or job.done(), "commits")
    with pytest.raises(OptionError, match="has a plan of faults already"):
        chaos.inject(job)
    plan.stop()
    check(job.results(120), work)
    assert sizes(job) == [4]
    told = [each.problem for each in plan.report().skipped]
    assert sorted(told) == ["its time has not come", "its time has not come", "there are 4 ranks"]


def test_what_was_done_when_a_plan_was_stopped_is_not_done_again_by_others(crew, tmp_path):
    work = Workload(tmp_path, epochs=30)
    job = crew.fit(work, **PATIENT)
    plan = chaos.inject(job, chaos.kill(rank=0, step=20))

    def stop_at_once(message):
        plan._take(message)
        plan._over.set()

    job._driver.chaos = stop_at_once
    check(job.results(120), work)
    assert plan.wait(10)
    assert kinds(job).count("lost") == 1
    assert len(plan.report().injections) == 1


@pytest.mark.timeout(400 + 60 * MINUTES)
def test_random_plans_change_no_result_and_leave_nothing_behind(tmp_path):
    """Plan after plan for so many minutes, but at least one: ``make chaos MINUTES=20``."""
    end = time.monotonic() + 60 * MINUTES
    with a_crew(n_workers=WORKERS) as crew:
        for seed in itertools.count(int(os.environ.get("CHAOS_SEED", "1"))):
            marks = tmp_path / str(seed)
            marks.mkdir()
            random_plan(crew, marks, seed, epochs=120 if MINUTES else 30, every=1.5)
            if time.monotonic() >= end:
                break
