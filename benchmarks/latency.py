"""How long one operation of a user takes, for small tensors.

Compared are Horovod's operations (without a name, with one, several at once), torch.distributed
over our process group, and torch.distributed over torch's own Gloo. They take turns, sample by
sample, in the same processes. Prints microseconds and ratios with quartiles. Exits with 1 if a
target is missed, with 2 if something could not be measured.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

from benchmarks import mismatch
from benchmarks.allreduce import KB, MB, name_of, size_of
from benchmarks.command import options_of, run
from benchmarks.figures import Spread, Target, quartiles, table
from benchmarks.meet import Place, meet_over_gloo, place
from benchmarks.side_by_side import Crew

if TYPE_CHECKING:
    pass

SIZES = [4, 4 * KB, MB]
BACKENDS = ["shm", "gloo"]
SUM, NAMED, GROUPED = "hvd", "hvd, named", "hvd, 4 at once"
GROUP, TORCH = "our group", "torch's gloo"
OTHERS = ("broadcast", "allgather", "barrier")
PEERS = (SUM, NAMED, GROUPED, GROUP, TORCH)
ALL = (*PEERS, *(f"{kind}, {of}" for kind in OTHERS for of in (SUM, GROUP, TORCH)))
FLOAT_BYTES = 4
OVER_GROUP, OVER_UNNAMED, OVER_TORCH = 1.3, 1.5, 1.3
"""The aims: hvd to our group, a name to none, and over Gloo hvd to torch's own."""


def main() -> int:
    parser = options_of("latency", __doc__, rounds=15, budget=8.0)
    parser.add_argument("--sizes", type=size_of, nargs="+", default=SIZES, help="(4 4KB 1MB)")
    parser.add_argument("--backends", nargs="+", default=BACKENDS, help="(shm gloo)")
    parser.add_argument("--sample", type=float, default=0.05, help="seconds of each (0.05)")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.sample, options.budget = 5, 0.01, 2.0
    return run(options.ranks, options.json, functools.partial(measure, options), show, aims)


class Peers(mismatch.Peers):
    """A rank that carries out operations in all ways."""

    def __init__(self, rank: int, size: int, backend: str, place: Place) -> None:
        from nbelastic.elastic.ranks.context import current
        from nbelastic.torch.process_group import ElasticProcessGroup

        self._dist = meet_over_gloo(rank, size, place)
        super().__init__(rank, size, backend, place)
        self._group: Any = ElasticProcessGroup(current())

    def prepare(self, nbytes: int) -> None:
        """Allocate vectors of `nbytes` bytes."""
        hvd, dist, group = self._hvd, self._dist, self._group
        count = max(nbytes // FLOAT_BYTES, 1)
        vector = self._torch.zeros(count)
        several = [self._torch.zeros(max(count // 4, 1)) for _ in range(4)]
        many = [self._torch.zeros(count) for _ in range(self._communicator.size)]
        self._runs = {
            SUM: lambda: hvd.allreduce_(vector, op=hvd.Sum),
            NAMED: lambda: hvd.allreduce_(vector, op=hvd.Sum, name="a"),
            GROUPED: lambda: hvd.grouped_allreduce_(several, op=hvd.Sum),
            GROUP: lambda: group.allreduce([vector]).wait(),
            TORCH: lambda: dist.all_reduce(vector),
            f"broadcast, {SUM}": lambda: hvd.broadcast_(vector, 0),
            f"broadcast, {GROUP}": lambda: group.broadcast([vector]).wait(),
            f"broadcast, {TORCH}": lambda: dist.broadcast(vector, 0),
            f"allgather, {SUM}": lambda: hvd.allgather(vector),
            f"allgather, {GROUP}": lambda: group.allgather([many], [vector]).wait(),
            f"allgather, {TORCH}": lambda: dist.all_gather(many, vector),
            f"barrier, {SUM}": hvd.barrier,
            f"barrier, {GROUP}": lambda: group.barrier().wait(),
            f"barrier, {TORCH}": dist.barrier,
        }

    def close(self) -> None:
        super().close()
        self._dist.destroy_process_group()


def measure(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Return, by backend and size, the microseconds of each peer in each round."""
    world: dict[str, Any] = {}
    for backend in options.backends:
        with contextlib.ExitStack() as stack:
            met = (backend, stack.enter_context(place()))
            crew = stack.enter_context(Crew("benchmarks.latency:Peers", ranks, met))
            for size in options.sizes:
                crew.ask("prepare", size)
                world[f"{backend} {name_of(size)}"] = mismatch.by_turns(crew, options, ALL)
                print(f"{ranks} ranks, {backend}, {name_of(size)}: measured", flush=True)
    return world


def ratio(rows: dict[str, list[float]], peer: str, to: str) -> Spread:
    """Return how many times as long a peer takes as another, by rounds."""
    return quartiles([mine / its for mine, its in zip(rows[peer], rows[to], strict=True)])


def show(ranks: int, world: dict[str, Any]) -> None:
    print(f"\n{ranks} ranks, microseconds: median (quartiles)")
    lines = [[peer, *(quartiles(rows[peer]).show(0) for rows in world.values())] for peer in ALL]
    print(table(["", *world], lines), flush=True)


def aims(ranks: int, world: dict[str, Any]) -> list[Target]:
    """Return the targets at the sizes measured."""
    targets = []
    for name, rows in world.items():
        pairs = [(SUM, GROUP, OVER_GROUP), (NAMED, SUM, OVER_UNNAMED)]
        if name.startswith("gloo"):
            pairs.append((SUM, TORCH, OVER_TORCH))
        for peer, to, limit in pairs:
            share = ratio(rows, peer, to).median
            what = f"{ranks} ranks, {name}: {peer} / {to}"
            targets.append(Target(what, share, limit, at_least=False))
    return targets


if __name__ == "__main__":
    sys.exit(main())
