"""Cluster managers' own code, on one machine: ranks leave as planned when workers do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import ClassVar

import pytest
from distributed import Client, SSHCluster

from nbelastic import Job
from tests.cli.ssh import SshHosts
from tests.support.clusters import Crew, a_crew, kinds, sizes, until
from tests.support.metadata import serving
from tests.support.training import Workload, check, check_nothing_redone

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def a_job_that_loses_nothing(
    crew: Crew, folder: Path, formed: list[int], **options: int
) -> Iterator[Job]:
    """Train while workers leave; check the sizes, and that no step was lost or done again."""
    work = Workload(folder, epochs=1000, until_told=True)
    job = crew.fit(work, np=formed[0], min_np=1, block=False, **options)
    try:
        until(lambda: job.status.commits > 5 or job.done(), "commits", 120)
        yield job
        (folder / "enough").touch()
        results = job.results(120)
    finally:
        job.cancel()
    check(results, work)
    assert sizes(job) == formed
    assert kinds(job).count("left") == len(formed) - 1
    assert not {"lost", "restarted"}.intersection(kinds(job)), kinds(job)
    check_nothing_redone(results)


def shrinks(job: Job, size: int) -> None:
    """Wait until a job's newest generation has formed with so many ranks."""
    until(lambda: sizes(job)[-1:] == [size] or job.done(), f"{size} ranks", 120)


# -- SLURM: dask-jobqueue, with commands that start local processes --------------------------------

SUBMIT = """#!/bin/sh
set -e
number=1
until mkdir "{folder}/$number" 2>/dev/null; do number=$((number + 1)); done
cp "$1" "{folder}/$number/script"
SLURM_JOB_ID=$number setsid sh "{folder}/$number/script" </dev/null >"{folder}/$number/log" 2>&1 &
echo $! >"{folder}/$number/pid"
echo "Submitted batch job $number"
"""

