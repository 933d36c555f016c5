"""Notices on real workers: a machine that says it will go is left, and no step is done again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import nbelastic
from nbelastic import chaos
from nbelastic.collectives.topology import HOST_VARIABLE
from tests.support.clusters import a_crew, kinds, sizes, until
from tests.support.metadata import aws_notice, metadata
from tests.support.training import Workload, check, check_nothing_redone


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
        check_nothing_redone(results)
        assert not any("token" in path for path, _ in service.asked[1:]), "once"


def test_notices_cost_no_step_though_the_job_rarely_commits(tmp_path):
    """Ranks leave at `check_host_updates()`, with the values of that moment."""
    with a_crew(n_workers=4) as crew:
        work = Workload(tmp_path, epochs=1000, until_told=True, commit_every=10**9)
        job = crew.fit(work, np=4, min_np=1, block=False)
        until(lambda: (tmp_path / "training").exists() or job.done(), "steps")
        plan = chaos.inject(job, chaos.notice(rank=1), chaos.notice(rank=1, generation=2))
        until(lambda: sizes(job)[-1:] == [2] or job.done(), "2 ranks")
        until(lambda: len(crew.workers()) == 2, "their workers are retired")
        (tmp_path / "enough").touch()
        results = job.results(120)
        check(results, work)
        assert kinds(job).count("notice") == kinds(job).count("left") == 2
        assert "lost" not in kinds(job)
        check_nothing_redone(results)
        assert plan.report()


def test_the_last_commit_is_written_where_all_machines_go(tmp_path):
    with a_crew(n_workers=2) as crew:
        work = Workload(tmp_path, epochs=1000, until_told=True)
        where = tmp_path / "checkpoints"
        options = {"checkpoint": where, "checkpoint_every": 10**6, "block": False}
        job = crew.fit(work, np=2, min_np=1, **options)
        until(lambda: job.status.commits > 5 or job.done(), "commits")
        chaos.inject(job, *(chaos.notice(rank=rank, seconds=14) for rank in range(2)))
        last = "is written: no other rank had the state"
        until(lambda: job.done() or any(e.detail.endswith(last) for e in job.history), "the file")
        until(lambda: job.done() or kinds(job).count("left") == 2, "both ranks have left")
        assert not job.done()
        job.cancel()
        job.wait(60)
        assert "lost" not in kinds(job)
        assert any(where.rglob("*"))


def catches(pid, signum):
    """Return whether a process has a handler for a signal."""
    with open(f"/proc/{pid}/status") as file:
        caught = next(line for line in file if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signum - 1) & 1)


def one():
    return 1


def test_a_signal_to_a_nanny_retires_its_worker_without_a_job(tmp_path):
    with a_crew(n_workers=1) as crew:
        crew.client.register_plugin(nbelastic.SpotNotices())
        address = crew.cluster.scheduler_address
        arguments = [sys.executable, "-m", "dask", "worker", address, "--nthreads", "1"]
        environment = {
            **os.environ,
            "PYTHONPATH": os.getcwd(),
            "NBELASTIC_METADATA_URL": "http://127.0.0.1:9",
        }
        arguments += ["--name", "w3"]
        with subprocess.Popen(arguments, env=environment, cwd=tmp_path) as process:
            try:
                crew.client.wait_for_workers(2)
                data = crew.client.submit(one, workers=["w3"], allow_other_workers=True)
                assert data.result(60) == 1
                until(lambda: catches(process.pid, signal.SIGUSR1), "the nanny is prepared")
                process.send_signal(signal.SIGUSR1)
                until(lambda: process.poll() is not None, "it has ended")
            finally:
                process.kill()
        assert process.returncode == 0
        until(lambda: len(crew.workers()) == 1, "its worker is gone")
        assert data.result(60) == 1
        crew.client.unregister_scheduler_plugin(nbelastic.SpotNotices.name)
