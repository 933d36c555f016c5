"""A sample that cannot be read: whoever gets it raises, and then somebody else gets it."""

from __future__ import annotations

from nbelastic.errors import RankFailed
from tests.support.clusters import kinds, sizes
from tests.support.training import Workload


def test_N14_a_sample_that_no_rank_can_read_fails_the_job_with_its_error(crew, tmp_path):
    work = Workload(tmp_path, poison=200)
    job = crew.fit(work, np=4, min_np=1, block=False)
    error = job.exception(100)  # bounded: elastic_timeout, which is not waited for, is 600 s
    assert isinstance(error, ValueError)
    assert isinstance(error, RankFailed)
    assert "sample 200 cannot be read" in str(error)
    assert "training.py" in str(error), "the line of the user's code"
    assert job.status.reason.endswith("(raised on 3 workers, one after another)")
    assert kinds(job).count("lost") == 3
    seen = sizes(job)
    assert seen[0] == 4
    assert seen[-1] >= 2
    assert seen == sorted(seen, reverse=True), "two may fail before the others have formed again"
    assert len(crew.workers()) == 4, "the workers themselves are as they were"
