"""Cost of membership as a job grows: the machine, the driver, and forming a generation.

The membership machine receives the messages of many ranks, one at a time: workers are found, ranks
are ready, connect, and send heartbeats with commits, and one percent of them die. The driver runs
in its thread with 1,000 simulated ranks that report each second. Processes of this machine then
form generations, 2 to 64 of them. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Iterable
from typing import Any

from benchmarks.command import options_of, run
from benchmarks.figures import Target, quartiles, table
from benchmarks.forming import formed_in
from benchmarks.large_job import SimulatedJobClient, slots_of
from nbelastic.driver.job import Job
from nbelastic.driver.options import Options
from nbelastic.driver.thread import Driver
from nbelastic.membership import Machine
from nbelastic.messages import (
    Abort,
    Beat,
    Beats,
    Event,
    Limits,
    Plan,
    Publish,
    RankFormed,
    RankReady,
    SlotGone,
    SlotsFound,
    StartRank,
    encode,
)

PLAN_S = 1.0
PER_SECOND = 100_000
SHARE = 0.05
DRIVER_RANKS = 1000
LARGEST = 10_000
COMMITS = 20


class Timed:
    """A machine, the seconds that its events have taken by kind, and the effects it has sent."""

    def __init__(self, ranks: int) -> None:
        self.machine = Machine(Limits(np=ranks, min_np=ranks // 2))
        self.seconds: dict[str, float] = {}
        self.events: dict[str, int] = {}
        self.messages = 0
        self.plan: Plan | None = None
        self._now = 0.0

    def tell(self, what: str, events: Iterable[Event]) -> float:
        """Handle events that are 0.01 ms apart; return how many seconds it took."""
        taken = 0.0
        for event in events:
            self._now += 1e-5
            begin = time.perf_counter()
            effects = self.machine.handle(event, self._now)
            taken += time.perf_counter() - begin
            self.events[what] = self.events.get(what, 0) + 1
            for effect in effects:
                if isinstance(effect, Publish):
                    self.plan = effect.plan
                    self.messages += len(effect.plan.members)
                elif isinstance(effect, StartRank):
                    self.messages += 1
                elif isinstance(effect, Abort):
                    self.messages += len(effect.starts)
        self.seconds[what] = self.seconds.get(what, 0.0) + taken
        return taken


def machine(ranks: int) -> dict[str, Any]:
    """Return how long a machine takes for a plan of `ranks` ranks, commits and a loss."""
    timed = Timed(ranks)
    slots = slots_of(ranks)
    starts = range(ranks)
    to_plan = timed.tell("found", [SlotsFound((slot,)) for slot in slots])
    to_plan += timed.tell("ready", [_ready(start, 0, -1) for start in starts])
    assert timed.plan is not None
    sent = timed.messages
    plan_bytes = len(encode(timed.plan))
    timed.tell("formed", [RankFormed(start, 1, "gloo") for start in starts])
    for commit in range(1, COMMITS + 1):
        beats = [Beats((Beat(start, 1, commit << 32, False, commit),)) for start in starts]
        timed.tell("beat", beats)
    lost = ranks // 100
    timed.tell("gone", [SlotGone(slot.id) for slot in slots[:lost]])
    again = timed.tell("ready again", [_ready(start, 1, COMMITS) for start in starts[lost:]])
    assert timed.plan.generation == 2
    assert len(timed.plan.members) == ranks - lost
    return {
        "to plan": to_plan,
        "to plan again": again,
        "events per second": sum(timed.events.values()) / sum(timed.seconds.values()),
        "µs": {what: 1e6 * timed.seconds[what] / timed.events[what] for what in timed.seconds},
        "plan bytes": plan_bytes,
        "messages per rank": sent / ranks,
    }


def _ready(start: int, left: int, version: float) -> RankReady:
    return RankReady(start, left, version, 1, (f"10.0.0.{start % 250}", 4000 + start), left > 0)


def driver(ranks: int, seconds: float) -> float:
    """Return the share of a core that a driver takes if `ranks` ranks report every second."""
    job_client = SimulatedJobClient()
    shell = Driver("large", Options(np=ranks, min_np=ranks // 2), lambda: None)
    job_client.driver = shell
    shell.start(job_client)  # type: ignore[arg-type]
    job_client.say(SlotsFound(slots_of(ranks)))
    while shell.view().state != "running":
        time.sleep(0.05)
    sending = 0.0
    before, began = time.process_time(), time.monotonic()
    for beat in range(1, int(seconds) + 1):
        begin = time.thread_time()
        job_client.beat(beat, rows=1)
        sending += time.thread_time() - begin
        time.sleep(max(0.0, began + beat - time.monotonic()))
    spent = time.process_time() - before - sending
    elapsed = time.monotonic() - began
    size = shell.view().size
    Job(shell).cancel()
    assert size == ranks
    return spent / elapsed


def main() -> int:
    parser = options_of("control_plane", __doc__, rounds=5, budget=15.0)
    parser.set_defaults(ranks=[DRIVER_RANKS])
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.budget = 1, 3.0
    return run(options.ranks, options.json, functools.partial(measure, options), show, aims)


def measure(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    sizes = (100, 1000) if options.quick else (100, 1000, LARGEST)
    machines = {size: [machine(size) for _ in range(options.rounds)] for size in sizes}
    crews = (2, 4) if options.quick else (2, 4, 8, 16, 32, 64)
    return {
        "machine": machines,
        "driver": {ranks: driver(ranks, options.budget)},
        "forming": {
            backend: {size: formed_in(backend, size, 2 * options.rounds) for size in crews}
            for backend in ("gloo", "shm")
        },
    }


def show(_: int, world: dict[str, Any]) -> None:
    kinds = list(next(iter(world["machine"].values()))[0]["µs"])
    print("\nThe machine: seconds, microseconds per event, median")
    rows = []
    for size, runs in world["machine"].items():
        cells = [
            f"{size:,}",
            *(f"{_median(runs, key):.3f}" for key in ("to plan", "to plan again")),
        ]
        cells += [f"{statistics.median(each['µs'][kind] for each in runs):.1f}" for kind in kinds]
        cells += [f"{_median(runs, 'events per second'):,.0f}"]
        cells += [f"{runs[0]['plan bytes']:,}", f"{runs[0]['messages per rank']:g}"]
        rows.append(cells)
    heads = ["ranks", "to plan", "again", *kinds, "events/s", "bytes of plan", "sent to each"]
    print(table(heads, rows))
    for ranks, share in world["driver"].items():
        print(f"\nThe driver, {ranks:,} ranks that report each second: {share:.2%} of a core")
    print("\nForming, milliseconds until the last rank is connected: median (quartiles)")
    sizes = list(world["forming"]["gloo"])
    rows = [
        [backend, *(quartiles(times[size]).show(1) for size in sizes)]
        for backend, times in world["forming"].items()
    ]
    print(table(["", *(f"{size} ranks" for size in sizes)], rows), flush=True)


def _median(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(each[key] for each in runs)


def aims(_: int, world: dict[str, Any]) -> list[Target]:
    largest = max(world["machine"])
    runs = world["machine"][largest]
    (ranks, share), *_rest = world["driver"].items()
    rate = _median(runs, "events per second")
    return [
        Target(f"{largest:,} ranks, seconds to a plan", _median(runs, "to plan"), PLAN_S, False),
        Target(f"{largest:,} ranks, events per second", rate, PER_SECOND, True),
        Target(f"{ranks:,} ranks, the driver's share of a core", share, SHARE, False),
    ]


if __name__ == "__main__":
    sys.exit(main())
