"""Bits and time of training in steps of micro-batches, by number of ranks, in one run.

Steps of 8 micro-batches of 32 rows are trained by ``DistributedOptimizer`` with sums along the tree
("exact") and in the order of ranks ("plain"), over each backend, and by torch's DDP, which
accumulates. All begin with the same parameters. Prints digests of the parameters after some steps:
those of "exact" must be one and the same for all numbers of ranks and backends. Then prints the
time of a step, of "exact" relative to "plain", and of "plain" relative to one pass over all rows of
a rank ("one pass"), where the number of ranks divides 8. Exits with 1 if a target is missed, with 2
if digests differ or something could not be measured.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

from benchmarks.command import options_of, run
from benchmarks.exact_rank import MICRO_BATCHES, WIDTHS
from benchmarks.figures import Target, bootstrap, quartiles, table
from benchmarks.meet import place
from benchmarks.side_by_side import Crew, Failed

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

STEPS = 6
"""Steps before digests are compared."""
LEAST_ROUNDS = 6
MOST_EVEN, MOST_UNEVEN, MOST_GLOO = 1.03, 1.15, 1.25

Round = dict[str, float]


def main() -> int:
    parser = options_of("exact", __doc__, rounds=20, budget=20.0)
    parser.add_argument("--models", nargs="+", default=list(WIDTHS), choices=list(WIDTHS))
    parser.add_argument("--backends", nargs="+", default=["shm", "gloo"], help="(shm gloo)")
    parser.set_defaults(ranks=[2, 3, 4, 8])
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.budget = 2, 1.0
    digests: dict[str, set[str]] = {}
    measured = functools.partial(measure, options, digests)
    return run(options.ranks, options.json, measured, show, aims)


def measure(
    options: argparse.Namespace, digests: dict[str, set[str]], ranks: int
) -> dict[str, Any]:
    """Return digests and milliseconds of a step by model and candidate."""
    with (
        place() as where,
        Crew("benchmarks.exact_rank:Trainer", ranks, (options.backends, where)) as crew,
    ):
        return {
            model: by_turns(crew, model, options, digests.setdefault(model, set()))
            for model in options.models
        }


def by_turns(
    crew: Crew, model: str, options: argparse.Namespace, exact: set[str]
) -> dict[str, Any]:
    """Train `model` with all candidates in turns."""
    count = crew.ask("prepare", model)[0]
    names: list[str] = crew.ask("names")[0]
    digests: dict[str, str] = {}
    for name in names:
        crew.ask("train", name, STEPS)
        found = set(crew.ask("digest", name))
        if len(found) > 1:
            raise Failed(f"{model}, {name}: parameters are not the same on all ranks")
        digests[name] = found.pop()
        if name.startswith("exact"):
            exact.add(digests[name])
    if len(exact) > 1:
        raise Failed(f"{model}: exact training has several digests: {', '.join(sorted(exact))}")
    rounds: list[Round] = []
    enough, order = time.monotonic() + options.budget, names
    while len(rounds) < options.rounds and (
        len(rounds) < LEAST_ROUNDS or time.monotonic() < enough
    ):
        rounds.append({name: 1e3 * crew.time("train", name, 2) / 2 for name in order})
        order = [*order[1:], order[0]]
    return {"parameters": count, "digests": digests, "rounds": rounds}


def ratio(rounds: Sequence[Round], name: str, other: str) -> float:
    return statistics.median(each[name] / each[other] for each in rounds)


def pairs_of(rounds: Sequence[Round]) -> list[tuple[str, str]]:
    """Return which candidates are compared."""
    backends = [name.partition(", ")[2] for name in rounds[0] if name.startswith("exact")]
    pairs = [(f"exact, {backend}", f"plain, {backend}") for backend in backends]
    pairs += [(f"plain, {backend}", f"one pass, {backend}") for backend in backends]
    pairs += [(f"exact, {backend}", "ddp") for backend in backends]
    return [pair for pair in pairs if pair[1] in rounds[0]]


def show(ranks: int, models: dict[str, Any]) -> None:
    for model, result in models.items():
        rounds = result["rounds"]
        print(
            f"\n{ranks} ranks, {model} ({result['parameters'] / 1e6:.1f} M), {len(rounds)} rounds"
        )
        rows = [
            [name, digest, quartiles([each[name] for each in rounds]).show()]
            for name, digest in result["digests"].items()
        ]
        print(table(["", "digest", "ms of a step"], rows))
        compared = [
            [f"{a} / {b}", bootstrap(rounds, lambda some, a=a, b=b: ratio(some, a, b)).show(2)]
            for a, b in pairs_of(rounds)
        ]
        print(table(["", "ratio (nine of ten draws)"], compared), flush=True)


def aims(ranks: int, models: dict[str, Any]) -> list[Target]:
    targets = []
    for model, result in models.items():
        for name, other in pairs_of(result["rounds"]):
            if not name.startswith("exact") or other == "ddp":
                continue
            even = MOST_EVEN if MICRO_BATCHES % ranks == 0 else MOST_UNEVEN
            most = MOST_GLOO if name.endswith("gloo") else even
            found = ratio(result["rounds"], name, other)
            value = found if math.isfinite(found) else math.inf
            title = f"{ranks} ranks, {model}: {name} / {other}"
            targets.append(Target(title, value, most, at_least=False))
    return targets


if __name__ == "__main__":
    sys.exit(main())
