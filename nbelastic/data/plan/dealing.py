"""Rows of each micro-batch of each step of an epoch; pure.

An epoch is a sequence of *steps*, and a step consists of V *micro-batches*, which have the numbers
``0 … V - 1``. The rows of a micro-batch are a function of seed, epoch, step and number. The number
of ranks does not occur in it: ranks share out the numbers in contiguous blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from nbelastic.data.plan.permutation import Permutation, Rows, mix

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbelastic.data.plan.permutation import Draws


def block_of(rank: int, size: int, micro_batches: int) -> range:
    """Return the micro-batches of a rank: one of `size` blocks, as equal as possible.

    There may be fewer micro-batches than ranks. Then some blocks are empty.
    """
    return range(rank * micro_batches // size, (rank + 1) * micro_batches // size)


def imbalance(size: int, micro_batches: int) -> float:
    """Return the time of a step, relative to a step of equal blocks."""
    return -(-micro_batches // size) * size / micro_batches


@dataclass(frozen=True)
class BlockSchedule:
    """Micro-batches of a rank in each step: one block, and from a step on perhaps another."""

    now: range
    change: int | None = None  # the step from which on it is another; None for none
    later: range = range(0)

    def at(self, step: int) -> range:
        """Return the block of a step."""
        return self.now if self.change is None or step < self.change else self.later

    def parts(self, first: int, end: int) -> Iterator[tuple[range, range]]:
        """Yield runs of steps, from `first` until before `end`, each with the block of the run."""
        middle = end if self.change is None else min(max(self.change, first), end)
        for run in (range(first, middle), range(middle, end)):
            if run:
                yield run, self.at(run.start)


_DRAWING = 3
"""Kind of keys, apart from that of the order."""


@dataclass(frozen=True)
class Dealing:
    """Rows of an epoch, dealt to the micro-batches of its steps."""

    length: int  # rows in the source
    micro: int  # rows of a micro-batch
    micro_batches: int  # of a step: V
    epoch: int = 0
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False  # leave out the rows that do not fill a step
    limit: int | None = None  # most steps of an epoch; None for all that its rows make
    draws: Draws | None = None  # of rows with replacement; None where each is dealt once

    @property
    def global_batch(self) -> int:
        """Rows of a full step."""
        return self.micro * self.micro_batches

    @property
    def steps(self) -> int:
        """Number of steps of the epoch."""
        full, rest = divmod(self.length, self.global_batch)
        steps = full + (rest > 0 and not self.drop_last)
        return steps if self.limit is None else min(steps, self.limit)

    @property
    def rows_of_epoch(self) -> int:
        """Rows of all steps of the epoch."""
        return min(self.length, self.steps * self.global_batch)

    @cached_property
    def _permutation(self) -> Permutation:
        return Permutation(self.length, mix(self.seed, self.epoch))

    def rows_in(self, step: int) -> int:
        """Return the number of rows of a step; the last may have fewer."""
        return min(self.global_batch, self.length - step * self.global_batch)

    def places(self, step: int, number: int) -> range:
        """Return the places of a micro-batch in the order of the epoch.

        The rows of a smaller last step go to as few micro-batches as can have them, in about equal
        parts, because batch norm works badly on few rows. These have numbers far from each other,
        so that they are on different ranks. The other micro-batches are empty.
        """
        first, rows = step * self.global_batch, self.rows_in(step)
        if rows == self.global_batch:
            start = first + number * self.micro
            return range(start, start + self.micro)
        count = -(-rows // self.micro)
        part = -(-number * count // self.micro_batches)
        if part == count or part * self.micro_batches // count != number:
            return range(first, first)
        return range(first + part * rows // count, first + (part + 1) * rows // count)

    def rows(self, step: int, number: int) -> Rows:
        """Return the rows of a micro-batch, by their indices in the source."""
        places = self.places(step, number)
        if self.draws is not None:
            key = mix(self.seed, self.epoch, _DRAWING)
            return self.draws.rows(np.arange(places.start, places.stop), key)
        if not self.shuffle:
            return np.arange(places.start, places.stop, dtype=np.int64)
        return self._permutation.rows(np.arange(places.start, places.stop))

    def weights(self, step: int) -> list[int]:
        """Return the number of rows in each micro-batch of a step."""
        return [len(self.places(step, number)) for number in range(self.micro_batches)]
