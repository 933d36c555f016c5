"""Common parts of the commands that compare: options, order of work, exit status."""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dask

from benchmarks.figures import Target, machine
from benchmarks.side_by_side import Failed


def options_of(name: str, description: str | None, rounds: int, budget: float) -> Any:
    """Return a parser with the options that all commands have."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    several = f"about so many seconds for each of them ({budget:g})"
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="(2 4)")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"samples of each ({rounds})")
    parser.add_argument("--budget", type=float, default=budget, help=several)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter samples")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures there, too")
    return parser


def run(
    ranks: Sequence[int],
    out: Path | None,
    measure: Callable[[int], Any],
    show: Callable[[int, Any], None],
    aims: Callable[[int, Any], list[Target]],
) -> int:
    """Measure with each number of ranks, print the results, and return an exit status.

    It is 0 if all targets are met, 1 if one is missed, 2 if something could not be measured.
    """
    # As in the cluster that fit starts for one job; the profiler takes 5 % of a step on two cores.
    dask.config.set({"distributed.worker.profile.enabled": False})
    # End as an exception would, so that no rank and no file is left.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results: dict[str, Any] = {"machine": machine(), "worlds": {}}
    print(results["machine"], flush=True)
    targets: list[Target] = []
    try:
        for size in ranks:
            world = results["worlds"][size] = measure(size)
            show(size, world)
            targets += aims(size, world)
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 2
    print("\nTargets")
    for target in targets:
        print(f"  {target.show()}")
    met = sum(target.met for target in targets)
    print(f"{met} of {len(targets)} met")
    if out is not None:
        # A value that could not be measured is not finite, and JSON has finite numbers only.
        results["targets"] = [
            asdict(each)
            | {"met": each.met, "ratio": each.ratio if math.isfinite(each.ratio) else None}
            for each in targets
        ]
        out.write_text(json.dumps(results, indent=1))
    return 0 if met == len(targets) else 1
