"""Bits and time of training in steps of micro-batches, by number of ranks, in one run.

Steps of 8 micro-batches of 32 rows are trained by ``DistributedOptimizer`` with sums along the tree
("exact") and in the order of ranks ("plain"), over each backend, and by torch's DDP, which
accumulates. All begin with the same parameters. Prints digests of the parameters after some steps:
those of "exact" must be one and the same for all numbers of ranks, all backends, and also if a rank
fails and another joins. Then prints the time of a step, of "exact" relative to "plain", and of
"plain" relative to one pass over all rows of a rank ("one pass"), where the number of ranks divides
8. The last table has a line for each digest of "exact". Exits with 1 if a target is missed, with 2
if digests differ or something could not be measured.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.command import options_of, run
from benchmarks.exact_rank import MICRO_BATCHES, WIDTHS
from benchmarks.figures import Target, bootstrap, quartiles, table
from benchmarks.meet import place
from benchmarks.side_by_side import Crew, Failed

STEPS = 6
"""Steps before digests are compared."""
LEAST_ROUNDS = 6
MOST_EVEN, MOST_UNEVEN, MOST_GLOO = 1.03, 1.15, 1.25

Round = dict[str, float]
Runs = dict[str, dict[str, set[tuple[int, str, str]]]]
"""Numbers of ranks, backends and faults of exact trainings, by model and digest."""

FAULTS = ("none", "a rank fails, another joins")


def main() -> int:
    parser = options_of("exact", __doc__, rounds=20, budget=20.0)
    parser.add_argument("--models", nargs="+", default=list(WIDTHS), choices=list(WIDTHS))
    parser.add_argument("--backends", nargs="+", default=["shm", "gloo"], help="(shm gloo)")
    parser.set_defaults(ranks=[2, 3, 4, 8])
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.budget = 2, 1.0
    runs: Runs = {}
    measured = functools.partial(measure, options, runs)
    status = run(options.ranks, options.json, measured, show, aims)
    show_runs(runs)
    return status


def measure(options: argparse.Namespace, runs: Runs, ranks: int) -> dict[str, Any]:
    """Return digests and milliseconds of a step by model and candidate."""
    with (
        place() as where,
        Crew("benchmarks.exact_rank:Trainer", ranks, (options.backends, where)) as crew,
    ):
        return {
            model: by_backend(crew, model, options, runs.setdefault(model, {}), ranks)
            for model in options.models
        }


def by_backend(
    crew: Crew,
    model: str,
    options: argparse.Namespace,
    exact: dict[str, set[tuple[int, str, str]]],
    ranks: int,
) -> dict[str, Any]:
    """Train `model` over each backend, with all candidates. Only those of one are in memory."""
    count, digests, rounds = 0, {}, {}
    for backend in options.backends:
        faulty = common(model, crew.ask("digest_after_faults", model, backend, STEPS))
        count = crew.ask("prepare", model, backend)[0]
        names: list[str] = crew.ask("names")[0]
        for name in names:
            crew.ask("train", name, STEPS)
            digests[name] = common(f"{model}, {name}", crew.ask("digest", name))
        for digest, faults in zip((digests[f"exact, {backend}"], faulty), FAULTS, strict=True):
            exact.setdefault(digest, set()).add((ranks, backend, faults))
        if len(exact) > 1:
            show_runs({model: exact})
            raise Failed(f"{model}: exact training has several digests")
        rounds[backend] = by_turns(crew, names, options)
    return {"parameters": count, "digests": digests, "rounds": rounds}


def common(what: str, digests: Sequence[str]) -> str:
    """Return the digest of all ranks."""
    if len(set(digests)) > 1:
        raise Failed(f"{what}: parameters are not the same on all ranks")
    return digests[0]


def by_turns(crew: Crew, names: list[str], options: argparse.Namespace) -> list[Round]:
    """Return the milliseconds of a step of each candidate, in rounds."""
    rounds: list[Round] = []
    enough, order = time.monotonic() + options.budget, names
    while len(rounds) < options.rounds and (
        len(rounds) < LEAST_ROUNDS or time.monotonic() < enough
    ):
        rounds.append({name: 1e3 * crew.time("train", name, 2) / 2 for name in order})
        order = [*order[1:], order[0]]
    return rounds


def ratio(rounds: Sequence[Round], name: str, other: str) -> float:
    return statistics.median(each[name] / each[other] for each in rounds)


def pairs_of(backend: str, rounds: Sequence[Round]) -> list[tuple[str, str]]:
    """Return which candidates are compared."""
    kinds = [("exact", "plain"), ("plain", "one pass"), ("exact", "ddp")]
    pairs = [(f"{one}, {backend}", f"{other}, {backend}") for one, other in kinds]
    return [pair for pair in pairs if pair[1] in rounds[0]]


def show_runs(runs: Runs) -> None:
    """Print a line for each digest of exact trainings."""
    rows = [
        [model, digest, *(", ".join(map(str, sorted(set(c)))) for c in zip(*found, strict=True))]
        for model, digests in runs.items()
        for digest, found in digests.items()
    ]
    print("\nExact")
    print(table(["model", "digest", "ranks", "backends", "faults"], rows), flush=True)


def show(ranks: int, models: dict[str, Any]) -> None:
    for model, result in models.items():
        for backend, rounds in result["rounds"].items():
            size = f"{result['parameters'] / 1e6:.1f} M"
            print(f"\n{ranks} ranks, {model} ({size}), {backend}, {len(rounds)} rounds")
            rows = [
                [name, result["digests"][name], quartiles([each[name] for each in rounds]).show()]
                for name in rounds[0]
            ]
            print(table(["", "digest", "ms of a step"], rows))
            compared = [
                [f"{a} / {b}", bootstrap(rounds, lambda some, a=a, b=b: ratio(some, a, b)).show(2)]
                for a, b in pairs_of(backend, rounds)
            ]
            print(table(["", "ratio (nine of ten draws)"], compared), flush=True)


def aims(ranks: int, models: dict[str, Any]) -> list[Target]:
    targets = []
    for model, result in models.items():
        for backend, rounds in result["rounds"].items():
            even = MOST_EVEN if MICRO_BATCHES % ranks == 0 else MOST_UNEVEN
            most = MOST_GLOO if backend == "gloo" else even
            found = ratio(rounds, f"exact, {backend}", f"plain, {backend}")
            value = found if math.isfinite(found) else math.inf
            title = f"{ranks} ranks, {model}: exact / plain over {backend}"
            targets.append(Target(title, value, most, at_least=False))
    return targets


if __name__ == "__main__":
    sys.exit(main())
