"""Time that training stands still when a rank is killed.

Four ranks train. The process of one is killed with SIGKILL, and is back before the next kill. For
nbelastic, its worker is also killed, and three times are measured: the time that is not the ranks'
own computing (from the kill, or from the end of what a rank was computing, until it continues with
the others), the time until all four train again, and the time to the next finished step, less an
ordinary step. The latter is also measured for torchrun, which starts all ranks again from a
checkpoint, and for torchft with timeouts of a second, in turns. Prints milliseconds. Exits with 1
if a target is missed. With ``--trainers``, jobs that train by torch's DDP, accelerate, Lightning
and Transformers are measured as well.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import math
import sys
import tempfile
from typing import Any

from benchmarks.command import options_of, run
from benchmarks.figures import Target, quartiles, table
from benchmarks.recovery_peers import (
    Ours,
    OursAccelerate,
    OursDDP,
    OursLightning,
    OursTransformers,
    OursWorker,
    Torchft,
    Torchrun,
)
from benchmarks.timeline import Timeline, outage, until_next_step, until_whole

OVERHEAD_MS, WORST_MS, STEP_MS = 60.0, 250.0, 100.0
FASTER = {"torchrun": 50.0, "torchft": 8.0}
WHOLE_S = 0.5
PEERS = {
    "ours": Ours,
    "ours, worker": OursWorker,
    "ours-ddp": OursDDP,
    "ours-accelerate": OursAccelerate,
    "ours-lightning": OursLightning,
    "ours-transformers": OursTransformers,
    "torchft": Torchft,
    "torchrun": Torchrun,
}
OURS = ("ours", "ours, worker")
TRAINERS = {
    "ours-ddp": 100.0,
    "ours-accelerate": 200.0,
    "ours-lightning": 200.0,
    "ours-transformers": 200.0,
}
"""Candidates of ``--trainers``, and most milliseconds to the next step."""
SHARE = {"torchft": 0.4, "torchrun": 0.2, **dict.fromkeys((*OURS, *TRAINERS), 1.0)}
"""Number of kills of each peer. Slow peers vary less and take longer, so they have fewer."""


def main() -> int:
    parser = options_of("recovery", __doc__, rounds=4, budget=60.0)
    parser.set_defaults(ranks=[4])
    parser.add_argument("--kills", type=int, default=20, help="for each model (20)")
    parser.add_argument("--models", nargs="+", default=["mlp-1m", "mlp-25m"])
    parser.add_argument("--alone", action="store_true", help="without torchrun and torchft")
    parser.add_argument(
        "--trainers", action="store_true", help="with DDP, and with those that are installed"
    )
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.kills = 1, 1
    return run(options.ranks, options.json, functools.partial(measure, options), show, aims)


def measure(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Return, by model and peer, the milliseconds of each outage."""
    worlds: dict[str, Any] = {}
    for model in options.models:
        peers = [*OURS]
        if options.trainers:
            peers += [peer for peer in TRAINERS if there_is(peer)]
        if model == "mlp-1m" and not options.alone:
            others = PEERS.keys() - {*OURS, *TRAINERS}
            peers += [peer for peer in PEERS if peer in others and there_is(peer)]
        world = worlds[model] = {peer: [] for peer in peers}
        for _ in range(options.rounds):
            for peer in peers:
                kills = max(1, round(SHARE[peer] * options.kills / options.rounds))
                with (
                    tempfile.TemporaryDirectory() as folder,
                    PEERS[peer](ranks, model, folder) as crew,
                ):
                    timeline = Timeline(folder, crew.alive)
                    for _ in range(kills):
                        world[peer].append(one_kill(crew, timeline, ranks))
                print(f"{model}: {peer}, {kills} kills", flush=True)
    return worlds


def there_is(peer: str) -> bool:
    if peer == "torchft" and importlib.util.find_spec("torchft") is None:
        print("torchft is left out: pip install nbelastic[benchmark]")
        return False
    trainer = peer.removeprefix("ours-")
    if peer in TRAINERS and trainer != "ddp" and importlib.util.find_spec(trainer) is None:
        print(f"{trainer} is left out: pip install nbelastic[{trainer}]")
        return False
    return True


