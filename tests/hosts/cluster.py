"""A Dask cluster whose scheduler and workers are on different hosts, and jobs on it."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.hosts.kernel import ENDING, HISTORY, ORDER, Ending, Order
from tests.hosts.network import Network, a_network, environment
from tests.support.clusters import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.training import Workload

HEAD = "head"
PORT = 8786

SETTINGS = {
    # After how long Dask gives up a connection whose other end does not answer. It should be more
    # than the time after which ranks do (nbelastic.cluster.dask_compat.LIMIT_S), so that
    # both are seen.
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "15s",
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "5s",
    "DASK_DISTRIBUTED__WORKER__MEMORY__TERMINATE": "False",
    # What takes long happens once on each host, however many workers are lost there.
    "DASK_DISTRIBUTED__NANNY__PRELOAD": "['tests.support.forking']",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Traced:
    """A workload that leaves a mark for each of its ranks that has ended, and says where."""

    work: Workload

    def __call__(self) -> dict[str, Any]:
        """Train. Runs on every rank."""
        host = os.environ["TEST_HOST"]
        (self.work.marks / f"began-{host}-{os.getpid()}").touch()
        try:
            return {**self.work(), "host": host}
        finally:
            (self.work.marks / f"ended-{host}-{os.getpid()}").touch()

    def idle(self) -> float:
        """Return for how many seconds no rank has made a step."""
        return time.time() - (self.work.marks / "training").stat().st_mtime

    def left_on(self, host: str) -> bool:
        """Return whether a rank that began on a host has not ended there."""
        began = {path.name[6:] for path in self.work.marks.glob(f"began-{host}-*")}
        ended = {path.name[6:] for path in self.work.marks.glob(f"ended-{host}-*")}
        return bool(began - ended)


class RemoteJob:
    """A job that a kernel on a host runs; what is known of it is in files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def history(self) -> list[dict[str, Any]]:
        """What has happened so far."""
        path = self._folder / HISTORY
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    @property
    def sizes(self) -> list[int]:
        """The size of each generation that has formed."""
        return [event["size"] for event in self.history if event["kind"] == "formed"]

    @property
    def reasons(self) -> list[str]:
        """Why each reset was."""
        return [event["detail"] for event in self.history if event["kind"] == "reset"]

    def done(self) -> bool:
        """Return whether it has ended."""
        return (self._folder / ENDING).exists()

    def until_formed(self, size: int, timeout: float = 30.0) -> None:
        """Wait until a generation of this size has formed."""
        what = f"a generation of {size}"
        until(lambda: size in self.sizes or self.done(), what, timeout)
        assert size in self.sizes, f"it ended before: {self.ending()}"

    def ending(self, timeout: float = 90.0) -> Ending:
        """Wait for its end; what happened to it is shown where the test fails."""
        try:
            until(self.done, "end of the job", timeout)
        finally:
            for event in self.history:
                where = f"{event['rank']} {event['worker']}"
                print(f"  {event['time']:.3f} {event['kind']} {where} {event['detail']}")
        ending: Ending = pickle.loads((self._folder / ENDING).read_bytes())
        print(ending.error, ending.message)
        return ending

    def results(self, timeout: float = 90.0) -> list[Any]:
        """Return the results by rank; it must have ended well."""
        ending = self.ending(timeout)
        assert not ending.error, f"{ending.error}: {ending.message}"
        return ending.results


class HostsCluster:
    """Scheduler and kernel on one host, workers with nannies on others."""

    def __init__(self, network: Network, workers: dict[str, int], folder: Path) -> None:
        self.network = network
        self._workers, self._folder = workers, folder
        self._running: dict[str, subprocess.Popen[Any]] = {}
        self._jobs = 0
        address = network.hosts[HEAD].address
        self._address = f"tcp://{address}:{PORT}"
        self._start(HEAD, "scheduler", "dask_scheduler", f"--port={PORT}", "--no-show")
        self.tend()
        script = str(Path(__file__).with_name("kernel.py"))
        self._kernel = self._launch(HEAD, "kernel", [script, self._address], stdin=True)

    def _start(self, host: str, name: str, module: str, *options: str) -> None:
        command = ["-m", f"distributed.cli.{module}", "--no-dashboard", *options]
        self._running[name] = self._launch(
            host, name, [*command, f"--host={self.network.hosts[host].address}"]
        )

    def _launch(
        self, host: str, name: str, command: list[str], *, stdin: bool = False
    ) -> subprocess.Popen[Any]:
        with (self._folder / f"{name}.log").open("a") as log:
            return self.network.hosts[host].popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
                env=environment({**SETTINGS, "TEST_HOST": host}),
            )

    def tend(self) -> None:
        """Replace hosts that were killed, and start workers where they have closed for good."""
        for host, count in self._workers.items():
            if not self.network.hosts[host].alive:
                self.network.replace(host)
            running = self._running.get(host)
            if running is None or running.poll() is not None:
                scratch = self._folder / f"scratch-{host}"
                shutil.rmtree(scratch, ignore_errors=True)
                options = (f"--nworkers={count}", "--nthreads=1", f"--local-directory={scratch}")
                self._start(host, host, "dask_worker", self._address, *options)

    def fit(self, function: Any, **options: Any) -> RemoteJob:
        """Start a job when all workers are there, and wait until it trains, or has ended."""
        self._jobs += 1
        folder = self._folder / f"job-{self._jobs}"
        folder.mkdir()
        order = Order(function, sum(self._workers.values()), options)
        (folder / ORDER).write_bytes(pickle.dumps(order))
        assert self._kernel.stdin is not None
        self._kernel.stdin.write(f"{folder}\n")
        self._kernel.stdin.flush()
        job = RemoteJob(folder)
        until(lambda: self.tend() or job.sizes or job.done(), "the first generation", 120)
        return job


@contextlib.contextmanager
def a_cluster(folder: Path, **workers: int) -> Iterator[HostsCluster]:
    """Start a cluster with so many workers on each host, and remove it."""
    with a_network(HEAD, *workers) as network:
        yield HostsCluster(network, workers, folder)
