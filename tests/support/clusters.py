"""A cluster, and what a test does to it and with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from distributed import Client, LocalCluster

import nbelastic
from nbelastic.errors import OptionError
from nbelastic.render.text import ENDED


def until(condition: Callable[[], Any], what: str, timeout: float = 60.0) -> Any:
    """Wait for a condition of the outside world, and fail by name if it does not come."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout:g} s in vain: {what}")
        time.sleep(0.01)


class Crew:
    """A cluster of worker processes."""

    def __init__(self, cluster: LocalCluster, client: Client) -> None:
        self.cluster = cluster
        self.client = client

    def fit(self, fn: Callable[..., Any], **options: Any) -> nbelastic.Job:
        """Run a job here; its history is shown where the test fails."""
        block = options.pop("block", True)
        job = nbelastic.fit(fn, cluster=self.client, block=False, **options)
        job.add_done_callback(_tell)
        if block:
            job.results()
        return job

    def workers(self) -> dict[str, int]:
        """Return the process of each worker, by address."""
        return self.client.run(os.getpid, on_error="ignore")

    def wait_until_whole(self, count: int, mend: Callable[[], None] = lambda: None) -> None:
        """Wait until `count` workers are there and idle; call `mend` meanwhile."""

        tasks: dict[str, list[str]] = {}

        def whole() -> bool:
            mend()
            tasks.clear()
            tasks.update(self.client.run_on_scheduler(tasks_of_workers))
            return len(tasks) == count and not any(tasks.values())

        try:
            until(whole, f"{count} idle workers")
        except AssertionError as error:
            raise AssertionError(f"{error}, but {tasks}") from None

    def end_jobs(self) -> None:
        """End the jobs that are still there, whoever has them."""
        for info in nbelastic.jobs(self.client):
            if info.state not in ENDED:
                with contextlib.suppress(OptionError):  # it has ended by itself meanwhile
                    nbelastic.attach(info.name, cluster=self.client).cancel()

    def kill(self, address: str) -> bool:
        """Send SIGKILL to a worker's process; return whether it was there."""
        for nanny in self.cluster.workers.values():
            if nanny.worker_address == address and nanny.pid:
                os.kill(nanny.pid, signal.SIGKILL)
                return True
        return False


def _tell(job: nbelastic.Job) -> None:
    """Print what happened to a job; pytest shows it with a failure."""
    print(job)
    for event in job.history:
        print(f"  {event.time:.3f} {event.kind} {event.rank} {event.worker} {event.detail}")


def tasks_of_workers(dask_scheduler: Any) -> dict[str, list[str]]:
    """Return what each worker is to do, by address; for ``run_on_scheduler``."""
    return {
        address: [task.key for task in worker.processing]
        for address, worker in dask_scheduler.workers.items()
    }


def kinds(job: nbelastic.Job) -> list[str]:
    """Return the kinds of events in a job's history."""
    return [event.kind for event in job.history]


def workers_of(job: nbelastic.Job) -> dict[int, str]:
    """Return the address of the worker of each rank, as they have joined, or were granted."""
    return dict(job._driver.log.ranks.values())


def sizes(job: nbelastic.Job) -> list[int]:
    """Return the size of each generation that has formed."""
    return [event.size for event in job.history if event.kind == "formed"]


@contextlib.contextmanager
def a_crew(**options: Any) -> Iterator[Crew]:
    """Start a cluster of a test's own, and close it."""
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0", **options}
    with LocalCluster(**options) as cluster, Client(cluster, set_as_default=False) as client:
        yield Crew(cluster, client)


@contextlib.contextmanager
def a_worker(client: Client, folder: Path, *words: str, **variables: str) -> Iterator[Any]:
    """Run ``dask worker`` on a cluster, with its files in a folder, until it is there.

    Its search path is this process's, so that its ranks come from the same template.
    """
    command = [sys.executable, "-m", "dask", "worker", client.scheduler.address]
    options = ["--nthreads", "1", "--no-dashboard", "--local-directory", str(folder), *words]
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), **variables}
    count = len(client.scheduler_info()["workers"]) + 1
    with subprocess.Popen([*command, *options], env=environment) as process:
        try:
            client.wait_for_workers(count)
            yield process
        finally:
            process.kill()
