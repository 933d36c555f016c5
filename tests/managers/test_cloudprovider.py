"""dask-cloudprovider's code for virtual machines, which are processes here."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys

import pytest
from distributed import Client

from tests.support.clusters import Crew

from .planned import a_job_that_loses_nothing, shrinks

vmcluster = pytest.importorskip("dask_cloudprovider.generic.vmcluster")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    # The package asks with a new socket whether the scheduler listens, and closes none of them.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]

ADDRESS = f"127.{1 + os.getpid() // 250 % 250}.{os.getpid() % 250}.1"
PORT = 20000 + os.getpid() % 10000
"""Of the scheduler, which the package has to know before. No other process has either."""


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


class SchedulerMachine(vmcluster.SchedulerMixin, Machine):
    """The scheduler's."""


class WorkerMachine(vmcluster.WorkerMixin, Machine):
    """A worker's."""


class Cloud(vmcluster.VMCluster):
    """Clusters of a cloud whose machines are processes."""

    scheduler_class = SchedulerMachine
    worker_class = WorkerMachine

    def __init__(self, **options):
        self.options = {"cluster": self}
        self.scheduler_options = {"cluster": self}
        self.worker_options = {"cluster": self}
        super().__init__(security=False, **options)


def test_a_machine_that_is_shut_down_is_left_as_planned(tmp_path):
    with (
        Cloud(
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
