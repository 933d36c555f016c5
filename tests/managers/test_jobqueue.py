"""dask-jobqueue's own SLURM code, with commands that start local processes."""

from __future__ import annotations

import os
import sys

import pytest
from distributed import Client

from tests.support.clusters import Crew

from .batch import BatchSystem
from .planned import a_job_that_loses_nothing, shrinks

dask_jobqueue = pytest.importorskip("dask_jobqueue")

pytestmark = pytest.mark.slow


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    system = BatchSystem(tmp_path)
    monkeypatch.setenv("PATH", f"{system.commands}:{os.environ['PATH']}")
    yield system
    system.end()


def end_lifetime(dask_worker):
    """Call what the worker's timer will call."""
    assert dask_worker.lifetime == 3600
    reason = "worker-lifetime-reached"
    dask_worker.loop.add_callback(dask_worker.close_gracefully, reason=reason)


def test_workers_leave_as_planned_at_the_end_of_their_lifetime_and_when_scaled_down(
    slurm, tmp_path
):
    with (
        dask_jobqueue.SLURMCluster(
            cores=1,
            processes=1,
            memory="2GB",
            interface="lo",
            walltime="02:00:00",
            worker_extra_args=["--lifetime", "1h"],
            job_script_prologue=[f"export PYTHONPATH={os.getcwd()}", f"cd {tmp_path}"],
            local_directory=str(tmp_path),
            python=sys.executable,
            scheduler_options={"dashboard_address": ":0"},
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        cluster.scale(3)
        client.wait_for_workers(3, timeout=120)
        with a_job_that_loses_nothing(Crew(cluster, client), tmp_path, [3, 2, 1]) as job:
            newest = list(cluster.worker_spec)[-1]
            (old,) = (rank.worker for rank in job.status.ranks if rank.name == newest)
            client.run(end_lifetime, workers=[old])
            shrinks(job, 2)
            cluster.scale(1)  # one that trains, and the one that is gone
            shrinks(job, 1)
        assert slurm.numbers() == [1, 2, 3]
        assert "#SBATCH -t 02:00:00" in slurm.script(1)
    assert len(slurm.numbers("cancelled")) >= 2, "all but the one that had ended by itself"
