"""Sums along a reduction tree beside ordinary ones, by the same communicator in one run.

For each transport, number of ranks and size: blocks that are a node each (8 leaves on 2, 4 or 8
ranks), and, on 3 ranks, blocks that are cut. The vectors lie in memory of any kind; over shared
memory also in the communicator's own. Peers take turns, sample by sample. Prints milliseconds and
ratios with their quartiles. Exits with 1 if a target is missed, with 2 if something could not be
measured.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.allreduce import iterations, ratio
from benchmarks.command import options_of, run
from benchmarks.figures import Target, quartiles, table
from benchmarks.meet import Place, meet, place
from benchmarks.side_by_side import Crew, Failed

LEAVES = 8
SIZES = {"1M": 1_000_000, "25M": 25_000_000}
TREE, ORDINARY = "tree", "ordinary"
OWN = ", own memory"
# Highest ratio of a sum along the tree to an ordinary one, where each rank has one node, and where
# some have several. Over Gloo those are as much more to send.
AIMS = {("shm", False): 1.03, ("shm", True): 1.15, ("gloo", False): 1.25}
LEAST_ROUNDS = 3


def main() -> int:
    parser = options_of("allreduce_tree", __doc__, rounds=15, budget=12.0)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="numbers of floats (all)")
    parser.add_argument("--sample", type=float, default=0.05, help="seconds of each (0.05)")
    parser.add_argument("--backends", nargs="+", default=["shm", "gloo"], help="(shm gloo)")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.sample, options.budget = 5, 0.01, 2.0
        options.sizes = options.sizes or ["1M"]
    return run(options.ranks, options.json, functools.partial(measure, options), show, aims)


class Peers:
    """A rank of both kinds of sums, over one communicator."""

    def __init__(self, rank: int, size: int, backend: str, place: Place) -> None:
        import torch

        from nbelastic.collectives.reduction_tree import Blocks

        torch.set_num_threads(1)
        self._torch: Any = torch
        self._communicator = meet(rank, size, backend, place)
        self._blocks = Blocks.even(LEAVES, size)
        self._cover = self._blocks.covers[rank]
        self._runs: dict[str, Callable[[], object]] = {}
        self._nodes: dict[str, list[Any]] = {}

    def prepare(self, count: int, with_own: bool) -> None:
        """Allocate vectors of `count` floats, and free all others."""
        self.forget()
        empty = functools.partial(self._torch.empty, dtype=self._torch.float32)
        self._add("", [empty(count) for _ in self._cover])
        if with_own:
            own = functools.partial(self._communicator.empty, dtype=self._torch.float32)
            self._add(OWN, [own(count) for _ in self._cover])

    def _add(self, where: str, vectors: list[Any]) -> None:
        communicator, blocks = self._communicator, self._blocks
        nodes = [[vector] for vector in vectors]
        self._nodes[where] = vectors
        self._runs[TREE + where] = lambda: communicator.allreduce_tree(nodes, blocks)
        self._runs[ORDINARY + where] = lambda: communicator.allreduce(vectors[0])

    def peers(self) -> list[str]:
        return list(self._runs)

    def check(self, peer: str) -> bool:
        """Return whether a sum is right; leaves zeros."""
        vectors = self._nodes[peer.removeprefix(TREE).removeprefix(ORDINARY)]
        ramp = np.arange(len(vectors[0]), dtype=np.float32) % 1021
        for vector, node in zip(vectors, self._cover, strict=True):
            vector.numpy()[:] = ramp * (node.end - node.begin if peer.startswith(TREE) else 1)
        self._runs[peer]()
        total = LEAVES if peer.startswith(TREE) else self._blocks.ranks
        found = vectors[0].numpy()
        right = np.array_equal(found, total * ramp)
        for vector in vectors:
            vector.zero_()
        return right

    def run(self, peer: str, count: int) -> None:
        operation = self._runs[peer]
        for _ in range(count):
            operation()

    def forget(self) -> None:
        self._runs, self._nodes = {}, {}

    def close(self) -> None:
        self.forget()
        self._communicator.close()


def measure(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Return, by transport and size, the milliseconds of each kind of sum in each round."""
    found: dict[str, Any] = {}
    for backend in options.backends:
        with contextlib.ExitStack() as stack:
            met = (backend, stack.enter_context(place()))
            crew = stack.enter_context(Crew("benchmarks.allreduce_tree:Peers", ranks, met))
            for name in options.sizes or SIZES:
                crew.ask("prepare", SIZES[name], backend == "shm")
                found[f"{backend} {name}"] = by_turns(crew, options)
                print(f"{ranks} ranks, {backend} {name}: measured", flush=True)
    return found


def by_turns(crew: Crew, options: argparse.Namespace) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {}
    for peer in crew.ask("peers")[0]:
        if not all(crew.ask("check", peer)):
            raise Failed(f"{peer}: a wrong sum")
        samples[peer] = [1e3 * crew.time("run", peer, 1)]
    order = list(samples)
    enough = time.monotonic() + options.budget
    done = 0
    while done < options.rounds and (done < LEAST_ROUNDS or time.monotonic() < enough):
        for peer in order:
            count = iterations(samples[peer], options.sample)
            samples[peer].append(1e3 * crew.time("run", peer, count) / count)
        order = [*order[1:], order[0]]
        done += 1
    return {peer: values[1:] for peer, values in samples.items()}


def show(ranks: int, worlds: dict[str, Any]) -> None:
    print(f"\n{ranks} ranks: milliseconds, ratio to the ordinary sum; median (quartiles)")
    rows = [
        [
            f"{name}{where}",
            quartiles(samples[TREE + where]).show(2),
            quartiles(samples[ORDINARY + where]).show(2),
            ratio(samples, TREE + where, ORDINARY + where).show(2),
        ]
        for name, samples in worlds.items()
        for where in ("", OWN)
        if TREE + where in samples
    ]
    print(table(["", TREE, ORDINARY, "ratio"], rows), flush=True)


def aims(ranks: int, worlds: dict[str, Any]) -> list[Target]:
    """Return the targets: blocks of one node each are to cost no more than ordinary sums."""
    kinds = {name: (name.partition(" ")[0], LEAVES % ranks != 0) for name in worlds}
    return [
        Target(
            f"{ranks} ranks, {name}: tree / ordinary",
            ratio(samples, TREE, ORDINARY).median,
            AIMS[kinds[name]],
            False,
        )
        for name, samples in worlds.items()
        if kinds[name] in AIMS
    ]


if __name__ == "__main__":
    sys.exit(main())