def one_kill(crew: Any, timeline: Timeline, ranks: int) -> dict[str, Any]:
    """Kill a rank when all train; return the resulting times in milliseconds."""
    ordinary = timeline.wait_for_steps(ranks)
    before = len(crew.recoveries()) if isinstance(crew, Ours) else 0
    moment, others = crew.kill()
    found = {
        "step": 1e3 * ordinary,
        "total": 1e3 * (until_next_step(timeline, crew, moment, others) - ordinary),
    }
    if isinstance(crew, Ours):
        if crew.logs_failures:
            found["overhead"] = 1e3 * outage(timeline, moment, others)
        timeline.until(lambda: len(crew.recoveries()) > before, "word of the phases")
        found["phases"] = crew.recoveries()[before]
        found["whole"] = until_whole(timeline, moment, others, ranks)
    return found


def of(rows: list[dict[str, Any]], what: str) -> list[Any]:
    return [row[what] for row in rows if what in row]


def show(ranks: int, worlds: dict[str, Any]) -> None:
    print(f"\n{ranks} ranks, milliseconds: median (quartiles), worst")
    head = [
        "",
        "kills",
        "not computing",
        "worst",
        "to the next step",
        "worst",
        "a step",
        "whole, s",
    ]
    rows = []
    for model, world in worlds.items():
        for peer, kills in world.items():
            overheads, totals = of(kills, "overhead"), of(kills, "total")
            wholes = of(kills, "whole")
            rows.append(
                [
                    f"{model}, {peer}",
                    str(len(kills)),
                    quartiles(overheads or [math.nan]).show(1),
                    f"{max(overheads):.0f}" if overheads else "-",
                    quartiles(totals).show(1),
                    f"{max(totals):.0f}",
                    f"{quartiles(of(kills, 'step')).median:.1f}",
                    quartiles(wholes).show(2) if wholes else "-",
                ]
            )
    print(table(head, rows), flush=True)
    print("\nPhases of our recoveries, on the new rank 0, milliseconds each: median")
    for model, world in worlds.items():
        phases: dict[str, list[float]] = {}
        for found in (each for name in OURS for each in of(world[name], "phases")):
            for (_, begin), (phase, end) in itertools.pairwise(found.items()):
                phases.setdefault(phase, []).append(end - begin)
        words = (f"{phase} {quartiles(times).median:.1f}" for phase, times in phases.items())
        print(f"{model}: {', '.join(words)}", flush=True)


def aims(ranks: int, worlds: dict[str, Any]) -> list[Target]:
    """Return the targets of this project."""
    targets = []
    for model, world in worlds.items():
        for what in OURS:
            name = f"{ranks} ranks, {model}, {what}"
            overheads = of(world[what], "overhead")
            total = quartiles(of(world[what], "total")).median
            targets += [
                Target(
                    f"{name}: not computing, ms", quartiles(overheads).median, OVERHEAD_MS, False
                ),
                Target(f"{name}: the same, worst, ms", max(overheads), WORST_MS, False),
            ]
            if model == "mlp-1m":
                targets.append(Target(f"{name}: to the next step, ms", total, STEP_MS, False))
        name = f"{ranks} ranks, {model}, ours"
        whole = quartiles(of(world["ours"], "whole")).median
        targets.append(Target(f"{name}: all ranks again, s", whole, WHOLE_S, False))
        total = quartiles(of(world["ours"], "total")).median
        name = f"{ranks} ranks, {model}"
        for peer in world.keys() & TRAINERS.keys():
            reached = quartiles(of(world[peer], "total")).median
            targets.append(
                Target(f"{name}: {peer}, to the next step, ms", reached, TRAINERS[peer], False)
            )
        for peer in world.keys() - {*OURS, *TRAINERS}:
            ratio = quartiles(of(world[peer], "total")).median / total
            targets.append(Target(f"{name}: {peer} / ours", ratio, FASTER[peer], True))
    return targets


if __name__ == "__main__":
    sys.exit(main())
