"""Kernels that die, go and come; connections that break; a scheduler that is gone."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys

import psutil
import pytest
from distributed import Client

import nbelastic
from nbelastic.errors import ClusterLost, Detached
from tests.support.clusters import a_worker, kinds, sizes, until
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


def info(crew):
    """Return what is known of the only job on the cluster that has not ended."""
    (found,) = nbelastic.jobs(crew.client)
    return found


def running(job):
    """Return with how many ranks a job trains."""
    status = job.status
    return status.size if status.state == "running" else 0


def test_training_goes_on_and_ends_without_its_kernel_and_another_has_the_result(crew, tmp_path):
    work = Workload(tmp_path, epochs=1000, until_told=True, samples=96)
    with Kernel(crew, work, np=4) as kernel:
        kernel.kill()
        before = info(crew).commits
        until(lambda: info(crew).commits > before + 5, "commits without a kernel")
        (work.marks / "enough").touch()
        until(lambda: (info(crew).state, info(crew).slots) == ("finished", 0), "the end")
        job = nbelastic.attach("night-run", cluster=crew.client)
        assert job.done(), "at once"
        check(job.results(), work)
    assert sizes(job) == [4], "nobody has noticed"
    assert "abandoned" in kinds(job) and kinds(job)[-2:] == ["finished", "attached"]
    assert all(each.ended for each in nbelastic.jobs(crew.client))


def test_a_job_without_its_kernel_survives_a_loss_and_obeys_the_latest_that_attaches(
    crew, tmp_path
):
    work = Workload(tmp_path, epochs=1000, until_told=True, samples=96)
    with Kernel(crew, work, np=4, min_np=2, backend="gloo") as kernel:
        kernel.kill()
        crew.kill(next(iter(crew.workers())))
        until(lambda: info(crew).size == 3, "the others go on")
        before = info(crew).commits
        until(lambda: info(crew).commits > before + 5, "commits of three")
        first = nbelastic.attach("night-run", cluster=crew.client)
        assert info(crew).attached
        assert running(first) == 3
        until(lambda: running(first) == 4 or first.done(), "a newcomer", 90)
        assert first.status.backend == "gloo", "the newcomer was told so too"
        with Client(crew.client.scheduler.address, set_as_default=False) as client:
            job = nbelastic.attach("night-run", cluster=client)
            with pytest.raises(Detached, match="taken over by another kernel"):
                first.result(20)
            assert first.status.state == "detached"
            first.stop()  # has nothing to say any more
            attached = kinds(job).count("attached")
            client.loop.add_callback(client.scheduler_comm.comm.abort)
            until(lambda: kinds(job).count("attached") > attached or job.done(), "it is back")
            assert job.status.state == "running"
            job.scale(min_np=1, max_np=2)
            until(lambda: running(job) == 2 or job.done(), "it was scaled down")
            (work.marks / "enough").touch()
            check(job.results(), work)
    assert sizes(job) == [4, 3, 4, 2]


@contextlib.contextmanager
def a_scheduler(tmp_path):
    """Run a scheduler in a process of its own, and connect to it."""
    where = tmp_path / "scheduler.json"
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(
        [*command, "--no-dashboard", "--scheduler-file", where],
        env=environment,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            until(where.exists, "a scheduler")
            with Client(scheduler_file=str(where), set_as_default=False, timeout=3) as client:
                yield process, client
        finally:
            process.kill()


def test_a_scheduler_that_dies_while_a_job_is_opened_is_a_lost_cluster(tmp_path):
    def dies_at_open(dask_scheduler):
        dask_scheduler.handlers["nbelastic_open"] = lambda **_: os._exit(1)

    with a_scheduler(tmp_path) as (_, client):
        assert nbelastic.jobs(client) == ()  # the plugin is there
        client.run_on_scheduler(dies_at_open)
        with pytest.raises(ClusterLost, match="lost while the job was opened"):
            nbelastic.fit(nbelastic.size, cluster=client)


def test_a_killed_scheduler_fails_the_job_and_its_ranks_end(tmp_path):
    with a_scheduler(tmp_path) as (process, client), contextlib.ExitStack() as stack:
        for name in ("one", "two"):
            stack.enter_context(a_worker(client, tmp_path, "--no-nanny", "--name", name))
        job = nbelastic.fit(Workload(tmp_path, epochs=1000), cluster=client, np=2, block=False)
        until(lambda: running(job) == 2 or job.done(), "it runs")
        names = {f"rank of {worker}" for worker in client.run(os.getpid).values()}
        ranks = [each for each in psutil.process_iter(["name"]) if each.info["name"] in names]
        assert len(ranks) == 2
        process.kill()
        with pytest.raises(ClusterLost, match="the Dask client is clos"):
            job.result(60)
        until(lambda: not any(each.is_running() for each in ranks), "the ranks have ended")
