"""Real workers in real processes, really killed, stopped and retired, while they train."""

from __future__ import annotations

import itertools
import os
import re
import signal

from tests.support.clusters import kinds, sizes, until
from tests.support.training import Fault, Workload, check


def running(job, size):
    """Wait until a job trains with `size` ranks."""
    until(
        lambda: (job.status.state, job.status.size) == ("running", size) or job.done(),
        f"{size} ranks",
    )
    assert not job.done(), job.exception()


def test_an_undisturbed_job_has_one_generation(crew, tmp_path):
    work = Workload(tmp_path)
    job = crew.fit(work, np=4)
    check(job.results(), work)
    assert sizes(job) == [4]
    assert job.status.resets == 0
    assert job.status.commits == work.epochs * work.samples // (4 * work.batch_size)


def test_N10_B13_a_killed_rank_is_replaced_while_the_others_go_on(crew, tmp_path):
    work = Workload(
        tmp_path, epochs=1000, until_newcomers=1, faults=(Fault(rank=1, epoch=2, batch=2),)
    )
    job = crew.fit(work, np=4, min_np=2)
    check(job.results(), work)
    assert sizes(job)[-2:] == [3, 4]
    assert kinds(job).count("lost") == 1
    assert job.results()[0]["losses"] == job.results()[-1]["losses"]


def test_N6_a_change_between_two_commits_is_one_consistent_cut(crew, tmp_path):
    work = Workload(
        tmp_path,
        epochs=1000,
        until_newcomers=1,
        commit_every=7,
        faults=(Fault(rank=2, epoch=1, batch=3),),
    )
    job = crew.fit(work, np=4, min_np=2)
    check(job.results(), work)
    assert sizes(job) == [4, 3, 4]


def test_N15_the_state_lives_while_any_rank_has_it(crew, tmp_path):
    work = Workload(
        tmp_path, epochs=1000, samples=120, seconds=0.01, replace_all=True, until_newcomers=4
    )
    job = crew.fit(work, np=4, min_np=1)
    results = job.results()
    check(results, work)
    assert all(result["newcomer"] for result in results)
    assert "restarted" not in kinds(job)
    assert kinds(job).count("lost") == 4


def test_N20_a_newcomer_warms_up_beside_the_others(crew, tmp_path):
    work = Workload(
        tmp_path,
        epochs=1000,
        until_newcomers=1,
        slow_start=3.0,
        faults=(Fault(rank=3, epoch=1, batch=2),),
    )
    job = crew.fit(work, np=4, min_np=2)
    results = job.results()
    check(results, work)
    assert sizes(job) == [4, 3, 4]
    old = next(result for result in results if not result["newcomer"])
    stamps = [stamp for stamp, _ in old["times"]]
    gap = max(after - before for before, after in itertools.pairwise(stamps))
    assert gap < work.slow_start / 2, f"the others waited {gap:.2f} s for a newcomer"


def test_all_ranks_killed_at_once_start_over_and_say_so(crew, tmp_path):
    work = Workload(tmp_path, epochs=40)
    processes = crew.workers().values()
    job = crew.fit(work, np=4, min_np=2, elastic_timeout=60, block=False)
    until(lambda: job.status.commits > 0 or job.done(), "a commit")
    for process in processes:  # from outside: each would survive hearing of the first in time
        os.kill(process, signal.SIGKILL)
    check(job.results(120), work)
    assert "restarted" in kinds(job)


def test_a_silent_worker_is_evicted_after_heartbeat_timeout(crew, tmp_path):
    fault = Fault(rank=1, epoch=1, batch=1, kind="doze", seconds=60)
    work = Workload(tmp_path, epochs=4, faults=(fault,))
    job = crew.fit(work, np=4, min_np=2, heartbeat_timeout=2.0)
    check(job.results(), work)
    assert any("no heartbeat" in event.detail for event in job.history)


def test_a_rank_that_hangs_in_user_code_is_evicted(crew, tmp_path):
    work = Workload(tmp_path, epochs=4, faults=(Fault(rank=2, epoch=1, batch=1, kind="hang"),))
    job = crew.fit(work, np=4, min_np=2, stall_timeout=2.0)
    check(job.results(), work)
    assert sizes(job)[:2] == [4, 3]
    lost = next(event for event in job.history if event.kind == "lost")
    assert re.search(r"it was executing .*training\.py, line \d+, in _do_harm$", lost.detail)


def test_A8_a_worker_that_cooled_down_is_used_again(crew, tmp_path):
    work = Workload(
        tmp_path,
        epochs=1000,
        until_newcomers=1,
        faults=(Fault(rank=2, epoch=1, batch=1, kind="raise"),),
    )
    job = crew.fit(work, np=4, min_np=2, blacklist_cooldown=(1, 2))
    check(job.results(), work)
    assert sizes(job)[-2:] == [3, 4]  # the first may be over before each rank has told that it is


def test_stop_ends_a_job_at_a_commit(crew, tmp_path):
    work = Workload(tmp_path, epochs=1000)
    job = crew.fit(work, np=4, block=False)
    until(lambda: job.status.commits > 3, "commits")
    job.stop()
    assert job.exception(30) is not None
    assert job.status.state == "stopped"
    cleaned = list(tmp_path.glob("cleaned-*"))
    assert len(cleaned) == 4


def test_scale_changes_the_size_at_a_commit_and_back(crew, tmp_path):
    work = Workload(tmp_path, epochs=1000)
    job = crew.fit(work, np=4, min_np=1, block=False)
    running(job, 4)
    job.scale(max_np=2)
    running(job, 2)
    job.scale(max_np=4)
    running(job, 4)
    assert "lost" not in kinds(job)
    job.cancel()
    job.wait(30)
