"""Time that training stands still when a rank joins.

Ranks train with Adam. A worker is started, and removed again when its rank has joined, repeatedly.
The figure is the longest time from one step of an old rank to the next, from the start of the
worker to some steps after the join, less an ordinary step of as many ranks as train then (with
fewer processors than ranks, this is longer than a step before). Its limit depends on the time to
copy the state once, measured in the same run.

The moment of a step is when its gradients have been summed: all ranks are there at once, so a
delay of one rank shows on all, once. A rank's own end of a step comes after its optimizer's step;
if ranks share processors, its time depends on which rank gets a processor first. Also printed: the
longest gap by those own ends, the longest before the join while the new rank starts, the one at
the join, and the longest after it.

A new rank that starts uses a processor for seconds, although no rank waits for it. If no processor
is free, an endless loop in its place, for as long, shows what this costs. The start may cost at
most 50 ms more, and the longest gap counts from the join on. Prints milliseconds. Exits with 1 if
a target is missed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

from benchmarks.command import options_of, run
from benchmarks.figures import Target, quartiles, table
from benchmarks.recovery_peers import Ours
from benchmarks.timeline import STEPS, Moment, Timeline

MODELS = {"mlp-1m": "mlp-1m-adam", "mlp-25m": "mlp-25m-adam"}
FIXED_MS = 50.0
COPIES = 2.0
"""Number of copies of the state whose time is allowed."""
MARK = "met"


def main() -> int:
    parser = options_of("join", __doc__, rounds=8, budget=60.0)
    parser.set_defaults(ranks=[1, 2])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    return run(options.ranks, options.json, functools.partial(measure, options), show, aims)


def measure(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Return, by model, the milliseconds of each join."""
    worlds: dict[str, Any] = {}
    for name in options.models:
        model = MODELS[name]
        rows: list[dict[str, float]] = []
        with tempfile.TemporaryDirectory() as folder, Ours(ranks, model, folder) as crew:
            timeline = Timeline(folder, crew.alive)
            for _ in range(options.rounds):
                rows.append(one_join(crew, timeline, ranks))
        worlds[name] = {"joins": rows, "state": state_of(model)}
        print(f"{name}: {len(rows)} joins", flush=True)
    return worlds


def one_join(crew: Ours, timeline: Timeline, ranks: int) -> dict[str, float]:
    alone = timeline.wait_for_steps(ranks, MARK)
    old = timeline.trained
    begin = time.monotonic()
    crew.cluster.scale(ranks + 1)
    ordinary = timeline.wait_for_steps(ranks + 1, MARK)
    marks = [_gaps(timeline.of(pid), MARK, begin) for pid in old]
    ends = [_gaps(timeline.of(pid), "step", begin) for pid in old]
    crew.cluster.scale(ranks)
    gaps = list(itertools.chain(*marks))
    starts = [gap for gap, before, after in gaps if before == after == ranks]
    joins = [gap for gap, before, after in gaps if before < after]
    later = [gap for each in marks for gap, _, _ in each[-STEPS + 1 :]]
    return {
        "step": 1e3 * ordinary,
        "gap": 1e3 * (max(gap for gap, _, _ in gaps) - ordinary),
        "start": 1e3 * (max(starts) - alone),
        "join": 1e3 * (max(joins) - ordinary),
        "joined": 1e3 * (max(gap for gap, _, after in gaps if after > ranks) - ordinary),
        "later": 1e3 * (max(later) - ordinary),
        "own end": 1e3 * (max(gap for gap, _, _ in itertools.chain(*ends)) - ordinary),
        "busy": 1e3 * (with_busy_process(timeline, ranks, sum(starts) / len(old)) - alone),
    }


def with_busy_process(timeline: Timeline, ranks: int, seconds: float) -> float:
    """Return the longest time between two steps while an endless loop runs for so long."""
    timeline.wait_for_steps(ranks, MARK)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        begin = time.monotonic()
        try:
            time.sleep(seconds)
        finally:
            busy.kill()
    gaps = (_gaps(timeline.of(pid), MARK, begin) for pid in timeline.trained)
    return max(gap for gap, _, _ in itertools.chain(*gaps))


def _gaps(moments: list[Moment], mark: str, begin: float) -> list[tuple[float, int, int]]:
    """Return the seconds between marks, and the number of ranks at each of the two."""
    steps = [moment for moment in moments if moment.what == mark and moment.time > begin]
    return [(b.time - a.time, a.size, b.size) for a, b in itertools.pairwise(steps)]


def state_of(model: str) -> dict[str, float]:
    """Return the size of a state, and the milliseconds of a copy."""
    from benchmarks.training_models import TASKS

    count = 3 * sum(parameter.numel() for parameter in TASKS[model].model().parameters())
    torch.set_num_threads(1)
    source, target = torch.ones(count), torch.zeros(count)
    times = []
    for _ in range(11):
        begin = time.perf_counter()
        target.copy_(source)
        times.append(1e3 * (time.perf_counter() - begin))
    return {"bytes": float(4 * count), "copy": quartiles(times).median}


def show(ranks: int, worlds: dict[str, Any]) -> None:
    print(f"\n{ranks} ranks and one more, milliseconds: median (quartiles), worst")
    head = [
        "",
        "joins",
        "longest gap",
        "worst",
        "before",
        "with a busy process",
        "at the join",
        "later",
        "by own ends",
        "a step",
        "copying the state",
    ]
    rows = []
    for name, world in worlds.items():
        gaps, starts, busy, joins, later, ends, steps = (
            [row[what] for row in world["joins"]]
            for what in ("gap", "start", "busy", "join", "later", "own end", "step")
        )
        rows.append(
            [
                f"{name}, {world['state']['bytes'] / 1e6:.0f} MB",
                str(len(gaps)),
                quartiles(gaps).show(1),
                f"{max(gaps):.0f}",
                quartiles(starts).show(1),
                quartiles(busy).show(1),
                quartiles(joins).show(1),
                quartiles(later).show(1),
                quartiles(ends).show(1),
                f"{quartiles(steps).median:.1f}",
                f"{world['state']['copy']:.1f}",
            ]
        )
    print(table(head, rows), flush=True)


def aims(ranks: int, worlds: dict[str, Any]) -> list[Target]:
    """Return the targets of this project."""
    crowded = ranks >= len(os.sched_getaffinity(0))
    counts, words = ("joined", " from the join on") if crowded else ("gap", "")
    targets = []
    for name, world in worlds.items():
        rows = world["joins"]
        gap = quartiles([row[counts] for row in rows]).median
        most = FIXED_MS + COPIES * world["state"]["copy"]
        targets.append(Target(f"{ranks} ranks, {name}: longest gap{words}, ms", gap, most, False))
        start = quartiles([row["start"] for row in rows]).median
        most = FIXED_MS + quartiles([row["busy"] for row in rows]).median
        targets.append(Target(f"{ranks} ranks, {name}: before, ms", start, most, False))
    return targets


if __name__ == "__main__":
    sys.exit(main())
