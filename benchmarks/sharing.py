"""Time in which a job trains that comes to a cluster whose slots another job has.

A job without a maximum trains on all workers. Another job is submitted: the first one has to give
slots back before the newcomer's function can begin. The figures are the times from the call of
`fit` to the first line of the newcomer's function, and to its first commit, which includes its own
set-up. The limit is the same newcomer on the same cluster without the other job, in turns. The
first job on the cluster pays for imports, and is shown apart. Batches that the job that gives way
did again are counted.

Then ten jobs without a maximum come one after the other, on two workers for each. Once no size has
changed for some seconds, the ranks that train are counted for some more: how fair the jobs share
(Jain's index), and the part of the workers that train. Their steps mostly sleep.

Also measured, without a cluster: the time of a decision on 100 jobs and 1,000 slots, and the same
two figures for ten jobs of different limits. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.command import options_of, run
from benchmarks.figures import Target, quartiles, table
from benchmarks.side_by_side import Failed

if TYPE_CHECKING:
    from distributed import Client

    import nbelastic

FUNCTION_MS = 500.0
WAIT = 120.0
SLOTS = 64
JOBS = 10
REST = 5.0
"""Seconds without a change of size after which jobs have settled; they are counted as long."""
RULES = {"settle": "0.5 s", "protect": "2 s"}
NAMES = {"full": "full cluster", "idle": "idle cluster"}


def main() -> int:
    parser = options_of("sharing", __doc__, rounds=10, budget=60.0)
    options = parser.parse_args()
    options.jobs, options.rest = JOBS, REST
    if options.quick:
        options.rounds, options.jobs, options.rest = 1, 2, 0.5
    return run(options.ranks, options.json, functools.partial(measure, options), show, aims)


def measure(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Return the milliseconds of each newcomer, and the figures of decisions."""
    import dask
    from distributed import Client, LocalCluster

    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(n_workers=ranks, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        first = newcomer(client, Path(folder) / "first")
        rounds = [one_round(client, Path(folder), each, ranks) for each in range(options.rounds)]
        found = {"first": first, "newcomers": rounds, "decisions": decisions()}
        if ranks == options.ranks[-1]:
            slots = ranks if options.quick else 2 * options.jobs
            cluster.scale(slots)
            client.wait_for_workers(slots, timeout=WAIT)
            with dask.config.set({"nbelastic.sharing": RULES}):
                found["jobs"] = together(client, Path(folder), options.jobs, slots, options.rest)
    return found


def one_round(client: Client, folder: Path, number: int, ranks: int) -> dict[str, Any]:
    """Submit a job to the idle cluster, and one to the full one."""
    import nbelastic

    found: dict[str, Any] = {"idle": newcomer(client, folder / f"idle{number}")}
    goal = folder / f"wide{number}"
    wide = nbelastic.fit(train, cluster=client, args=(str(goal),), min_np=1, block=False)
    _until(lambda: wide.status.state == "running" and wide.status.size == ranks, "all slots")
    _until(lambda: wide.status.commits > 20, "commits")
    found["full"] = newcomer(client, folder / f"full{number}")
    goal.write_text(str(wide.status.commits + 50))
    wide.result(WAIT)
    found["redone"] = redone(wide)
    return found


def redone(job: nbelastic.Job) -> int:
    """Return how many batches a job did again; a loss counts as one at least."""
    again = sum(event.figures.get("batches", 0) for event in job.history if event.kind == "phases")
    return int(again) + sum(event.kind == "lost" for event in job.history)


def newcomer(client: Client, goal: Path) -> dict[str, float]:
    """Return the milliseconds from `fit` to the first line of the function, and to a commit."""
    import nbelastic

    begin = time.monotonic()
    goal.write_text("5")
    job = nbelastic.fit(train, cluster=client, args=(str(goal),), np=1, block=False)
    times = job.result(WAIT)
    return {"function": 1e3 * (times["begun"] - begin), "commit": 1e3 * (times["step"] - begin)}


def together(
    client: Client, folder: Path, number: int, slots: int, rest: float
) -> dict[str, float]:
    """Return how many jobs share how many slots, how fairly, and how many of the slots train."""
    import nbelastic

    goals = [folder / f"together{each}" for each in range(number)]
    jobs = []
    for goal in goals:
        jobs.append(
            nbelastic.fit(train, cluster=client, args=(str(goal), 0.2), min_np=1, block=False)
        )
        _until(lambda: jobs[-1].status.state == "running", "a newcomer trains")
    sizes, since = _sizes(jobs), time.monotonic()
    limit = since + WAIT
    while time.monotonic() < since + rest:
        if time.monotonic() > limit:
            raise Failed(f"sizes of {number} jobs still change after {WAIT:g} s: {sizes}")
        if _sizes(jobs) != sizes:
            sizes, since = _sizes(jobs), time.monotonic()
        time.sleep(0.05)
    counts = [0.0] * number
    samples = 0
    while time.monotonic() < since + 2 * rest:
        counts = [count + size for count, size in zip(counts, _sizes(jobs), strict=True)]
        samples += 1
        time.sleep(0.05)
    for goal, job in zip(goals, jobs, strict=True):  # some steps from now, read as a whole
        goal.with_suffix(".new").write_text(str(job.status.commits + 20))
        goal.with_suffix(".new").rename(goal)
    again = 0
    for job in jobs:
        job.result(WAIT)
        again += redone(job)
    used = sum(counts) / samples / slots
    return {"number": number, "slots": slots, "jain": jain(counts), "used": used, "redone": again}


def _sizes(jobs: list[nbelastic.Job]) -> list[int]:
    """Return how many ranks of each job train."""
    found = [job.status for job in jobs]
    return [status.size if status.state == "running" else 0 for status in found]


def jain(given: list[float]) -> float:
    """Return Jain's index of what each has been given: 1 if all have the same."""
    return sum(given) ** 2 / (len(given) * sum(each**2 for each in given))


def train(goal: str, pause: float = 0.01) -> dict[str, float]:
    """Commit after each step until the goal is reached."""
    begun = time.monotonic()

    from nbelastic.elastic import ObjectState
    from nbelastic.elastic import run as elastic_run

    def over(step: int) -> bool:
        return Path(goal).exists() and step >= int(Path(goal).read_text() or "0")

    @elastic_run
    def loop(state: Any) -> None:
        while not over(state.step):
            time.sleep(pause)
            state.step += 1
            state.commit()
            state.first = state.first or time.monotonic()

    state: Any = ObjectState(step=0, first=0.0)
    loop(state)
    return {"begun": begun, "step": state.first}


def decisions() -> dict[str, float]:
    """Return the milliseconds of a large decision, and how ten jobs share."""
    from nbelastic.sharing import SlotGroup, Want, shares

    many = [
        Want(f"job{n}", since=n, least=1 + n % 4, priority=n % 3, weight=1.0 + n % 2, running=True)
        for n in range(100)
    ]
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        shares(many, [SlotGroup(1000)], 0.0, 300.0)
        times.append(1e3 * (time.perf_counter() - begin))
    ten = [Want(f"job{n}", since=n, least=1 + n % 3) for n in range(10)]
    given = list(shares(ten, [SlotGroup(SLOTS)], 0.0).values())
    even = jain([float(each) for each in given])
    return {"ms": quartiles(times).median, "jain": even, "used": sum(given) / SLOTS}


def _until(condition: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + WAIT
    while not condition():
        if time.monotonic() > limit:
            raise Failed(f"waited {WAIT:g} s in vain: {what}")
        time.sleep(0.005)


def show(ranks: int, world: dict[str, Any]) -> None:
    print(f"\n{ranks} workers, milliseconds from fit: median (quartiles), worst")
    rows = []
    for kind, name in NAMES.items():
        found = [each[kind] for each in world["newcomers"]]
        begun, committed = ([each[what] for each in found] for what in ("function", "commit"))
        rows.append(
            [
                name,
                quartiles(begun).show(0),
                f"{max(begun):.0f}",
                quartiles(committed).show(0),
                f"{max(committed):.0f}",
            ]
        )
    print(table(["", "function begins", "worst", "first commit", "worst"], rows))
    print(f"the first job on the cluster, with its imports: {world['first']['commit']:.0f} ms")
    print(f"batches done again: {sum(each['redone'] for each in world['newcomers'])}")
    figures = world["decisions"]
    print(
        f"a decision on 100 jobs and 1,000 slots: {figures['ms']:.2f} ms\n"
        f"ten jobs on {SLOTS} slots, as decided: Jain's index {figures['jain']:.3f}, "
        f"{figures['used']:.0%} of the slots used",
        flush=True,
    )
    if "jobs" in world:
        real = world["jobs"]
        print(
            f"{real['number']} jobs on {real['slots']} workers, as they train: Jain's index "
            f"{real['jain']:.3f}, {real['used']:.1%} of the workers train, "
            f"{real['redone']} batches done again",
            flush=True,
        )


def aims(ranks: int, world: dict[str, Any]) -> list[Target]:
    """Return the targets of this project."""
    begun = quartiles([each["full"]["function"] for each in world["newcomers"]]).median
    again = sum(each["redone"] for each in world["newcomers"])
    figures = world["decisions"]
    targets = [
        Target(f"{ranks} workers: from fit to the function, ms", begun, FUNCTION_MS, False),
        Target(f"{ranks} workers: batches done again", again, 0.0, False),
        Target("a decision on 100 jobs and 1,000 slots, ms", figures["ms"], 1.0, False),
        Target("Jain's index of ten jobs", figures["jain"], 0.98, True),
        Target("slots used", figures["used"], 0.97, True),
    ]
    if "jobs" in world:
        real = world["jobs"]
        name = f"{real['number']} jobs on {real['slots']} workers"
        targets += [
            Target(f"{name}: Jain's index", real["jain"], 0.98, True),
            Target(f"{name}: workers that train", real["used"], 0.97, True),
            Target(f"{name}: batches done again", real["redone"], 0.0, False),
        ]
    return targets


if __name__ == "__main__":
    sys.exit(main())
