"""The harness: one job under one plan, and what must hold afterwards."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from nbelastic import chaos
from tests.support.clusters import until
from tests.support.training import Workload, check

if TYPE_CHECKING:
    from pathlib import Path

    from nbelastic import Job
    from tests.support.clusters import Crew

WORKERS = 4
KINDS = (*chaos.KINDS, "leave")
GONE = ("closed", "failed")
LATE = "ranks ended before they returned"
"""How a job fails, as promised, if a rank is lost after the loop, when others have returned."""
PATIENCE = 90.0
"""Seconds that a job may take longer than undisturbed before it counts as hanging."""
STALL_TIMEOUT = 3.0
FORGOTTEN = 1.5 * STALL_TIMEOUT + 30
"""Seconds after which Gloo's operations time out, and with them the last thread of a cut group.

Gloo forgets the thread that waits for a message if the connection breaks in its middle.
"""


@dataclass(frozen=True)
class Run:
    """A job that has been through a plan.

    Attributes
    ----------
    seed : int
        Of the plan.
    report : Report
        What it has cost.
    problem : str
        What went wrong; empty if nothing.
    trace : str
        The job's history, for people.
    """

    seed: int
    report: chaos.Report
    problem: str
    trace: str


def random_plan(crew: Crew, marks: Path, seed: int, *, epochs: int, every: float) -> Run:
    """Run a job under a random plan, and check all that must hold at the end."""
    commit_every = (1, 1, 3, 7)[seed % 4]
    work = Workload(marks, epochs=epochs, seconds=0.03, commit_every=commit_every, rate=0.01)
    await_workers(crew)
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
    problem = ""
    try:
        _await_end(crew, job, patience=PATIENCE + 4 * epochs * 5 * work.seconds)
        if LATE not in str(job.exception()):
            check(job.results(), work)
            check_curve(job.results()[0]["losses"])
        _await_nothing_left(crew, before)
    except Exception as error:  # a hang, a wrong result, something left behind, a job that failed
        problem = f"{type(error).__name__}: {error}"
    finally:
        plan.stop()
        if job.cancel():
            job.wait(30)
    report = plan.report()
    if not problem and len(report.injections) == len(report.skipped):
        problem = "there was no plan"
    return Run(seed, report, problem, trace(job))


def _await_end(crew: Crew, job: Job, patience: float) -> None:
    """Wait for the end of a job, while somebody brings new workers for those that left."""
    deadline = time.monotonic() + patience
    while not job.wait(0.3):
        refill(crew)
        if time.monotonic() > deadline:
            raise AssertionError(f"it hangs: {job.status}")


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


def await_workers(crew: Crew) -> None:
    """Wait until all workers are there and idle; one may have left after its job had ended."""

    def whole() -> bool:
        refill(crew)
        workers = crew.client.scheduler_info(n_workers=-1)["workers"].values()
        return len(workers) == WORKERS

    until(whole, f"{WORKERS} workers")
    crew.wait_until_whole(WORKERS)


def check_curve(losses: list[float]) -> None:
    """Assert that the loss goes on where it was: no state was lost, mixed up or rolled too far.

    An undisturbed run of one rank, whose batches are the smallest, rises by up to 15 % of the first
    mean on its way down; who starts anew is back at all of it.
    """
    width = 20
    means = [sum(losses[i : i + width]) / width for i in range(0, len(losses) - width, width)]
    best = means[0]
    for number, mean in enumerate(means):
        told = [round(value, 3) for value in means[: number + 1]]
        assert mean < 3 * best + 0.15 * means[0], f"the loss jumps at step {width * number}: {told}"
        best = min(best, mean)
    assert means[-1] < 0.3 * means[0], f"it has learned nothing: {means}"


# -- what may be left behind ----------------------------------------------------------------------


def footprint(crew: Crew) -> dict[str, int]:
    """Return what there is in the kernel, on the scheduler and on the machine, by name."""
    found = {
        **{f"kernel: {name}": count for name, count in _our_threads().items()},
        "kernel: event handlers": len(crew.client._event_handlers),
        "kernel: futures": len(crew.client.futures),
        "shared memory": sum(not name.startswith("sem.mp-") for name in os.listdir("/dev/shm")),
        "stopped processes": _count(psutil.STATUS_STOPPED),
        "zombies": _count(psutil.STATUS_ZOMBIE),
        **_of_rank_servers(),
    }
    for name, value in crew.client.run_on_scheduler(_on_scheduler).items():
        found[f"scheduler: {name}"] = value
    for worker, traces in crew.client.run(_on_worker, on_error="ignore").items():
        for name, value in traces.items():
            found[f"{worker}: {name}"] = value
    return found


def _on_scheduler(dask_scheduler: Any) -> dict[str, int]:
    plugin = dask_scheduler.plugins.get("nbelastic")
    if plugin is None:
        return {}
    return {
        "tasks": len(dask_scheduler.tasks),
        "jobs": len(plugin.jobs),
        "taken": sum(1 for host in plugin._workers.values() if host.holder),
    }


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


def _count(status: str) -> int:
    count = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            count += process.status() == status
    return count


def _of_rank_servers() -> dict[str, int]:
    """Count the processes of ranks and their servers, which are named by their workers."""
    ours = {process.pid for process in psutil.Process().children(recursive=True)}
    found: Counter[str] = Counter()
    for process in psutil.process_iter(["name"]):
        kind, _, worker = (process.info["name"] or "").rpartition(" ")
        if kind in ("server", "rank of"):
            gone = not psutil.pid_exists(int(worker))
            found[f"{kind} {'none' if gone else 'a worker'}"] += gone or int(worker) in ours
    return found


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


def trace(job: Job) -> str:
    """Return the history of a job, for people."""
    return "\n".join(
        f"{event.time:.3f} {event.kind} {event.rank} {event.worker} {event.detail}"
        for event in job.history
    )


def merged(reports: list[chaos.Report]) -> chaos.Report:
    """Return one report on all plans."""
    return chaos.Report(
        injections=tuple(i for report in reports for i in report.injections if not i.problem),
        seconds=sum(report.seconds for report in reports),
        steps_redone=sum(report.steps_redone for report in reports),
        samples_redone=sum(report.samples_redone for report in reports),
        restarts=sum(report.restarts for report in reports),
        pace=None,
        undisturbed=None,
    )
