"""Cost of a commit after each step, in a real job with Adam, for models of two sizes.

Every rank trains a perceptron, steps and commits, and times both. Some steps in between deep-copy
the state dicts of model and optimizer, as elastic training commonly keeps its state. Prints
milliseconds, the share of a step that its commit takes, and how much cheaper it is than the
copies. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import functools
import logging
import statistics
import sys
from typing import Any

from distributed import Client, LocalCluster

import nbelastic
from benchmarks.command import options_of, run
from benchmarks.figures import Target, quartiles, table

WIDTHS = {"1M": (64, 680, 680, 680), "25M": (64, 3500, 3500, 3500)}
BATCH = 64
SHARE = 0.01
CHEAPER = 20.0


def main() -> int:
    parser = options_of("commit", __doc__, rounds=30, budget=20.0)
    parser.add_argument("--models", nargs="+", default=list(WIDTHS), choices=list(WIDTHS))
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.budget = 5, 3.0
    return run(options.ranks, options.json, functools.partial(measure, options), show, aims)


def measure(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Return, by model, the milliseconds of rank 0 in each round."""
    quiet = logging.ERROR  # Dask warns of workers that take a while to end
    with (
        LocalCluster(
            n_workers=ranks, threads_per_worker=1, dashboard_address=":0", silence_logs=quiet
        ) as cluster,
        Client(cluster) as client,
    ):
        worlds = {}
        for name in options.models:
            work = functools.partial(train, WIDTHS[name], options.rounds, options.budget)
            job = nbelastic.fit(work, cluster=client, np=ranks, block=False)
            worlds[name] = job.result()
            print(f"{name}: {len(worlds[name]['commit'])} rounds", flush=True)
        return worlds


def train(widths: tuple[int, ...], rounds: int, budget: float) -> dict[str, Any]:
    import copy
    import time

    import torch

    import nbelastic.torch as hvd
    from benchmarks.training_models import CLASSES, perceptron

    hvd.init()
    model = perceptron(*widths)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-4))
    state = hvd.elastic.TorchState(model, optimizer, batch=0)
    inputs = torch.randn(BATCH, widths[0])
    classes = torch.randint(CLASSES, (BATCH,))
    figures: dict[str, Any] = {"step": [], "commit": [], "copies": []}

    def step() -> float:
        begin = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), classes).backward()
        optimizer.step()
        return 1e3 * (time.perf_counter() - begin)

    def commit() -> float:
        begin = time.perf_counter()
        state.batch += 1
        state.commit()
        return 1e3 * (time.perf_counter() - begin)

    def copies() -> float:
        begin = time.perf_counter()
        kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        done = 1e3 * (time.perf_counter() - begin)
        del kept
        return done

    @hvd.elastic.run
    def loop(_state: Any) -> None:
        for _ in range(5):
            step()
            commit()
        end = time.monotonic() + budget
        while len(figures["step"]) < rounds:
            times = [(step(), commit()) for _ in range(5)]
            figures["step"].append(statistics.median(each for each, _ in times))
            figures["commit"].append(statistics.median(each for _, each in times))
            figures["copies"].append(copies())
            late = torch.tensor([time.monotonic() > end])
            if bool(hvd.allreduce(late, op=hvd.Max)) and len(figures["step"]) > 2:
                break

    loop(state)
    figures["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    return figures


def show(ranks: int, worlds: dict[str, Any]) -> None:
    print(f"\n{ranks} ranks, milliseconds: median (quartiles)")
    peers = ("step", "commit", "copies")
    rows = [
        [name, f"{rows['parameters']:,}", *(quartiles(rows[peer]).show(2) for peer in peers)]
        for name, rows in worlds.items()
    ]
    print(table(["", "parameters", *peers], rows), flush=True)


def ratio(rows: dict[str, Any], peer: str, to: str) -> float:
    return quartiles([a / b for a, b in zip(rows[peer], rows[to], strict=True)]).median


def aims(ranks: int, worlds: dict[str, Any]) -> list[Target]:
    """Return the targets of this project."""
    targets = []
    for name, rows in worlds.items():
        of = f"{ranks} ranks, {name}"
        targets += [
            Target(f"{of}: commit / step", ratio(rows, "commit", "step"), SHARE, False),
            Target(f"{of}: copies / commit", ratio(rows, "copies", "commit"), CHEAPER, True),
        ]
    return targets


if __name__ == "__main__":
    sys.exit(main())
