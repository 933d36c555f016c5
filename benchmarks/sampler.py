"""Time of a reset of an ``ElasticSampler``, relative to a new epoch of torch's sampler, in one run.

Four ranks have done a tenth of an epoch of 10 M samples, and one of them is lost. Timed is what the
others do: deal the rest, and look up their first samples. The peer is ``DistributedSampler``, which
has no resets: its shares are made anew for each epoch, and a reset by means of it cannot take less.
Exits with 1 if the target is missed.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import DistributedSampler

from benchmarks.command import options_of, run
from benchmarks.figures import Target, quartiles, table
from nbelastic.elastic.sampler import ShardSampler

SAMPLES, QUICK = 10_000_000, 500_000
LEAST = 50.0
BATCH = 256


def main() -> int:
    parser = options_of("sampler", __doc__, rounds=9, budget=0.0)
    parser.set_defaults(ranks=[4])
    options = parser.parse_args()
    if options.quick:
        options.rounds = 2
    return run(options.ranks, options.json, functools.partial(measure, options), show, aims)


def measure(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Return the milliseconds of each, by round."""
    samples = QUICK if options.quick else SAMPLES
    sampler = ShardSampler(range(samples))
    sampler.get_indices(0, 1)  # the order of an epoch is made once in it, resets or none
    done = sampler.progress()._replace(done=samples // 10)

    def reset() -> None:
        before = sampler.snapshot()
        sampler.install(done, 0, max(ranks - 1, 1))
        sampler.get_indices(0, BATCH)
        sampler.go_back(before)

    peer = DistributedSampler(range(samples), ranks, 0)  # type: ignore[arg-type,var-annotated]

    def epoch() -> None:
        next(iter(peer))

    return {
        "samples": samples,
        "reset": [timed(reset) for _ in range(options.rounds)],
        "torch": [timed(epoch) for _ in range(options.rounds)],
    }


def timed(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began)


def show(ranks: int, world: dict[str, Any]) -> None:
    print(f"\n{ranks} ranks, {world['samples']:,} samples")
    rows = [
        ["ElasticSampler, a reset", quartiles(world["reset"]).show(2)],
        ["DistributedSampler, a new epoch", quartiles(world["torch"]).show()],
    ]
    print(table(["", "ms"], rows), flush=True)


def aims(ranks: int, world: dict[str, Any]) -> list[Target]:
    ratio = statistics.median(world["torch"]) / statistics.median(world["reset"])
    return [Target(f"{ranks} ranks: torch / ours", ratio, LEAST, at_least=True)]


if __name__ == "__main__":
    sys.exit(main())
