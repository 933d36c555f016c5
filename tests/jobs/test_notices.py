"""Notices on real workers: a machine that says it will go is left, and no step is done again."""

from __future__ import annotations

import os
import subprocess
import sys

from nbelastic import chaos
from nbelastic.collectives.topology import HOST_VARIABLE
from tests.support.clusters import a_crew, kinds, sizes, until
from tests.support.metadata import aws_notice, metadata
from tests.support.training import Workload, check


def test_a_spot_machine_is_left_and_its_worker_ends(tmp_path):
    """A worker on a host of its own, with a metadata service of its own."""
    with metadata("aws") as service, a_crew(n_workers=1) as crew:
        address = crew.cluster.scheduler_address
        command = [sys.executable, "-m", "dask", "worker", address, "--no-nanny", "--nthreads", "1"]
        environment = {
            **os.environ,
            "PYTHONPATH": os.getcwd(),
            "NBELASTIC_METADATA_URL": service.url,
            HOST_VARIABLE: "spot",
        }
        arguments = [*command, "--name", "w3"]
        with subprocess.Popen(arguments, env=environment, cwd=tmp_path) as process:
            try:
                crew.client.wait_for_workers(2)
                work = Workload(tmp_path, epochs=1000, until_told=True)
                job = crew.fit(work, np=2, min_np=1, block=False)
                until(lambda: job.status.commits > 5 or job.done(), "commits")
                service.notice = aws_notice(120)
                until(lambda: process.poll() is not None or job.done(), "it has ended")
                (tmp_path / "enough").touch()
                results = job.results(120)
            finally:
                process.kill()
        check(results, work)
        assert sizes(job) == [2, 1]
        assert "lost" not in kinds(job)
        (notice,) = (event for event in job.history if event.kind == "notice")
        assert notice.detail.startswith("worker w3 leaves in ")
        assert notice.detail.endswith(": AWS spot (terminate)")
        assert len(results[0]["losses"]) == results[0]["steps"], "nothing was done again"
        assert not any("token" in path for path, _ in service.asked[1:]), "once"


def test_injected_notices_cost_no_step_each(tmp_path):
    with a_crew(n_workers=4) as crew:
        work = Workload(tmp_path, epochs=1000, until_told=True)
        job = crew.fit(work, np=4, min_np=1, block=False)
        until(lambda: job.status.commits > 5 or job.done(), "commits")
        plan = chaos.inject(job, chaos.notice(rank=1), chaos.notice(rank=1, generation=2))
        until(lambda: job.status.size == 2 or job.done(), "2 ranks")
        until(lambda: len(crew.workers()) == 2, "their workers are retired")
        (tmp_path / "enough").touch()
        results = job.results(120)
        check(results, work)
        assert sizes(job) == [4, 3, 2]
        assert kinds(job).count("notice") == 2
        assert "lost" not in kinds(job)
        assert len(results[0]["losses"]) == results[0]["steps"], "nothing was done again"
        assert plan.report()
