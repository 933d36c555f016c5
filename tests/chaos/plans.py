"""The harness: one job under one plan, and what must hold afterwards."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from nbelastic import chaos
from tests.support.clusters import Crew, until
from tests.support.training import Workload, check

WORKERS = 4
KINDS = (*chaos.KINDS, "leave")
GONE = ("closed", "failed")
LATE = "ranks ended before they returned"
"""How a job fails, as promised, if a rank is lost after the loop, when others have returned."""
PATIENCE = 90.0  # seconds that a job may take longer than undisturbed before it counts as hanging
STALL_TIMEOUT = 3.0
FORGOTTEN = 1.5 * STALL_TIMEOUT + 30
"""Seconds after which Gloo's operations time out, and with them the last thread of a cut group.

Gloo forgets the thread that waits for a message if the connection breaks in its middle.
"""


def random_plan(crew: Crew, marks: Path, seed: int, *, epochs: int, every: float) -> None:
    """Run a job under a random plan, and check all that must hold at the end.

    It must not hang, its result must be right, or it fails as promised, and nothing is left behind.
    """
    commit_every = (1, 1, 3, 7)[seed % 4]
    work = Workload(marks, epochs=epochs, seconds=0.03, commit_every=commit_every, rate=0.01)
    # One that was retired at the end of the last job leaves with its next heartbeat.
    crew.wait_until_whole(WORKERS, lambda: refill(crew))
    before = footprint(crew)
    job = crew.fit(
        work,
        np=WORKERS,
        min_np=1,
        stall_timeout=STALL_TIMEOUT,
        heartbeat_timeout=5,
        elastic_timeout=120,
        blacklist_cooldown=(0.2, 1.0),
        block=False,
    )
    plan = chaos.inject(job, chaos.random(seed, every=every, kinds=KINDS))
    deadline = time.monotonic() + PATIENCE + 4 * epochs * 5 * work.seconds
    try:
        while not job.wait(0.3):
            refill(crew)
            assert time.monotonic() < deadline, f"it hangs: {job.status}"
        if LATE not in str(job.exception()):
            check(job.results(), work)
        _await_nothing_left(crew, before)
    finally:
        plan.stop()
        if job.cancel():
            job.wait(30)
        report = plan.report()
        print(f"seed {seed}:\n{report}", flush=True)
    assert len(report.injections) > len(report.skipped), "there was no plan"


def refill(crew: Crew) -> None:
    """Have new workers started for those that left for good."""

    async def correct() -> None:
        cluster = crew.cluster
        gone = [n for n, nanny in cluster.workers.items() if nanny.status.name in GONE]
        for name in gone:
            del cluster.workers[name]
        if gone:
            await cluster._correct_state()

    crew.cluster.sync(correct)


# -- what may be left behind ----------------------------------------------------------------------


def footprint(crew: Crew) -> dict[str, int]:
    """Return what there is in the kernel, on the scheduler and on the machine, by name."""
    processes = psutil.Process().children(recursive=True)
    found = Counter({f"kernel: {name}": count for name, count in _our_threads().items()})
    found["kernel: event handlers"] = len(crew.client._event_handlers)
    found["kernel: futures"] = len(crew.client.futures)
    found["shared memory"] = sum(not n.startswith("sem.") for n in os.listdir("/dev/shm"))
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found[process.status()] += process.status() in ("stopped", "zombie")
    # Ranks and their servers are named by their workers.
    ours = {process.pid for process in processes}
    for process in psutil.process_iter(["name"]):
        kind, _, worker = (process.info["name"] or "").rpartition(" ")
        if kind in ("server", "rank of"):
            gone = not psutil.pid_exists(int(worker))
            found[f"{kind} {'none' if gone else 'a worker'}"] += gone or int(worker) in ours
    on_workers = crew.client.run(_on_worker, on_error="ignore")
    for place, traces in {**on_workers, "": crew.client.run_on_scheduler(_on_scheduler)}.items():
        found.update({f"{place}: {name}": value for name, value in traces.items()})
    return found


def _on_scheduler(dask_scheduler: Any) -> dict[str, int]:
    plugin = dask_scheduler.plugins.get("nbelastic")
    taken = 0 if plugin is None else sum(bool(host.holder) for host in plugin.workers.values())
    jobs = 0 if plugin is None else len(plugin.jobs)
    return {"tasks": len(dask_scheduler.tasks), "jobs": jobs, "taken": taken}


def _on_worker(dask_worker: Any) -> dict[str, int]:
    agent = dask_worker.plugins.get("nbelastic")
    return {
        "ranks": 0 if agent is None else len(agent._ranks),
        "functions": 0 if agent is None else len(agent._payloads),
        "scratch": sum("nbelastic-" in name for name in os.listdir(dask_worker.local_directory)),
        **_our_threads(),
    }


def _our_threads() -> Counter[str]:
    names = [thread.name for thread in threading.enumerate()]
    return Counter(f"thread {name}" for name in names if name.startswith("nbelastic"))


def _await_nothing_left(crew: Crew, before: dict[str, int]) -> None:
    seen: dict[str, int] = {}

    def more() -> dict[str, int]:
        nonlocal seen
        refill(crew)
        seen = {k: v for k, v in footprint(crew).items() if v > before.get(k, 0)}
        return seen

    try:
        until(lambda: not more(), "nothing is left", FORGOTTEN + 10)
    except AssertionError:
        raise AssertionError(f"left behind: {seen}") from None
