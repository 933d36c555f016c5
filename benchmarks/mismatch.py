"""What it costs that ranks compare an operation before data moves.

Compared are ``hvd.allreduce_`` as it is, the same without the comparison (each rank takes for
granted that the others do the same), and the comparison alone. They take turns, sample by sample,
in the same processes. Prints microseconds, and what the comparison adds, with quartiles. Exits with
1 if a target is missed, with 2 if something could not be measured.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.allreduce import KB, MB, iterations, name_of, size_of
from benchmarks.command import options_of, run
from benchmarks.figures import Spread, Target, quartiles, table
from benchmarks.meet import Place, meet, place
from benchmarks.side_by_side import Crew

if TYPE_CHECKING:
    from nbelastic.collectives import Communicator

SIZES = [4 * KB, 25 * MB]
BACKENDS = ["shm", "gloo"]
ON, OFF, ALONE = "compared", "not compared", "comparison alone"
PEERS = (ON, OFF, ALONE)
FLOAT_BYTES = 4
LARGE = 25 * MB
MOST_SHARE = 1.03
MOST_MICROSECONDS = 1.0
"""The aims: at 25 MB, and through shared memory at 4 KB."""


def main() -> int:
    parser = options_of("mismatch", __doc__, rounds=15, budget=5.0)
    parser.add_argument("--sizes", type=size_of, nargs="+", default=SIZES, help="(4KB 25MB)")
    parser.add_argument("--backends", nargs="+", default=BACKENDS, help="(shm gloo)")
    parser.add_argument("--sample", type=float, default=0.05, help="seconds of each (0.05)")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.sample, options.budget = 5, 0.01, 1.0
    return run(options.ranks, options.json, functools.partial(measure, options), show, aims)


class Peers:
    """A rank that sums a vector, with and without the comparison."""

    def __init__(self, rank: int, size: int, backend: str, place: Place) -> None:
        import torch

        import nbelastic.torch as hvd
        from nbelastic.elastic.ranks.context import Context, activate

        torch.set_num_threads(1)
        self._torch: Any = torch
        self._hvd: Any = hvd
        self._communicator: Any = meet(rank, size, backend, place)
        context = Context()
        context.rank = context.local_rank = rank
        context.size = context.local_size = size
        context._communicator = self._communicator
        self._active = contextlib.ExitStack()
        self._active.enter_context(activate(context))
        self._runs: dict[str, Callable[[], object]] = {}

    def prepare(self, nbytes: int) -> None:
        """Allocate a vector of `nbytes` bytes."""
        vector = self._torch.zeros(nbytes // FLOAT_BYTES)
        communicator: Communicator = self._communicator
        text = f"allreduce of float32[{vector.numel()}], Sum"

        def off() -> None:
            with trusting(self._communicator):
                self._hvd.allreduce_(vector, op=self._hvd.Sum)

        def on() -> None:
            with contextlib.nullcontext():  # as much to enter and leave
                self._hvd.allreduce_(vector, op=self._hvd.Sum)

        self._runs = {ON: on, OFF: off, ALONE: lambda: communicator.agree(text)}

    def run(self, peer: str, count: int) -> None:
        operation = self._runs[peer]
        for _ in range(count):
            operation()

    def close(self) -> None:
        self._active.close()
        self._communicator.close()


class trusting:  # noqa: N801 (a function, but for the time that a generator takes)
    """Have a communicator take for granted that all ranks are about to do the same."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator

    def __enter__(self) -> None:
        answer = [0] * self._communicator.size
        self._communicator.agree = lambda *_, **__: answer

    def __exit__(self, *_: object) -> None:
        del self._communicator.agree


def measure(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Return, by backend and size, the microseconds of each peer in each round."""
    world: dict[str, Any] = {}
    for backend in options.backends:
        with contextlib.ExitStack() as stack:
            met = (backend, stack.enter_context(place()))
            crew = stack.enter_context(Crew("benchmarks.mismatch:Peers", ranks, met))
            for size in options.sizes:
                crew.ask("prepare", size)
                world[f"{backend} {name_of(size)}"] = by_turns(crew, options)
                print(f"{ranks} ranks, {backend}, {name_of(size)}: measured", flush=True)
    return world


def by_turns(
    crew: Crew, options: argparse.Namespace, peers: Sequence[str] = PEERS
) -> dict[str, list[float]]:
    """Return the microseconds of one operation by each peer, in each round."""
    samples = {peer: [1e3 * crew.time("run", peer, 3) / 3] for peer in peers}
    order = list(peers)
    enough = time.monotonic() + options.budget
    for done in range(options.rounds):
        if done >= 3 and time.monotonic() > enough:
            break
        for peer in order:
            count = iterations(samples[peer], options.sample)
            samples[peer].append(1e3 * crew.time("run", peer, count) / count)
        order = [*order[1:], order[0]]
    return {peer: [1e3 * each for each in values[1:]] for peer, values in samples.items()}


def added(rows: dict[str, list[float]]) -> Spread:
    """Return how many microseconds the comparison adds, by rounds."""
    return quartiles([on - off for on, off in zip(rows[ON], rows[OFF], strict=True)])


def ratio(rows: dict[str, list[float]]) -> Spread:
    """Return how many times as long an operation takes with the comparison, by rounds."""
    return quartiles([on / off for on, off in zip(rows[ON], rows[OFF], strict=True)])


def show(ranks: int, world: dict[str, Any]) -> None:
    print(f"\n{ranks} ranks, microseconds: median (quartiles)")
    lines = [
        [
            name,
            *(quartiles(rows[peer]).show() for peer in PEERS),
            added(rows).show(),
            ratio(rows).show(2),
        ]
        for name, rows in world.items()
    ]
    print(table(["", *PEERS, "added", f"{ON} / {OFF}"], lines), flush=True)


def aims(ranks: int, world: dict[str, Any]) -> list[Target]:
    """Return the targets at the sizes measured."""
    targets = []
    for name, rows in world.items():
        backend, _, size = name.partition(" ")
        if size_of(size.replace(" ", "")) >= LARGE:
            share = ratio(rows).median
            targets.append(
                Target(f"{ranks} ranks, {name}: {ON} / {OFF}", share, MOST_SHARE, at_least=False)
            )
        elif backend == "shm":
            more = added(rows).median
            targets.append(
                Target(f"{ranks} ranks, {name}: µs added", more, MOST_MICROSECONDS, at_least=False)
            )
    return targets


if __name__ == "__main__":
    sys.exit(main())
