"""Draw faults at random, from a seed."""

from __future__ import annotations

import random as dice
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbelastic.errors import OptionError

from .faults import Fault

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = (
    "kill",
    "crash",
    "crash_server",
    "stop",
    "close",
    "restart",
    "fail",
    "memory",
    "hang",
    "slow",
    "disk",
    "partition",
    "pause",
)
"""What :func:`random` chooses from. ``leave`` is not among it: it makes the cluster smaller."""

SEVERAL = 0.15
"""How often several are hit at once."""


@dataclass(frozen=True)
class RandomFault:
    """The next fault; `where` is how far down the list of ranks, from 0 to 1."""

    wait: float
    kind: str
    where: float
    length: float
    together: bool

    def fault(self, rank: int) -> Fault:
        """Return the fault, for a rank."""
        if self.kind == "pause":
            return Fault(kind="pause", seconds=1.0 + 3.0 * self.length)
        if self.kind == "stop":  # half of them are continued, soon or late
            seconds = 0.0 if self.length < 0.5 else 4.0 * (self.length - 0.5)
            return Fault(kind="stop", rank=rank, seconds=seconds)
        if self.kind == "slow":
            return Fault(kind="slow", rank=rank, seconds=0.5 * self.length, steps=5)
        if self.kind == "disk":
            return Fault(kind="disk", rank=rank, seconds=1.0 + 2.0 * self.length)
        forming = self.kind in ("kill", "crash", "crash_server", "close") and self.length < 0.25
        return Fault(kind=self.kind, rank=rank, forming=forming)


@dataclass(frozen=True)
class RandomPlan:
    """Random faults; made by :func:`random`."""

    seed: int
    every: float
    kinds: tuple[str, ...] = KINDS

    def draws(self) -> Iterator[RandomFault]:
        """Return what happens, in order: the same for the same seed."""
        source = dice.Random(self.seed)
        together = False
        while True:
            wait = 0.0 if together else self.every * source.uniform(0.5, 1.5)
            kind = source.choice(self.kinds)
            where, length = source.random(), source.random()
            together = not together and source.random() < SEVERAL
            yield RandomFault(wait, kind, where, length, together)


def random(seed: int, every: float, kinds: tuple[str, ...] = KINDS) -> RandomPlan:
    """Inject faults at random, for as long as the job runs.

    A rank is hit only while two others that hold the state are well: what this is for is to see a
    job get through, not to see it start over.

    Parameters
    ----------
    seed : int
        The same seed gives the same faults in the same order.
    every : float
        Seconds between two of them, in the mean.
    kinds : tuple of str, default KINDS
        What to choose from.
    """
    if not every > 0:
        raise OptionError(f"every={every!r}: must be above 0")
    unknown = set(kinds) - {*KINDS, "leave"}
    if unknown or not kinds:
        raise OptionError(f"kinds={kinds!r}: must be some of {(*KINDS, 'leave')}")
    return RandomPlan(seed, every, tuple(kinds))
