"""Clusters for all tests: real worker processes, kept from test to test."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask
import hypothesis
import pytest
from distributed import Client, LocalCluster
from xdist.scheduler import LoadScopeScheduling

import tests.support.forking  # noqa: F401 -- workers start in a tenth of the time

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

    from tests.support.clusters import Crew

# Some seconds after a worker is lost, a LocalCluster looks whether its name is back, and if not
# closes its nanny for good. Where workers are killed again and again it looks in the wrong moment.
dask.config.set({"distributed.deploy.lost-worker-timeout": "1 hour"})

# Workers look for a metadata service here, and not on the machine that runs the tests.
os.environ["NBELASTIC_METADATA_URL"] = "http://127.0.0.1:9"

# A suite in the background of a script inherits that Ctrl-C is ignored, and hands it on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test asserts a time.
# Its phase "explain" traces, and CPython 3.11 may run a traced function's first instruction for
# ever: it looks there whether a signal or another thread waits, and begins anew if one did.
PHASES = [phase for phase in hypothesis.Phase if phase != hypothesis.Phase.explain]
# Examples are the same in each run of a commit, and other ones each night.
hypothesis.settings.register_profile(
    "nbelastic", deadline=None, phases=PHASES, derandomize="RANDOM_EXAMPLES" not in os.environ
)
hypothesis.settings.load_profile("nbelastic")


class ByFile(LoadScopeScheduling):
    """Tests of one file, and all with a browser, run in one process, one after the other."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return "tests/browser" if file.startswith("tests/browser/") else file

    def _reschedule(self, node: WorkerController) -> None:
        """Give a process tests until two wait, because it runs one only if it knows the next.

        xdist gives one file at a time. A process that replaces a crashed one, and gets a file with
        a single test, then waits without end.
        """
        while (
            not node.shutting_down
            and self.workqueue
            and self._pending_of(self.assigned_work[node]) <= 2
        ):
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()


LONGEST = (
    "notebooks/",
    "tests/browser/",
    "tests/hosts/test_partitions.py",
    "tests/chaos/test_chaos.py",
    "tests/benchmarks/test_benchmarks.py",
    "tests/jobs/",
    "tests/cli/test_ssh.py",
    "tests/cli/test_terminal.py",
)
"""Minutes each, one test after the other: whoever begins them last is waited for by all."""


SLOW = (
    "tests/benchmarks/",
    "tests/browser/",
    "tests/campaign/",
    "tests/chaos/test_chaos.py",
    "tests/cluster/test_rank_main.py",
    "tests/cluster/test_rank_process.py",
    "tests/cluster/test_reachability.py",
    "tests/cluster/test_rank_template.py",
    "tests/collectives/test_processes.py",
    "tests/hosts/",
    "tests/jobs/",
    "tests/keras/",
    "tests/managers/",
    "tests/membership/test_conformance.py::test_N14",
    "tests/membership/test_invariants.py",
    "tests/simulation/test_mutations.py",
    "tests/simulation/test_same_result.py",
    "tests/simulation/test_simulation.py",
    "tests/torch/test_restore.py::test_N7",
    "tests/trainers/",
)
"""Seconds each. With tests of real clusters they are left out of ``make test-fast``."""

CLUSTERS = {"crew", "client", "kernel"}  # fixtures that start processes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest; then files with many tests, of which most are short."""
    for item in items:
        is_long = item.nodeid.startswith(("notebooks/", *SLOW)) or item.get_closest_marker(
            "nightly"
        )
        if is_long or CLUSTERS & set(getattr(item, "fixturenames", ())):
            item.add_marker("slow")
    files = Counter(str(item.path) for item in items)

    def place(item: pytest.Item) -> tuple[int, int]:
        found = [n for n, start in enumerate(LONGEST) if item.nodeid.startswith(start)]
        return min(found, default=len(LONGEST)), -files[str(item.path)]

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Keep what has been imported out of searches for garbage, which take a second otherwise.

    Torch computes on one thread: several wait for each other where the machine has much to do.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()


class NotebookWorkers:
    """Has the workers of clusters in notebooks forked, too; their kernels inherit how."""

    def __init__(self) -> None:
        self._patch = pytest.MonkeyPatch()

    @pytest.hookimpl(tryfirst=True)  # before a notebook's first cell starts its kernel
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._patch.undo()
        if item.nodeid.startswith("notebooks/"):
            self._patch.setenv("DASK_DISTRIBUTED__NANNY__PRELOAD", "['tests.support.forking']")
            root = str(Path(__file__).parents[1])
            self._patch.setenv("PYTHONPATH", root, prepend=os.pathsep)


def pytest_configure(config: pytest.Config) -> None:
    """Look at notebooks as well, which lie outside of this folder."""
    config.pluginmanager.register(NotebookWorkers())


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile:
    """Have ``pytest -n`` share out the tests by file, in their order."""
    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.fixture(autouse=True)
def _no_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a test fail that starts a process and is not marked as slow.

    Other threads may: the cluster of this session replaces workers that an earlier test has killed.
    """
    if request.node.get_closest_marker("slow"):
        return

    def only_elsewhere(start: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                pytest.fail("it starts a process: mark it as slow")
            return start(*args, **kwargs)

        return checked

    monkeypatch.setattr(subprocess.Popen, "__init__", only_elsewhere(subprocess.Popen.__init__))
    monkeypatch.setattr(BaseProcess, "start", only_elsewhere(BaseProcess.start))
    monkeypatch.setattr(os, "fork", only_elsewhere(os.fork))


@pytest.fixture(scope="session")
def _four_workers() -> Iterator[Crew]:

    from tests.support.clusters import Crew

    with (
        LocalCluster(n_workers=4, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        crew = Crew(cluster, client)
        crew.fit(int, np=4)  # torch is imported before tests with short limits
        yield crew


@pytest.fixture
def crew(_four_workers: Crew) -> Iterator[Crew]:
    """Four workers of one thread each; whatever a test kills is back before the next.

    Jobs that a failed test leaves behind, which can do without their kernel, end with it.
    """
    _four_workers.wait_until_whole(4)
    before = set(threading.enumerate())  # an abandoned Gloo group of another test lasts a while
    yield _four_workers
    _four_workers.end_jobs()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        new = set(threading.enumerate()) - before
        left = [t.name for t in new if t.name.startswith("nbelastic")]
        if not left:
            return
        time.sleep(0.02)
    pytest.fail(f"threads are left: {left}")
