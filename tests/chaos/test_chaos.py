"""Faults on order, on real workers: each does what it says, and the job gets through."""

from __future__ import annotations

import pytest

from nbelastic import chaos
from nbelastic.errors import OptionError
from tests.chaos.plans import WORKERS, random_plan
from tests.support.clusters import a_crew, kinds, sizes, until
from tests.support.training import Workload, check

PATIENT = {"np": 4, "min_np": 1, "stall_timeout": 3, "heartbeat_timeout": 5, "block": False}


def under(crew, work, *faults, **options):
    """Run a job with faults to its end; return it and the report."""
    job = crew.fit(work, **{**PATIENT, **options})
    until(lambda: job.status.state == "running" or job.done(), "it runs")
    plan = chaos.inject(job, *faults)
    check(job.results(120), work)
    assert plan.wait(10)
    return job, plan.report()


def each_had(batches, work):
    """Return how many samples three ranks may have had since a commit when a fourth had so many.

    Who was slow was still in the last one's reduction when the fourth had left it, and was lost.
    """
    return [(3 * batches - late) * work.batch_size for late in range(3)]


def test_a_kill_happens_at_exactly_the_step_that_it_was_ordered_for(crew, tmp_path):
    work = Workload(tmp_path, epochs=12, seconds=0.05)
    job, report = under(crew, work, chaos.kill(rank=2, step=23))
    times = next(result["times"] for result in job.results() if not result["newcomer"])
    steps_with_four = [size for _, size in times].index(3)
    assert steps_with_four == 22
    (injection,) = report.injections
    assert (injection.kind, injection.rank, injection.problem) == ("kill", 2, "")
    assert injection.recovery is not None and injection.recovery > 0
    assert report.steps_redone == 1
    assert report.samples_redone in each_had(1, work)


def test_what_has_to_be_redone_is_what_was_not_committed(crew, tmp_path):
    work = Workload(tmp_path, epochs=12, seconds=0.05, commit_every=10)
    _, report = under(crew, work, chaos.fail(rank=1, step=27))
    assert report.steps_redone == 7
    assert report.samples_redone in each_had(7, work)


def test_a_fault_waits_for_its_generation(crew, tmp_path):
    work = Workload(tmp_path, epochs=16, seconds=0.05)
    faults = (chaos.fail(rank=3, after=1.0), chaos.fail(rank=1, generation=2))
    job, report = under(crew, work, *faults)
    assert [injection.rank for injection in report.injections] == [3, 1]
    assert sizes(job)[:3] == [4, 3, 2]


def test_a_worker_closes_in_the_middle_of_forming(crew, tmp_path):
    work = Workload(tmp_path, epochs=16, seconds=0.05)
    faults = (chaos.close(rank=1, forming=True), chaos.kill(rank=3, after=1.0))
    job, report = under(crew, work, *faults)
    assert sorted(injection.kind for injection in report.injections) == ["close", "kill"]
    assert not report.skipped
    lost = [e.worker for e in job.history if e.kind in ("lost", "left")]
    assert {injection.worker for injection in report.injections} <= set(lost)


def test_what_harms_nobody_for_long_costs_no_reset(crew, tmp_path):
    work = Workload(tmp_path, epochs=16, seconds=0.05)
    faults = (
        chaos.stop(rank=0, seconds=0.1, step=10),
        chaos.slow(rank=1, seconds=0.1, steps=5, step=15),
        chaos.disk(rank=2, seconds=0.5, after=0.5),
        chaos.pause(seconds=1.0, after=1.0),
    )
    job, report = under(crew, work, *faults, heartbeat_timeout=20, stall_timeout=20)
    assert not report.skipped
    assert len(report.injections) == 4
    assert sizes(job) == [4]
    assert report.rows[-1].resets == 0


def test_cut_connections_are_made_anew_among_the_same_ranks(crew, tmp_path):
    work = Workload(tmp_path, epochs=12, seconds=0.05)
    job, report = under(crew, work, chaos.partition(rank=2, step=20))
    assert sizes(job) == [4, 4]
    assert "lost" not in kinds(job)
    assert report.rows[-1].resets == 1


def test_a_rank_that_crashes_is_back_in_the_same_worker(crew, tmp_path):
    work = Workload(tmp_path, epochs=20, seconds=0.05)
    before = crew.workers()
    job, report = under(crew, work, chaos.crash(rank=1, step=20))
    assert not report.skipped
    died = "; ".join(event.detail for event in job.history if event.kind in ("lost", "died"))
    assert "its process was killed by signal 9 (SIGKILL)" in died
    assert sizes(job)[-1] == 4
    assert crew.workers() == before


def test_a_worker_whose_rank_server_crashes_starts_another(crew, tmp_path):
    work = Workload(tmp_path, epochs=16, seconds=0.05)
    before = crew.workers()
    job, report = under(crew, work, chaos.crash_server(rank=1, after=0.3))
    assert not report.skipped
    died = "; ".join(event.detail for event in job.history if event.kind in ("lost", "died"))
    assert "its rank server has ended (killed by signal 9)" in died
    (tmp_path / "next").mkdir()
    assert sizes(crew.fit(Workload(tmp_path / "next", epochs=1), np=4)) == [4]
    assert crew.workers() == before


@pytest.mark.parametrize("kind", ["memory", "restart"])
def test_a_rank_is_left_out_that(crew, tmp_path, kind):
    work = Workload(tmp_path, epochs=20, seconds=0.05)
    fault = chaos.Fault(kind=kind, rank=1, step=20)
    job, report = under(crew, work, fault)
    assert sizes(job)[:2] == [4, 3]
    assert report.rows[-1].resets == 1


def test_what_cannot_be_done_is_told_in_the_report(crew, tmp_path):
    work = Workload(tmp_path, epochs=4)
    faults = (chaos.kill(rank=7), chaos.hang(rank=0, step=10**6))
    job, report = under(crew, work, *faults)
    assert sizes(job) == [4]
    assert {i.problem for i in report.skipped} == {"there are 4 ranks", "its time has not come"}


def test_what_did_not_come_to_pass_is_told_as_soon_as_the_job_has_ended(crew, tmp_path):
    job = crew.fit(Workload(tmp_path, epochs=1), np=2)
    plan = chaos.inject(job, chaos.crash(rank=0, step=10**6))
    job.result(60)
    assert [each.problem for each in plan.report().skipped] == ["its time has not come"]


def test_a_plan_that_was_stopped_injects_nothing_more(crew, tmp_path):
    work = Workload(tmp_path, epochs=30)
    job = crew.fit(work, **PATIENT)
    plan = chaos.inject(job, chaos.kill(rank=0, step=200), chaos.kill(rank=1, after=60))
    until(lambda: job.status.commits > 5 or job.done(), "commits")
    with pytest.raises(OptionError, match="has a plan of faults already"):
        chaos.inject(job)
    plan.stop()
    check(job.results(120), work)
    assert sizes(job) == [4]
    assert len(plan.report().skipped) == 2


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


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.nightly) for n in (2, 3))])
@pytest.mark.timeout(400)
def test_a_random_plan_changes_no_result_and_leaves_nothing_behind(tmp_path, seed):
    with a_crew(n_workers=WORKERS) as crew:
        run = random_plan(crew, tmp_path, seed, epochs=30 if seed == 1 else 60, every=1.5)
    assert not run.problem, f"seed {seed}: {run.problem}\n{run.report}\n{run.trace}"
