"""Kernels that die, go and come; connections that break; a scheduler that is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
from distributed import Client

import nbelastic
from nbelastic.errors import ClusterLost, Detached, OptionError
from tests.support.clusters import a_crew, kinds, sizes, until
from tests.support.training import Workload, check

KERNEL = """
import sys, pickle
from distributed import Client
import nbelastic
client = Client(sys.argv[1])
options = pickle.loads(bytes.fromhex(sys.argv[3]))
work = pickle.loads(bytes.fromhex(sys.argv[2]))
nbelastic.fit(work, cluster=client, name="night-run", **options)
"""


class Kernel:
    """A process of its own that has started the job ``night-run``."""

    def __init__(self, crew, work, **options):
        import pickle

        self._crew = crew
        arguments = [pickle.dumps(each).hex() for each in (work, options)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", KERNEL, crew.cluster.scheduler_address, *arguments],
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        until((work.marks / "training").exists, "it trains", 90)

    def kill(self):
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        until(lambda: not info(self._crew).attached, "the scheduler notices")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()


def there(crew):
    """Return what is known of the jobs that have not ended."""
    return [each for each in nbelastic.jobs(crew.client) if each.ended is None]


def info(crew):
    """Return what is known of the only job on the cluster."""
    (found,) = there(crew)
    return found


def running(job):
    """Return with how many ranks a job trains."""
    status = job.status
    return status.size if status.state == "running" else 0


def finish(work):
    (work.marks / "enough").touch()


def test_training_goes_on_without_its_kernel_and_another_takes_over(crew, tmp_path):
    work = Workload(tmp_path, epochs=1000, until_told=True, samples=96)
    with Kernel(crew, work, np=4) as kernel:
        kernel.kill()
        before = info(crew).commits
        until(lambda: info(crew).commits > before + 5, "commits without a kernel")
        job = nbelastic.attach("night-run", cluster=crew.client)
        assert info(crew).attached
        assert job.status.state == "running"
        assert job.status.size == 4
        assert job.status.backend in ("shm", "gloo")
        finish(work)
        check(job.results(), work)
    assert sizes(job) == [4], "nobody has noticed"
    assert [k for k in kinds(job) if k in ("abandoned", "attached")] == ["abandoned", "attached"]
    assert there(crew) == []


def test_the_result_is_that_of_an_undisturbed_run_whether_or_not_it_ends_without_a_kernel(
    crew, tmp_path
):
    kinds_of_run = ("undisturbed", "attached", "ended")
    weights = set()
    for kind in kinds_of_run:
        marks = tmp_path / kind
        marks.mkdir()
        work = Workload(marks, epochs=8, seed=7)
        if kind == "undisturbed":
            job = crew.fit(work, np=4)
        else:
            with Kernel(crew, work, np=4) as kernel:
                kernel.kill()
                if kind == "ended":
                    until(lambda: info(crew).state == "finished", "the end")
                job = nbelastic.attach("night-run", cluster=crew.client, block=kind != "ended")
                assert job.done(), "at once"
        check(job.results(), work)
        assert sizes(job) == [4]
        assert there(crew) == []
        if kind == "ended":
            assert kinds(job)[-2:] == ["finished", "attached"]
        weights.add(job.result()["weights"])
    assert len(weights) == 1


def test_a_job_without_its_kernel_survives_a_loss_and_grows_again_with_the_next(crew, tmp_path):
    work = Workload(tmp_path, epochs=1000, until_told=True, samples=96)
    with Kernel(crew, work, np=4, min_np=2, backend="gloo") as kernel:
        kernel.kill()
        crew.kill(next(iter(crew.workers())))
        until(lambda: info(crew).size == 3, "the others go on")
        before = info(crew).commits
        until(lambda: info(crew).commits > before + 5, "commits of three")
        job = nbelastic.attach("night-run", cluster=crew.client)
        until(lambda: job.status.size == 4 or job.done(), "a newcomer", 90)
        finish(work)
        check(job.results(), work)
    assert sizes(job) == [4, 3, 4]
    assert job.status.backend == "gloo", "the newcomer was told so too"


def test_a_job_that_nobody_attaches_to_ends_with_its_lease(crew, tmp_path):
    with Kernel(crew, Workload(tmp_path, epochs=1000), np=4, lease=1.0) as kernel:
        kernel.kill()
        until(lambda: there(crew) == [], "the lease is over")
        crew.wait_until_whole(4)
    with pytest.raises(OptionError, match="the job has ended; dask elastic status"):
        nbelastic.attach("night-run", cluster=crew.client)
    until(lambda: crew.client.run_on_scheduler(tasks) == 0, "no task is left")


def tasks(dask_scheduler):
    return len(dask_scheduler.tasks)


def test_the_second_to_attach_fences_the_first(crew, tmp_path):
    work = Workload(tmp_path, epochs=1000, until_told=True, samples=96)
    first = crew.fit(work, np=4, block=False, name="night-run")
    until(lambda: first.status.state == "running" or first.done(), "it runs")
    with Client(crew.client.scheduler.address, set_as_default=False) as client:
        second = nbelastic.attach("night-run", cluster=client)
        with pytest.raises(Detached, match="taken over by another kernel"):
            first.result(20)
        assert first.status.state == "detached"
        first.stop()  # has nothing to say any more
        second.scale(min_np=1, max_np=2)
        until(lambda: running(second) == 2 or second.done(), "it was scaled down")
        finish(work)
        check(second.results(), work)


def test_a_connection_that_breaks_and_comes_back_costs_nothing(crew, tmp_path):
    work = Workload(tmp_path, epochs=1000, until_told=True, samples=96)
    with Client(crew.client.scheduler.address, set_as_default=False) as client:
        job = nbelastic.fit(work, cluster=client, np=4, block=False)
        until(lambda: job.status.state == "running" or job.done(), "it runs")
        for _ in range(3):
            attached = kinds(job).count("attached")
            client.loop.add_callback(client.scheduler_comm.comm.abort)
            until(lambda n=attached: kinds(job).count("attached") > n or job.done(), "it is back")
        assert job.status.state == "running"
        before = job.status.commits
        until(lambda: job.status.commits > before + 5 or job.done(), "commits")
        finish(work)
        check(job.results(), work)
    assert sizes(job) == [4]


def test_a_job_fails_in_bounded_time_when_its_scheduler_is_gone(tmp_path):
    with a_crew(n_workers=2) as crew:
        job = crew.fit(Workload(tmp_path, epochs=1000), np=2, block=False)
        until(lambda: job.status.state == "running" or job.done(), "it runs")
        threads = threading.active_count()
        crew.cluster.close()
        with pytest.raises(ClusterLost, match="the Dask client is clos"):
            job.result(60)
        assert threading.active_count() <= threads


def test_a_killed_scheduler_fails_the_job_and_its_ranks_end(tmp_path):
    where = tmp_path / "scheduler.json"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    listening = ["--port", "0", "--no-dashboard", "--scheduler-file", where]
    scheduler = subprocess.Popen(
        [sys.executable, "-m", "distributed.cli.dask_scheduler", *listening], **quiet
    )
    until(where.exists, "a scheduler", 60)
    dask = [sys.executable, "-m", "distributed.cli.dask_worker", "--no-dashboard"]
    forked = ["--preload-nanny", "tests.support.forking"]
    workers = subprocess.Popen(
        [*dask, *forked, "--nworkers", "2", "--nthreads", "1", "--scheduler-file", where],
        env=environment,
        cwd=tmp_path,
        **quiet,
    )
    try:
        with Client(scheduler_file=str(where), set_as_default=False, timeout=3) as client:
            client.wait_for_workers(2, timeout=60)
            job = nbelastic.fit(Workload(tmp_path, epochs=1000), cluster=client, np=2, block=False)
            until(lambda: running(job) == 2 or job.done(), "it runs")
            ranks = list(client.run(os.getpid).values())
            scheduler.kill()
            with pytest.raises(ClusterLost, match="the Dask client is clos"):
                job.result(60)
        until(lambda: not any(map(alive, ranks)), "the ranks' processes are gone")
    finally:
        for process in (workers, scheduler):
            process.terminate()
            process.wait(30)


def alive(pid):
    return os.path.exists(f"/proc/{pid}")
