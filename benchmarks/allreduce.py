"""Sums of vectors over the ranks of one machine, by several libraries in one run.

Compared are nbelastic over shared memory (for a vector in the communicator's memory and for any
other), Gloo in ``torch.distributed``, MPICH if ``nbelastic[benchmark]`` is installed, and the
limit: the time in which the same number of processes each read and write as much memory. Peers
take turns, sample by sample, so a slow machine slows all of them alike. A sample has several sums
and ends with the last rank. Prints milliseconds and ratios with their quartiles. Exits with 1 if a
target is missed, with 2 if something could not be measured.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.command import options_of, run
from benchmarks.figures import Spread, Target, quartiles, table
from benchmarks.meet import place
from benchmarks.side_by_side import Crew, Failed

KB, MB = 1 << 10, 1 << 20
SIZES = [4 * KB, 16 * KB, 100 * KB, MB, 4 * MB, 10 * MB, 25 * MB, 100 * MB, 256 * MB]
QUICK_SIZES = [4 * KB, 100 * KB, MB, 10 * MB]
OURS, ANY, GLOO, MPICH, LIMIT = "ours", "ours, any memory", "gloo", "mpich", "limit"
# Lowest speed relative to Gloo, by number of ranks: up to 10 MB, and at 100 MB.
OVER_GLOO = {2: (10.0, 6.0), 4: (12.0, 7.0)}
OVER_MPICH = 2.0
OVER_LIMIT = 2.0
LEAST_ROUNDS = 3
HOPELESS = 0.05
"""Largest share of the time for a size that one sum may take. Ranks that spin may need seconds."""


def main() -> int:
    parser = options_of("allreduce", __doc__, rounds=11, budget=12.0)
    parser.add_argument("--sizes", type=size_of, nargs="+", help="such as 4KB 10MB")
    parser.add_argument("--sample", type=float, default=0.03, help="seconds of each (0.03)")
    parser.add_argument("--backend", default="shm", help="what of ours to measure (shm)")
    parser.add_argument("--no-mpich", action="store_true", help="leave MPICH out")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.sample, options.budget = 7, 0.01, 2.0
        options.sizes = options.sizes or QUICK_SIZES
    return run(options.ranks, options.json, functools.partial(measure, options), show, aims)


def size_of(text: str) -> int:
    """Return the number of bytes in a text such as ``100KB``."""
    number, unit = text.upper().rstrip("KMB"), text.upper().lstrip("0123456789")
    return int(number) * {"": 1, "B": 1, "KB": KB, "MB": MB}[unit] // 512 * 512


def measure(options: argparse.Namespace, ranks: int) -> dict[int, Any]:
    """Return, by size and peer, the milliseconds of a sum in each round."""
    with contextlib.ExitStack() as stack:
        met = (options.backend, stack.enter_context(place()))
        torch_crew = stack.enter_context(Crew("benchmarks.allreduce_peers:Peers", ranks, met))
        crews = dict.fromkeys([OURS, ANY, GLOO, LIMIT], torch_crew)
        mpiexec = "" if options.no_mpich else find_mpiexec()
        if mpiexec:
            mpich = Crew("benchmarks.allreduce_peers:Mpich", ranks, mpiexec=mpiexec)
            crews[MPICH] = stack.enter_context(mpich)
            print(f"{ranks} ranks, {mpich.ask('version')[0]}", flush=True)
        worlds: dict[int, Any] = {}
        for size in sorted(options.sizes or SIZES):
            worlds[size] = by_turns(crews, size, options)
            if MPICH in crews and min(worlds[size][MPICH]) > 1e3 * options.budget * HOPELESS:
                del crews[MPICH]
                print(f"mpich is left out above {name_of(size)}: the machine is too busy for it")
        return worlds


def find_mpiexec() -> str:
    """Return the path of pip's mpiexec. If there is none, print so and return nothing."""
    path = Path(sys.executable).with_name("mpiexec")
    if path.exists() and importlib.util.find_spec("mpi4py"):
        return str(path)
    print("MPICH is left out: pip install nbelastic[benchmark]")
    return ""


