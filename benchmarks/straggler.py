"""Time of a step while one of four ranks is three times slower, by candidate, in one run.

Steps of 16 micro-batches are trained by a ``Loader`` with ``balance="speed"``, by one with even
shares, and by torch's DDP, which accumulates. Each is timed undisturbed and with a slow rank, by
turns. Prints the time of a step of each, and the part of the slow rank. Exits with 1 if the target
is missed, with 2 if ranks end with different parameters or something could not be measured.

The forward pass of a micro-batch is mostly a sleep of 10 ms, as if an accelerator of the rank's own
did the work. So four ranks can be measured on two cores: the slow one is slow, and the others are
not. All candidates add over Gloo.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.command import options_of, run
from benchmarks.figures import Target, bootstrap, quartiles, table
from benchmarks.meet import place
from benchmarks.side_by_side import Crew, Failed

SETTLE = 12
"""Steps after a rank has become slow, or fast again, that are not timed."""
LEAST_ROUNDS = 4
MOST = 1.3

Round = dict[str, float]


def main() -> int:
    parser = options_of("straggler", __doc__, rounds=10, budget=60.0)
    parser.add_argument("--times", type=float, default=3.0, help="how much slower it is (3)")
    parser.set_defaults(ranks=[4])
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.budget = 2, 1.0
    return run(options.ranks, options.json, functools.partial(measure, options), show, aims)


def measure(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Return the milliseconds of a step by candidate, and what the slow rank computes."""
    seconds = 0.0005 if options.quick else 0.01
    with (
        place() as where,
        Crew("benchmarks.straggler_rank:Trainer", ranks, (seconds, where)) as crew,
    ):
        names: list[str] = crew.ask("names")[0]
        rounds: list[Round] = []
        quotas: dict[str, list[int]] = {}
        enough = time.monotonic() + options.budget
        while len(rounds) < options.rounds and (
            len(rounds) < LEAST_ROUNDS or time.monotonic() < enough
        ):
            figures: Round = {}
            for name in names:
                for title, times in (("undisturbed", 1.0), ("one slow", options.times)):
                    crew.ask("slow_down", ranks - 1, times)
                    crew.ask("train", name, SETTLE)
                    figures[f"{name}, {title}"] = 1e3 * crew.time("train", name, 6) / 6
                    quotas[f"{name}, {title}"] = crew.ask("quota", name)
            rounds.append(figures)
            names = [*names[1:], names[0]]
        for name in names:
            if len(set(crew.ask("digest", name))) > 1:
                raise Failed(f"{name}: parameters are not the same on all ranks")
        exact = {name: crew.ask("digest", name)[0] for name in names if name != "ddp"}
        if len(set(exact.values())) > 1:
            raise Failed(f"quotas have changed bits: {exact}")
    return {"rounds": rounds, "quotas": quotas}


def ratio(rounds: Sequence[Round], name: str) -> float:
    """Return the time of a step with a slow rank, relative to the undisturbed one."""
    return statistics.median(each[f"{name}, one slow"] for each in rounds) / statistics.median(
        each[f"{name}, undisturbed"] for each in rounds
    )


def names_of(rounds: Sequence[Round]) -> list[str]:
    return [*dict.fromkeys(title.partition(",")[0] for title in rounds[0])]


def show(ranks: int, world: dict[str, Any]) -> None:
    rounds, quotas = world["rounds"], world["quotas"]
    print(f"\n{ranks} ranks, {len(rounds)} rounds")
    rows = [
        [title, ", ".join(map(str, quotas[title])), quartiles([e[title] for e in rounds]).show()]
        for title in rounds[0]
    ]
    print(table(["", "micro-batches", "ms of a step"], rows))
    compared = [
        [name, bootstrap(rounds, lambda some, name=name: ratio(some, name)).show(2)]
        for name in names_of(rounds)
    ]
    print(table(["one slow / undisturbed", "ratio (nine of ten draws)"], compared), flush=True)


def aims(ranks: int, world: dict[str, Any]) -> list[Target]:
    found = ratio(world["rounds"], "speed")
    return [Target(f"{ranks} ranks: one slow / undisturbed", found, MOST, at_least=False)]


if __name__ == "__main__":
    sys.exit(main())
