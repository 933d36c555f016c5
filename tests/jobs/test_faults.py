"""Real workers in real processes, really killed, stopped and retired, while they train."""

from __future__ import annotations

import itertools
import os
import re
import signal

import pytest

from nbelastic.errors import NotEnoughWorkers, ResetLimitExceeded
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


@pytest.mark.parametrize("rank", [0, 3])
def test_A2_the_state_outlives_any_rank(crew, tmp_path, rank):
    work = Workload(tmp_path, epochs=4, faults=(Fault(rank=rank, epoch=1, batch=1),))
    job = crew.fit(work, np=4, min_np=2)
    check(job.results(), work)
    assert sizes(job)[:2] == [4, 3]


def test_N3_below_min_np_it_waits_and_goes_on_from_the_last_commit(crew, tmp_path):
    faults = tuple(Fault(rank=rank, epoch=1, batch=1) for rank in (1, 2, 3))
    work = Workload(tmp_path, epochs=4, faults=faults)
    job = crew.fit(work, np=4, min_np=2, elastic_timeout=60)
    check(job.results(), work)
    assert "restarted" not in kinds(job)
    assert min(sizes(job)) >= 2


def test_N5_a_newcomer_has_the_same_bits_as_the_others(crew, tmp_path):
    work = Workload(
        tmp_path,
        epochs=1000,
        until_newcomers=1,
        optimizer="adamw",
        faults=(Fault(rank=2, epoch=1, batch=3),),
    )
    results = crew.fit(work, np=4, min_np=2).results()
    check(results, work)
    assert any(result["newcomer"] for result in results)


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


def test_N8_two_losses_at_once_lose_nothing(crew, tmp_path):
    faults = (Fault(rank=1, epoch=1, batch=2), Fault(rank=2, epoch=1, batch=2))
    work = Workload(tmp_path, epochs=5, faults=faults)
    job = crew.fit(work, np=4, min_np=1)
    check(job.results(), work)
    assert kinds(job).count("lost") == 2


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


def test_all_ranks_killed_at_once_fail_where_the_reset_limit_says_so(crew, tmp_path):
    faults = tuple(Fault(rank=rank, epoch=1, batch=1) for rank in range(4))
    work = Workload(tmp_path, epochs=2, faults=faults)
    with pytest.raises(ResetLimitExceeded, match="reset_limit=0"):
        crew.fit(work, np=4, min_np=2, reset_limit=0, elastic_timeout=60)


def test_N2_a_silent_process_is_evicted_after_stall_timeout(crew, tmp_path):
    fault = Fault(rank=1, epoch=1, batch=1, kind="doze", seconds=60)
    work = Workload(tmp_path, epochs=4, faults=(fault,))
    job = crew.fit(work, np=4, min_np=2, stall_timeout=2.0, heartbeat_timeout=30)
    check(job.results(), work)
    assert any("held up the others for 2 s" in event.detail for event in job.history)


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


def test_B4_a_rank_that_raises_after_a_commit_is_left_out(crew, tmp_path):
    work = Workload(tmp_path, epochs=4, faults=(Fault(rank=2, epoch=1, batch=1, kind="raise"),))
    job = crew.fit(work, np=4, min_np=2)
    check(job.results(), work)
    assert sizes(job) == [4, 3]  # its worker is not used again
    assert "cooldown" in kinds(job)


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


def test_A4_the_error_of_all_ranks_fails_the_job(crew, tmp_path):
    faults = tuple(Fault(rank=rank, epoch=1, batch=1, kind="raise") for rank in range(4))
    with pytest.raises(ValueError, match="was told to fail"):
        crew.fit(Workload(tmp_path, faults=faults), np=4, min_np=2)


def test_N17_too_few_workers_are_waited_for_and_then_named(crew, tmp_path):
    job = crew.fit(Workload(tmp_path), np=5, elastic_timeout=1.5, block=False)
    until(lambda: job.status.reason, "a reason", 5)
    assert job.status.state == "waiting"
    assert job.status.reason.startswith("4 of at least 5 workers; waiting ")
    with pytest.raises(NotEnoughWorkers, match=r"4 of at least 5 workers.*elastic_timeout=1\.5"):
        job.result(20)


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