def by_turns(crews: dict[str, Crew], size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of a sum of `size` bytes by each peer, in each round."""
    for crew in set(crews.values()):
        crew.ask("prepare", size)
    samples: dict[str, list[float]] = {}
    for peer, crew in crews.items():
        if not all(crew.ask("check", peer)):
            raise Failed(f"{peer}: a wrong sum of {name_of(size)}")
        once = crew.time("run", peer, 1)
        if once < options.budget * HOPELESS:  # else one sum is long enough to measure
            once = crew.time("run", peer, 3) / 3
        samples[peer] = [1e3 * once]
    order = list(crews)
    enough = time.monotonic() + options.budget
    done = 0
    while done < options.rounds and (done < LEAST_ROUNDS or time.monotonic() < enough):
        for peer in order:
            count = iterations(samples[peer], options.sample)
            samples[peer].append(1e3 * crews[peer].time("run", peer, count) / count)
        order = [*order[1:], order[0]]
        done += 1
    print(f"{name_of(size)}: {done} rounds", flush=True)
    for crew in set(crews.values()):
        crew.ask("forget")
    return {peer: values[1:] for peer, values in samples.items()}


def iterations(samples: list[float], seconds: float) -> int:
    """Return how many sums fill a sample, from those so far, as a machine's speed drifts."""
    once = statistics.median(samples) / 1e3
    return max(1 if once > 0.1 else 3, math.ceil(seconds / once))


def ratio(rows: dict[str, Any], peer: str, to: str) -> Spread:
    """Return how much longer `peer` takes than `to`, by rounds, so that drift cancels out."""
    if peer not in rows:
        return Spread(math.nan, math.nan, math.nan)
    return quartiles([a / b for a, b in zip(rows[peer], rows[to], strict=True)])


def show(ranks: int, worlds: dict[int, Any]) -> None:
    peers = [
        peer for peer in (OURS, ANY, GLOO, MPICH, LIMIT) if peer in next(iter(worlds.values()))
    ]
    print(f"\n{ranks} ranks, milliseconds: median (quartiles)")
    times = [
        [name_of(size), *(quartiles(rows.get(peer, [math.nan])).show(2) for peer in peers)]
        for size, rows in worlds.items()
    ]
    print(table(["", *peers], times))
    print(f"\n{ranks} ranks, ratios: median (quartiles) over rounds")
    pairs = [(GLOO, OURS), (MPICH, OURS), (OURS, LIMIT), (ANY, LIMIT), (GLOO, ANY)]
    pairs = [(peer, to) for peer, to in pairs if peer in peers]
    ratios = [
        [name_of(size), *(ratio(rows, peer, to).show(1) for peer, to in pairs)]
        for size, rows in worlds.items()
    ]
    print(table(["", *(f"{peer} / {to}" for peer, to in pairs)], ratios), flush=True)


def aims(ranks: int, worlds: dict[int, Any]) -> list[Target]:
    """Return the targets of this project at the sizes measured."""
    targets = []
    for size, rows in worlds.items():
        of = f"{ranks} ranks, {name_of(size)}"
        if ranks in OVER_GLOO and size <= 100 * MB:
            small, large = OVER_GLOO[ranks]
            limit = small if size <= 10 * MB else large
            targets.append(
                Target(f"{of}: gloo / ours", ratio(rows, GLOO, OURS).median, limit, True)
            )
        if MPICH in worlds[min(worlds)] and (size >= 100 * KB or size == 4 * KB):
            limit = OVER_MPICH if size >= 100 * KB else 1.0
            targets.append(
                Target(f"{of}: mpich / ours", ratio(rows, MPICH, OURS).median, limit, True)
            )
        if size >= 10 * MB:
            value = ratio(rows, OURS, LIMIT).median
            targets.append(Target(f"{of}: ours / limit", value, OVER_LIMIT, False))
    return targets


def name_of(size: int) -> str:
    for unit, factor in (("MB", MB), ("KB", KB)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size} B"


if __name__ == "__main__":
    sys.exit(main())
