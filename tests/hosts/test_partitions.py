"""Hosts that are cut off, slowly or badly connected, or gone, while they train."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask
import pytest
from distributed import Client

from nbelastic.errors import NoProgress
from tests.hosts.network import ROOT, Link, Network, a_network, why_not
from tests.support.clusters import Crew, kinds, sizes, tasks_of_workers, until
from tests.support.training import Workload, check

if TYPE_CHECKING:
    import nbelastic

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HEAD = "head"
PORT = 8786

TIMEOUTS = {
    # After how long Dask gives up a connection whose other end does not answer. It should be more
    # than the time after which ranks do (nbelastic.cluster.dask_compat.LIMIT_S), so that
    # both are seen.
    "distributed.comm.timeouts.tcp": "15s",
    "distributed.comm.timeouts.connect": "5s",
}
SETTINGS = {
    "PYTHONPATH": str(ROOT),
    **{f"DASK_{name.replace('.', '__').upper()}": value for name, value in TIMEOUTS.items()},
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
            return self.work()
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


class HostsCluster(Crew):
    """Scheduler on one host, workers with nannies on others; the client is in this process."""

    def __init__(self, network: Network, workers: dict[str, int], folder: Path) -> None:
        self.network = network
        self._workers, self._folder = workers, folder
        self._running: dict[str, subprocess.Popen[Any]] = {}
        self._address = f"tcp://{network.hosts[HEAD].address}:{PORT}"
        self._start(HEAD, "scheduler", "dask_scheduler", f"--port={PORT}", "--no-show")
        self.tend()
        with network.hosts[HEAD].entered():  # and so does the thread of the client, from now on
            self.client = Client(self._address, set_as_default=False, timeout="60s")

    def _start(self, host: str, name: str, module: str, *options: str) -> None:
        here = self.network.hosts[host]
        command = [sys.executable, "-m", f"distributed.cli.{module}", "--no-dashboard", *options]
        with (self._folder / f"{name}.log").open("a") as log:
            self._running[name] = here.popen(
                [*command, f"--host={here.address}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **SETTINGS, "TEST_HOST": host},
            )

    def tend(self) -> None:
        """Replace hosts that were killed, and start workers where they have closed for good."""
        for host, count in self._workers.items():
            if not self.network.hosts[host].alive:
                self.network.add(host)
            running = self._running.get(host)
            if running is None or running.poll() is not None:
                scratch = self._folder / f"scratch-{host}"
                shutil.rmtree(scratch, ignore_errors=True)
                options = (f"--nworkers={count}", "--nthreads=1", f"--local-directory={scratch}")
                self._start(host, host, "dask_worker", self._address, *options)

    def fit(self, fn: Any, **options: Any) -> nbelastic.Job:
        """Start a job when all workers are there, and wait until it trains, or has ended."""
        until(lambda: self.tend() or self._is_whole(), "all workers", 120)
        job = super().fit(fn, block=False, **options)
        until(lambda: self.tend() or sizes(job) or job.done(), "the first generation", 120)
        return job

    def _is_whole(self) -> bool:
        tasks = self.client.run_on_scheduler(tasks_of_workers)
        return list(tasks.values()) == [[]] * sum(self._workers.values())


def until_formed(job: nbelastic.Job, size: int) -> None:
    """Wait until a generation of this size has formed; that is bounded, not measured."""
    until(lambda: size in sizes(job) or job.done(), f"a generation of {size}", 30)
    assert size in sizes(job), f"it ended before: {job.exception()!r}"


@pytest.fixture(scope="module")
def _three_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsCluster]:
    reason = why_not()
    if reason:
        pytest.skip(f"no hosts can be made of namespaces here: {reason}")
    network, folder = a_network(HEAD, "a", "b", "c"), tmp_path_factory.mktemp("hosts")
    with network as hosts, dask.config.set(TIMEOUTS):
        made = HostsCluster(hosts, {"a": 2, "b": 1, "c": 1}, folder)
        with made.client:
            yield made


@pytest.fixture
def cluster(_three_hosts: HostsCluster) -> HostsCluster:
    """Two workers on host a, one on each of b and c, scheduler and kernel on a fourth."""
    _three_hosts.network.heal()
    return _three_hosts


# -- jobs ----------------------------------------------------------------------------------------

QUICK = {"np": 4, "min_np": 2, "heartbeat_timeout": 5.0, "stall_timeout": 8.0}
LONG = 1000
"""Epochs that nobody waits for: such a job goes on until newcomers have come, or is left behind."""


def a_job(cluster, folder, *, size=4, seconds=0.05, options=None, **work):
    """Start a job of so many ranks, and wait until it trains."""
    marks = folder / "marks"
    marks.mkdir()
    function = Traced(Workload(marks, seconds=seconds, **work))
    job = cluster.fit(function, **{**QUICK, **(options or {})})
    until_formed(job, size)
    until((marks / "training").exists, "the first step")
    return function, job


def lost(cluster, job):
    """Return the names of the hosts whose workers were lost."""
    names = {host.address: name for name, host in cluster.network.hosts.items()}
    workers = [event.worker for event in job.history if event.kind == "lost"]
    return {names[worker.removeprefix("tcp://").rpartition(":")[0]] for worker in workers}


def ends(cluster, job, function, formed, lost_hosts=frozenset()):
    """Check the results, the sizes of the generations, and the hosts whose workers were lost."""
    check(job.results(90), function.work)
    assert sizes(job) == formed, [each.detail for each in job.history if each.kind == "reset"]
    assert lost(cluster, job) == lost_hosts


nightly = pytest.mark.nightly


@pytest.mark.parametrize(
    "fault", ["cut", *(pytest.param(n, marks=nightly) for n in ("kill", "both"))]
)
def test_the_side_with_the_driver_goes_on_and_the_other_side_stops(cluster, tmp_path, fault):
    function, job = a_job(cluster, tmp_path, epochs=20)
    (formed,) = (event.detail for event in job.history if event.kind == "formed")
    assert formed == "4 ranks over shared memory and Gloo", "two of them share a host"
    if fault != "kill":
        cluster.network.cut("a")
    if fault != "cut":
        cluster.network.hosts["a"].kill()
    until_formed(job, 2)
    if fault == "cut":
        until(lambda: not function.left_on("a"), "the end of the ranks that are cut off", 60)
    ends(cluster, job, function, [4, 2], {"a"})


@nightly
def test_ranks_that_are_cut_off_all_together_do_not_train_on(cluster, tmp_path):
    there = {"np": 2, "min_np": 2, "workers": cluster.network.hosts["a"].address}
    function, job = a_job(cluster, tmp_path, size=2, epochs=LONG, until_newcomers=2, options=there)
    cluster.network.cut("a")
    until(lambda: function.idle() > 2.0, "the last step of those who are cut off")
    assert function.left_on("a"), "they wait, and are not ended"
    assert not job.done()
    cluster.network.heal()
    until(lambda: cluster.tend() or job.done(), "the end of the job", 90)
    check(job.results(90), function.work)
    assert sizes(job) == [2, 2]
    assert kinds(job).count("restarted") == 1


@nightly
@pytest.mark.parametrize("directions", ["both", "from", "to"])
def test_a_host_that_is_back_after_the_driver_went_on_gets_new_ranks(cluster, tmp_path, directions):
    function, job = a_job(cluster, tmp_path, epochs=LONG, until_newcomers=2)
    cluster.network.cut("a", directions=directions)
    until_formed(job, 2)
    assert lost(cluster, job) == {"a"}
    cluster.network.heal()
    results = job.results(timeout=90)
    check(results, function.work)
    assert sizes(job)[:2] == [4, 2]
    assert sum(result["newcomer"] for result in results) == 2


@nightly
@pytest.mark.parametrize("slow", [False, True])
def test_a_short_cut_and_a_connection_that_loses_packets_cost_time_alone(cluster, tmp_path, slow):
    network = cluster.network
    if slow:
        network.set("a", None, Link(delay=0.02, loss=0.01))
    patient = {} if slow else {"heartbeat_timeout": 10.0, "stall_timeout": 20.0}
    function, job = a_job(cluster, tmp_path, epochs=2 if slow else 10, options=patient)
    if not slow:  # for less than all timeouts
        before = network.lost
        network.cut("a")
        until(lambda: network.lost > before + 20, "packets that are lost")
        network.heal()
    ends(cluster, job, function, [4])


@nightly
@pytest.mark.parametrize("least", [2, 4])
def test_where_two_hosts_cannot_reach_each_other_the_job_goes_on_without_one(
    cluster, tmp_path, least
):
    """Where it cannot, it says which ranks cannot reach each other."""
    epochs = 20 if least == 2 else LONG
    function, job = a_job(cluster, tmp_path, epochs=epochs, options={"min_np": least})
    cluster.network.cut("b", "c")
    if least == 2:
        check(job.results(90), function.work)
        reasons = [event.detail for event in job.history if event.kind == "reset"]
        assert sizes(job)[:2] == [4, 3], reasons
        assert set(sizes(job)[2:]) <= {3}, reasons  # one more attempt, among the same
        assert lost(cluster, job) < {"b", "c"}
        assert any("cannot reach" in reason for reason in reasons)
        return
    error = job.exception(90)
    assert type(error) is NoProgress
    pair = "|".join(rf"{cluster.network.hosts[host].address}:\d+" for host in "bc")
    assert re.search(rf"on tcp://({pair}) cannot reach rank \d on tcp://({pair})", str(error))
    until(lambda: not any(function.left_on(host) for host in "abc"), "the end of its ranks")
