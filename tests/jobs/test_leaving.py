"""Workers that leave as planned: nothing is rolled back, cleanup runs, nobody is lost."""

from __future__ import annotations

import pytest

from nbelastic.errors import JobStopped
from tests.support.clusters import a_crew, kinds, sizes, until
from tests.support.training import Workload, check, check_nothing_redone


def retire_one(crew, job):
    victim = next(rank.worker for rank in job.status.ranks if rank.rank == 1)
    crew.client.retire_workers([victim], close_workers=True)


def test_the_only_rank_is_retired_and_stays_until_another_has_the_state(tmp_path):
    with a_crew(n_workers=2) as crew:
        work = Workload(tmp_path, epochs=1000, until_told=True, slow_start=0.5)
        job = crew.fit(work, np=1, block=False)
        until(lambda: job.status.commits > 5 or job.done(), "commits")
        (rank,) = job.status.ranks
        crew.client.retire_workers([rank.worker], close_workers=True)
        (tmp_path / "enough").touch()
        results = job.results(120)
        check(results, work)
        assert sizes(job) == [1, 2, 1], "two for a moment, so that one can have it from the other"
        assert "left" in kinds(job)
        assert not {"lost", "restarted"}.intersection(kinds(job))
        check_nothing_redone(results)


def test_a_job_without_a_commit_in_reach_loses_the_worker_after_the_grace(tmp_path):
    from nbelastic.cluster.scheduler import scaling

    with a_crew(n_workers=2) as crew:

        def shorten_batching(grace):
            scaling.RETIRE_GRACE = grace

        before = scaling.RETIRE_GRACE
        crew.client.run_on_scheduler(shorten_batching, 0.5)
        try:
            work = Workload(tmp_path, epochs=1000, commit_every=10**9)
            job = crew.fit(work, np=2, min_np=1, block=False)
            until(lambda: job.status.state == "running" or job.done(), "it trains")
            retire_one(crew, job)
            job.cancel()
            with pytest.raises(JobStopped):
                job.result(60)
        finally:
            shorten_batching(before)
