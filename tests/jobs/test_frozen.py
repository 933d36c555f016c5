"""Real processes that freeze, and others that only look as if they had."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from tests.support.clusters import kinds, sizes
from tests.support.training import Fault, Workload, check

if TYPE_CHECKING:
    from nbelastic import Job

STOPPED = "its process is stopped"


def losses(job: Job) -> list[str]:
    return [event.detail for event in job.history if event.kind == "lost"]


def seconds_until_lost(job: Job, work: Workload) -> float:
    """Return how long after a process has stopped itself its rank was lost."""
    (lost,) = (event.time for event in job.history if event.kind == "lost")
    return lost - (work.marks / "stopped").stat().st_mtime


def test_a_stopped_process_is_seen_by_its_nanny_long_before_heartbeat_timeout(crew, tmp_path):
    fault = Fault(rank=1, epoch=1, batch=1, kind="stop")
    work = Workload(tmp_path, epochs=4, faults=(fault,))
    job = crew.fit(work, np=4, min_np=2)
    check(job.results(), work)
    assert losses(job) == [STOPPED]
    assert sizes(job)[:2] == [4, 3]
    assert seconds_until_lost(job, work) < 8, "bounded by heartbeat_timeout only"


def test_a_stopped_rank_is_ended_by_its_worker_which_starts_another(crew, tmp_path):
    before = crew.workers()
    fault = Fault(rank=1, epoch=1, batch=1, kind="stop_rank")
    work = Workload(tmp_path, epochs=1000, until_newcomers=1, faults=(fault,))
    job = crew.fit(work, np=4, min_np=2)
    check(job.results(), work)
    assert any("was stopped for" in event.detail for event in job.history)
    assert sizes(job)[:3] == [4, 3, 4]
    assert crew.workers() == before


def test_one_that_only_keeps_the_gil_busy_is_left_in_peace(crew, tmp_path):
    work = Workload(tmp_path, faults=(Fault(rank=1, epoch=1, batch=1, kind="hold", seconds=4.0),))
    job = crew.fit(work, np=4, min_np=2, heartbeat_timeout=2)
    check(job.results(), work)
    assert sizes(job) == [4]
    assert not {"lost", "left", "reset"} & set(kinds(job))
    stamps = [stamp for stamp, _ in job.results()[1]["times"]]
    assert max(after - before for before, after in itertools.pairwise(stamps)) >= 4.0


def test_N2_one_that_keeps_the_gil_busy_is_evicted_after_stall_timeout(crew, tmp_path):
    work = Workload(tmp_path, faults=(Fault(rank=1, epoch=1, batch=1, kind="hold", seconds=60.0),))
    job = crew.fit(work, np=4, min_np=2, heartbeat_timeout=2, stall_timeout=3)
    check(job.results(), work)
    (detail,) = losses(job)
    assert "3 s (stall_timeout)" in detail  # it holds up the others, or does not leave them
