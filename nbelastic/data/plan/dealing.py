"""Rows of each micro-batch of each step of an epoch; pure.

An epoch is a sequence of *steps*, and a step consists of V *micro-batches*, which have the numbers
``0 … V - 1``. The rows of a micro-batch are a function of seed, epoch, step and number. The number
of ranks does not occur in it: ranks share out the numbers in contiguous blocks.

A shuffled list of ten million rows takes 80 MB and half a second to make, on every rank and after
every reset. A generalised Feistel network (Black and Rogaway, 2002) gives the row at any place in
constant memory instead.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbelastic.errors import OptionError

Rows = NDArray[np.int64]

ROUNDS = 8
_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def mix(*words: int) -> int:
    """Return a 64-bit number that depends on all bits of all `words` (splitmix64)."""
    value = 0
    for word in words:
        value = (value + (word & _MASK) + _STEP) & _MASK
        value = ((value ^ (value >> 30)) * _FIRST) & _MASK
        value = ((value ^ (value >> 27)) * _SECOND) & _MASK
        value ^= value >> 31
    return value


class Permutation:
    """Permutation of ``0 … length - 1`` by a key, in integers alone: on all machines the same."""

    def __init__(self, length: int, key: int) -> None:
        self.length = length
        # Places are cells of a grid that has hardly more cells than there are rows.
        self._high = max(1, math.isqrt(max(length - 1, 0)) + 1)
        self._low = max(1, -(-length // self._high))
        self._keys = [np.uint64(mix(key, number)) for number in range(ROUNDS)]

    def rows(self, places: Any) -> Rows:
        """Return the rows at `places`, which are whole numbers from 0 to ``length - 1``."""
        found = np.array(places, dtype=np.uint64)
        beyond = np.ones(found.shape, dtype=np.bool_)
        while beyond.any():  # a cell without a row is passed through again: still a permutation
            found[beyond] = self._pass(found[beyond])
            beyond = found >= np.uint64(self.length)
        return found.astype(np.int64)

    def _pass(self, cells: NDArray[np.uint64]) -> NDArray[np.uint64]:
        high, low = np.divmod(cells, np.uint64(self._low))
        for number, key in enumerate(self._keys):
            if number % 2:
                low = (low + _hash(high, key) % np.uint64(self._low)) % np.uint64(self._low)
            else:
                high = (high + _hash(low, key) % np.uint64(self._high)) % np.uint64(self._high)
        result: NDArray[np.uint64] = high * np.uint64(self._low) + low
        return result


def _hash(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Return 64 bits for each value: splitmix64, on arrays, where overflow is no error."""
    mixed = (values + np.uint64(1)) * np.uint64(_STEP) ^ key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
    return mixed ^ (mixed >> np.uint64(31))


_TOTAL = 1 << 62


class Draws:
    """Rows of an epoch, each drawn by itself: row i with a chance in proportion to its weight."""

    def __init__(self, weights: Any, rows: int) -> None:
        values = np.asarray(weights, dtype=np.float64)
        if values.shape != (rows,):
            raise OptionError(
                f"Loader(weights=…): must be {rows} numbers, one for each row; got shape "
                f"{list(values.shape)}"
            )
        if not np.isfinite(values).all() or (values < 0).any() or not values.any():
            raise OptionError(
                "Loader(weights=…): must be finite numbers, at least 0, and not all 0"
            )
        shares = np.floor(values * (_TOTAL / math.fsum(values))).astype(np.uint64)
        self._ends = np.cumsum(shares, dtype=np.uint64)
        self.digest = hashlib.blake2b(self._ends.tobytes(), digest_size=8).hexdigest()

    def rows(self, places: Any, key: int) -> Rows:
        """Return the rows drawn at `places`."""
        bits = _hash(np.asarray(places, dtype=np.uint64), np.uint64(mix(key)))
        drawn = _hash(bits, np.uint64(mix(key, 1))) % self._ends[-1]
        found: Rows = np.searchsorted(self._ends, drawn, side="right").astype(np.int64)
        return found


DIGESTS = 1 << 52  # what a float64 holds
_DRAWING = 3  # kind of keys, apart from that of the order


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

    def digest(self, *more: int) -> int:
        """Return a digest of the rows' order and `more`, for all ranks to agree on."""
        words = [self.seed, self.length, self.shuffle, self.drop_last, *more]
        if self.limit is not None:
            words.append(self.limit)
        if self.draws is not None:
            words.append(int(self.draws.digest, 16))
        return mix(*words) % DIGESTS

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
        if part * self.micro_batches // count != number:
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
