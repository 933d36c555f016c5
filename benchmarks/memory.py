"""Peak memory of training with ``DistributedOptimizer`` and commits, and with DDP.

Each rank builds a perceptron and Adam, trains some steps, and commits after each. The peak is that
of the process's resident memory (``VmHWM`` of ``/proc/self/status``, reset before), less its value
before the model was built. Both variants run in workers of their own. Prints megabytes, and
multiples of the parameters' size. Exits with 1 if the target is missed.
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
from pathlib import Path
from typing import Any

from distributed import Client, LocalCluster

import nbelastic
from benchmarks.command import options_of, run
from benchmarks.figures import Target, quartiles, table

WIDTHS = {"1M": (64, 680, 680, 680), "25M": (64, 3500, 3500, 3500), "100M": (64, 7000, 7000, 7000)}
BATCH = 8
STEPS = 6
LIMIT = 1.1
WAYS = ("nbelastic", "DDP")


def main() -> int:
    parser = options_of("memory", __doc__, rounds=1, budget=60.0)
    parser.set_defaults(ranks=[2])
    parser.add_argument("--models", nargs="+", default=["25M"], choices=list(WIDTHS))
    options = parser.parse_args()
    return run(options.ranks, options.json, functools.partial(measure, options), show, aims)


def measure(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Return the peak of each rank in each round, by model and variant, in megabytes."""
    found: dict[str, Any] = {}
    for name in options.models:
        found[name] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way in WAYS:
                peaks = measure_one(WIDTHS[name], way, ranks)
                found[name][way] += [peak for peak, _ in peaks]
                found[name]["parameters"] = peaks[0][1]
                print(f"{name}, {way}: {max(peaks)[0]:.0f} MB", flush=True)
    return found


def measure_one(widths: tuple[int, ...], way: str, ranks: int) -> list[tuple[float, float]]:
    """Return peak and parameters of each rank, in megabytes."""
    with (
        LocalCluster(
            n_workers=ranks,
            threads_per_worker=1,
            dashboard_address=":0",
            memory_limit=0,
            silence_logs=logging.ERROR,
        ) as cluster,
        Client(cluster) as client,
    ):
        work = train if way == "nbelastic" else train_with_ddp
        job = nbelastic.fit(work, cluster=client, np=ranks, args=[widths], block=False)
        results: list[tuple[float, float]] = job.results()
        return results


def resident(field: str) -> float:
    """Return a field of this process's status, in megabytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise ValueError(field)


def train(widths: tuple[int, ...]) -> tuple[float, float]:
    import torch

    import nbelastic.torch as hvd
    from benchmarks.training_models import perceptron

    hvd.init()
    hvd.allreduce(torch.zeros(1))
    before = begin()
    model = perceptron(*widths)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-4))
    state = hvd.elastic.TorchState(model, optimizer, batch=0)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while state.batch < STEPS:
            step(model, optimizer, widths[0])
            state.batch += 1
            state.commit()

    loop(state)
    return resident("VmHWM") - before, megabytes_of(model)


def train_with_ddp(widths: tuple[int, ...]) -> tuple[float, float]:
    import socket

    import torch
    import torch.distributed as dist

    import nbelastic.torch as hvd
    from benchmarks.training_models import perceptron

    hvd.init()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = hvd.broadcast_object(server.getsockname()[1])
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=hvd.rank(), world_size=hvd.size()
    )
    dist.barrier()
    before = begin()
    model = perceptron(*widths)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=1e-4)
    for _ in range(STEPS):
        step(wrapped, optimizer, widths[0])
    return resident("VmHWM") - before, megabytes_of(model)


def begin() -> float:
    """Reset the peak, and return the memory in use now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def step(model: Any, optimizer: Any, width: int) -> None:
    import torch

    from benchmarks.training_models import CLASSES

    optimizer.zero_grad()
    classes = torch.randint(CLASSES, (BATCH,))
    torch.nn.functional.cross_entropy(model(torch.randn(BATCH, width)), classes).backward()
    optimizer.step()


def megabytes_of(model: Any) -> float:
    return float(sum(each.numel() * each.element_size() for each in model.parameters()) / 2**20)


def show(ranks: int, worlds: dict[str, Any]) -> None:
    print(f"\n{ranks} ranks, peak in megabytes: median (quartiles)")
    rows = []
    for name, world in worlds.items():
        for way in WAYS:
            spread, size = quartiles(world[way]), world["parameters"]
            rows.append([name, way, f"{size:.0f}", spread.show(0), f"{spread.median / size:.2f}"])
    print(table(["", "", "parameters", "peak", "/ parameters"], rows), flush=True)


def aims(ranks: int, worlds: dict[str, Any]) -> list[Target]:
    """Return the targets of this project."""
    return [
        Target(
            f"{ranks} ranks, {name}: peak / DDP's",
            quartiles(world["nbelastic"]).median / quartiles(world["DDP"]).median,
            LIMIT,
            False,
        )
        for name, world in worlds.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
