"""What macOS gets, on Linux: no native part, and no rank forked from a process with torch."""

import dask
import pytest

from tests.support.clusters import a_crew, sizes, until
from tests.support.training import Workload, check


def how_it_began():
    import psutil

    from nbelastic.native import core

    return core, [word for word in psutil.Process().cmdline() if "rank.main import" in word] != []


@pytest.mark.slow
def test_a_job_survives_a_killed_worker_without_what_only_linux_has(tmp_path, monkeypatch):
    monkeypatch.setenv("NBELASTIC_PORTABLE", "1")  # before the workers are started anew
    with (
        dask.config.set({"distributed.worker.multiprocessing-method": "spawn"}),
        a_crew(n_workers=3) as crew,
    ):
        work = Workload(tmp_path, epochs=1000, until_newcomers=1)
        job = crew.fit(lambda: (how_it_began(), work()), np=3, min_np=2, block=False)
        until(lambda: job.status.commits > 5, "three ranks train")
        assert job.status.backend == "gloo"
        assert crew.kill(next(rank.worker for rank in job.status.ranks if rank.rank == 1))
        check([trained for _, trained in job.results()], work)
        assert [began for began, _ in job.results()] == [(None, True)] * 3
        assert sizes(job)[:3] == [3, 2, 3] and job.status.backend == "gloo"
