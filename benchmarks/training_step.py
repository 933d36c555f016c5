"""Time of a training step, beyond that of ranks that train alone, in one run.

Models of four kinds are trained by the same number of processes alone, by torch's DDP with Gloo
(on a GPU with NCCL), and by ``DistributedOptimizer`` and by DDP with nbelastic's process group,
each over Gloo and over shared memory, in turns: some steps of one candidate while the others sleep.
On a GPU ``DistributedOptimizer`` runs over shared memory and CUDA IPC. Prints milliseconds of
a step and what each candidate adds to training alone (medians with quartiles), also as a share of
what DDP adds (with its range in nine of ten draws of the rounds). Parameters must be equal on all
ranks and, for nbelastic, equal to DDP's. Exits with 1 if a target is missed, with 2 if something
could not be measured.
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
from benchmarks.figures import Target, bootstrap, quartiles, table
from benchmarks.meet import place
from benchmarks.side_by_side import Crew, Failed

ALONE, DDP, BARRIER, GLOO = "alone", "ddp", "barrier", "gloo"
MODELS = ["mlp-1m", "mlp-25m", "cnn", "transformer"]
WARM_UP = 3
TOLERANCE = 1e-2
"""A ReLU unit that rounding turns on for one sample makes 1e-3; a missing gradient, 1e-1."""
# Number of steps before the comparison. On a GPU, rounding differences grow a hundredfold with each
# step of the CNN, too much after three.
COMPARED = {"cpu": WARM_UP, "cuda": 1}
# Limits, as shares of what DDP adds. Ranks that share a GPU wait for each other's kernels.
MOST = {
    "cpu": {GLOO: 1.0, "shm": 0.25, "ddp-gloo": 1.0, "ddp-shm": 0.5},
    "cuda": {"cuda_ipc": 0.5},
}
BACKENDS = {"cpu": [GLOO, "shm", "ddp-gloo", "ddp-shm"], "cuda": ["shm", "cuda_ipc", "nccl"]}
LEAST_ROUNDS = 10

Round = dict[str, float]


def main() -> int:
    parser = options_of("training_step", __doc__, rounds=25, budget=25.0)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--block", type=float, default=0.5, help="seconds of a sample (0.5)")
    parser.add_argument(
        "--backends",
        nargs="+",
        help="what of ours to measure (gloo shm ddp-gloo ddp-shm; on a GPU shm cuda_ipc nccl)",
    )
    parser.add_argument(
        "--device", default="cpu", choices=["cpu", "cuda"], help="which all ranks share (cpu)"
    )
    parser.add_argument(
        "--barrier", action="store_true", help="measure waiting for each other by itself, too"
    )
    options = parser.parse_args()
    options.backends = options.backends or BACKENDS[options.device]
    if options.quick:
        options.rounds, options.block, options.budget = 6, 0.03, 2.0
    most = MOST[options.device]
    return run(
        options.ranks,
        options.json,
        functools.partial(measure, options),
        show,
        functools.partial(aims, most),
    )


def measure(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Return the milliseconds of a step by model and candidate, for each round."""
    with place() as where:
        met = (options.backends, where, options.device)
        with Crew("benchmarks.training_rank:Trainer", ranks, met) as crew:
            return {model: by_turns(crew, model, options) for model in options.models}


def by_turns(crew: Crew, model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train `model` with all candidates in turns; return the milliseconds of a step per round."""
    ways = [ALONE, DDP, *options.backends, *([BARRIER] if options.barrier else [])]
    count = crew.ask("prepare", model)[0]
    paces: dict[str, float] = {}
    first = COMPARED[options.device]
    for way in ways:
        crew.time("train", way, first)
    check(crew, model, ways, first)
    for way in ways:
        crew.time("train", way, WARM_UP)
        paces[way] = crew.time("train", way, 2) / 2
    # All candidates take the same number of steps, so all are at the same point of the training.
    steps = max(2, math.ceil(options.block / min(paces.values())))
    rounds: list[Round] = []
    enough = time.monotonic() + options.budget
    order = ways
    while len(rounds) < options.rounds and (
        len(rounds) < LEAST_ROUNDS or time.monotonic() < enough
    ):
        took = {way: 1e3 * crew.time("train", way, steps) / steps for way in order}
        rounds.append(took)
        order = [*order[1:], order[0]]
    print(f"{model}: {len(rounds)} rounds of {steps} steps", flush=True)
    check_ranks(crew, model, ways)
    return {"parameters": count, "steps": steps, "rounds": rounds}


def check(crew: Crew, model: str, ways: Sequence[str], steps: int) -> None:
    """Compare nbelastic with DDP early, because differences by rounding in a ReLU grow later."""
    check_ranks(crew, model, ways)
    for way in set(ways) - {ALONE, BARRIER, DDP}:
        apart = max(crew.ask("apart", way))
        if not apart <= TOLERANCE:
            raise Failed(f"{model}, {way}: {apart:.2%} away from DDP after step {steps}")


def check_ranks(crew: Crew, model: str, ways: Sequence[str]) -> None:
    for way in set(ways) - {ALONE, BARRIER}:
        if len(set(crew.ask("digest", way))) > 1:
            raise Failed(f"{model}, {way}: parameters are not the same on all ranks")


def added(rounds: Sequence[Round], way: str) -> float:
    return statistics.median(each[way] - each[ALONE] for each in rounds)


def share(rounds: Sequence[Round], way: str) -> float:
    """Return what `way` adds to a step, as a share of what DDP adds."""
    mine, ddp = added(rounds, way), added(rounds, DDP)
    if ddp > 0:
        return mine / ddp
    return math.inf if mine > 0 else 0.0  # noise, or a step in which nothing is left to add


def ways_of(models: dict[str, Any]) -> list[str]:
    """Return the candidates with which the models were trained, in the order of the columns."""
    taken = next(iter(models.values()))["rounds"][0]
    return [ALONE, DDP, *(way for way in taken if way not in {ALONE, DDP})]


def show(ranks: int, models: dict[str, Any]) -> None:
    ways = ways_of(models)
    steps, extras, shares = [], [], []
    for model, result in models.items():
        rounds = result["rounds"]
        name = f"{model} ({result['parameters'] / 1e6:.1f} M)"
        steps.append([name, *(quartiles([each[way] for each in rounds]).show() for way in ways)])
        differences = [[each[way] - each[ALONE] for each in rounds] for way in ways[1:]]
        extras.append([name, *(quartiles(each).show(2) for each in differences)])
        drawn = [bootstrap(rounds, lambda some, way=way: share(some, way)) for way in ways[2:]]
        shares.append([name, *(each.show(2) for each in drawn)])
    print(f"\n{ranks} ranks, milliseconds of a step: median (quartiles)")
    print(table(["", *ways], steps))
    print(f"\n{ranks} ranks, milliseconds added to {ALONE}: median (quartiles) over rounds")
    print(table(["", *ways[1:]], extras))
    print(f"\n{ranks} ranks, share of what {DDP} adds (range of nine of ten draws)")
    print(table(["", *ways[2:]], shares), flush=True)


def aims(most: dict[str, float], ranks: int, models: dict[str, Any]) -> list[Target]:
    return [
        Target(
            f"{ranks} ranks, {model}: {way} / {DDP}",
            share(result["rounds"], way),
            most[way],
            at_least=False,
        )
        for model, result in models.items()
        for way in ways_of(models)
        if way in most
    ]


if __name__ == "__main__":
    sys.exit(main())