CANCEL = """#!/bin/sh
kill -TERM "-$(cat "{folder}/$1/pid")" && touch "{folder}/$1/cancelled"
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A batch system that runs each job at once, in a session of its own; its jobs' folders.

    All processes of a job that is cancelled get SIGTERM.
    """
    commands, jobs = tmp_path / "commands", tmp_path / "jobs"
    for directory in (commands, jobs):
        directory.mkdir()
    for name, text in (("sbatch", SUBMIT), ("scancel", CANCEL)):
        (commands / name).write_text(text.format(folder=jobs))
        (commands / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    yield jobs
    for pid in jobs.glob("*/pid"):  # kill what is left, until nothing is
        with contextlib.suppress(ProcessLookupError):
            until(lambda pid=pid: os.killpg(int(pid.read_text()), signal.SIGKILL), f"end of {pid}")


def end_lifetime(dask_worker):
    """Call what the worker's timer will call."""
    assert dask_worker.lifetime == 3600
    reason = "worker-lifetime-reached"
    dask_worker.loop.add_callback(dask_worker.close_gracefully, reason=reason)


def test_workers_leave_as_planned_at_the_end_of_their_lifetime_and_when_scaled_down(
    slurm, tmp_path
):
    dask_jobqueue = pytest.importorskip("dask_jobqueue")
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
        assert {path.parent.name for path in slurm.glob("*/pid")} == {"1", "2", "3"}
    assert len(list(slurm.glob("*/cancelled"))) >= 2, "all but the one that had ended by itself"


# -- Dask Gateway, with a stand-in for its server --------------------------------------------------

TOKEN = "secret"


class Gateway(BaseHTTPRequestHandler):
    """What a scheduler needs of Gateway's server: it takes heartbeats, and sends orders."""

    heartbeats: ClassVar = [{"count": None, "closed_workers": [], "closing_workers": []}]

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        known = self.headers["Authorization"] == f"token {TOKEN}"
        if known and self.path == "/v1/clusters/one/heartbeat":
            self.heartbeats.append(json.loads(body))
        self.send_response_only(200 if known else 403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    @classmethod
    def order(cls, op, **options):
        """Send an order to the address that the scheduler has reported."""
        request = urllib.request.Request(
            f"{until(lambda: cls.heartbeats[-1].get('api_address'), 'a heartbeat')}/api/comm",
            json.dumps({"op": op, **options}).encode(),
            {"Authorization": f"token {TOKEN}", "Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=60).close()


PRELOAD = {
    "preload": ["dask_gateway.scheduler_preload"],
    "preload_argv": ["--dg-api-address", "127.0.0.1:0", "--dg-heartbeat-period", "1"],
}


@pytest.mark.nightly
def test_gateway_asks_for_what_jobs_want_and_scales_down_as_planned(tmp_path, monkeypatch):
    pytest.importorskip("dask_gateway")
    beats = Gateway.heartbeats
    with serving(Gateway) as url:
        monkeypatch.setenv("DASK_GATEWAY_CLUSTER_NAME", "one")
        monkeypatch.setenv("DASK_GATEWAY_API_TOKEN", TOKEN)
        monkeypatch.setenv("DASK_GATEWAY_API_URL", url)
        with a_crew(n_workers=0, scheduler_kwargs=PRELOAD) as crew:
            Gateway.order("scale", count=2)
            until(lambda: beats[-1]["count"] == 2, "it asks for two workers")
            crew.cluster.scale(2)
            crew.client.wait_for_workers(2, timeout=120)
            with a_job_that_loses_nothing(crew, tmp_path, [2, 1], max_np=5) as job:
                names = {rank.name for rank in job.status.ranks}
                Gateway.order("adapt", minimum=1, maximum=9)
                until(lambda: beats[-1]["count"] == 5, "it asks for what the job wants")
                Gateway.order("scale", count=1)
                shrinks(job, 1)
                (left,) = names - {rank.name for rank in job.status.ranks}
            closed = until(lambda: beats[-1]["closed_workers"], "it reports that one has gone")
            closing = {name for beat in beats for name in beat["closing_workers"]}
        assert [str(name) for name in closed] == [left]
        assert closing == set(closed)


# -- clouds: dask-cloudprovider --------------------------------------------------------------------

ADDRESS = f"127.{1 + os.getpid() // 250 % 250}.{os.getpid() % 250}.1"
PORT = 20000 + os.getpid() % 10000
"""Of the scheduler, which the package has to know before. No other process has either."""


def cloud_class():
    """Return a kind of cluster of dask-cloudprovider's, whose machines are processes."""
    vmcluster = pytest.importorskip("dask_cloudprovider.generic.vmcluster")

    class Machine(vmcluster.VMInterface):
        """A machine that runs the command of its container, which gets SIGTERM at the end."""

        def __init__(self, cluster, **options):
            super().__init__(**options)
            self.cluster = cluster

        async def create_vm(self):
            command = shlex.split(self.command.replace("''", "'"))  # as YAML reads it
            command = [sys.executable if word == "python" else word for word in command]
            environment = {**os.environ, "PYTHONPATH": os.getcwd()}
            self.process = await asyncio.create_subprocess_exec(*command, env=environment)
            return ADDRESS, None

        async def destroy_vm(self):
            if self.process.returncode is None:
                self.process.send_signal(signal.SIGTERM)
            await self.process.wait()

    class Cloud(vmcluster.VMCluster):
        scheduler_class = type("SchedulerMachine", (vmcluster.SchedulerMixin, Machine), {})
        worker_class = type("WorkerMachine", (vmcluster.WorkerMixin, Machine), {})

        def __init__(self, **options):
            for kind in ("options", "scheduler_options", "worker_options"):
                setattr(self, kind, {"cluster": self})
            super().__init__(security=False, **options)

    return Cloud


@pytest.mark.nightly
# The package asks with a new socket whether the scheduler listens, and closes none of them.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_a_machine_that_is_shut_down_is_left_as_planned(tmp_path):
    with (
        cloud_class()(
            n_workers=2,
            worker_options={"nthreads": 1, "local_directory": str(tmp_path)},
            scheduler_options={"host": ADDRESS, "port": PORT, "dashboard_address": ":0"},
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        client.wait_for_workers(2, timeout=120)
        with a_job_that_loses_nothing(Crew(cluster, client), tmp_path, [2, 1]) as job:
            cluster.scale(1)
            shrinks(job, 1)


# -- Dask's SSHCluster on a real ssh server, whose hosts are addresses of this machine -------------

STAYS, DIES = "127.0.0.2", "127.0.0.5"


@pytest.mark.nightly
def test_a_host_that_dies_costs_the_batch_in_flight(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    with SshHosts(tmp_path, (STAYS, DIES)) as servers:
        options = {
            "port": servers.port,
            "client_keys": [str(servers.key)],
            "known_hosts": str(tmp_path / ".ssh" / "known_hosts"),
        }
        with (
            SSHCluster(
                [STAYS, STAYS, DIES],
                connect_options=options,
                worker_class="distributed.Worker",
                worker_options={"nthreads": 1},
                scheduler_options={"host": STAYS, "port": 0, "dashboard_address": ":0"},
                remote_python=sys.executable,
            ) as cluster,
            Client(cluster, set_as_default=False) as client,
        ):
            work = Workload(tmp_path, epochs=1000, until_told=True)
            job = Crew(cluster, client).fit(work, np=2, min_np=1, block=False)
            until(lambda: job.status.commits > 5 or job.done(), "commits", 120)
            servers.die(DIES)
            until(lambda: job.status.size == 1 or job.done(), "one rank", 120)
            (tmp_path / "enough").touch()
            check(job.results(120), work)
    assert sizes(job) == [2, 1]
    assert kinds(job).count("lost") == 1
