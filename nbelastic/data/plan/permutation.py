"""Rows at the places of an epoch: a permutation, or draws by weights; pure.

A shuffled list of ten million rows takes 80 MB and half a second to make, on every rank and after
every reset. A generalised Feistel network (Black and Rogaway, 2002) gives the row at any place in
constant memory instead.
"""

from __future__ import annotations

import hashlib
import math
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
    """Permutation of ``0 … length - 1``, determined by a key.

    It depends on integer arithmetic alone, so it is the same on all machines and for all versions
    of NumPy.
    """

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
    """Rows of an epoch, each drawn by itself: row i with a chance in proportion to its weight.

    The draw at a place depends on key, place and weights, in whole numbers, so it is the same on
    all machines. Two of equal weights are equal.
    """

    def __init__(self, weights: Any, rows: int) -> None:
        try:
            values = np.asarray(weights, dtype=np.float64)
        except (TypeError, ValueError):
            values = np.empty((0, 0))
        if values.shape != (rows,):
            raise OptionError(
                f"Loader(weights=…): must be {rows} numbers, one for each row; got "
                f"{'shape ' + str(list(values.shape)) if values.size else type(weights).__name__}"
            )
        if not np.isfinite(values).all() or (values < 0).any() or not values.any():
            raise OptionError(
                "Loader(weights=…): must be finite numbers, at least 0, and not all 0"
            )
        shares = np.floor(values * (_TOTAL / math.fsum(values))).astype(np.uint64)
        self._ends = np.cumsum(shares, dtype=np.uint64)
        self.digest = hashlib.blake2b(self._ends.tobytes(), digest_size=8).hexdigest()

    def __eq__(self, other: object) -> bool:
        """Return whether the other has the same weights."""
        return isinstance(other, Draws) and self.digest == other.digest

    def __hash__(self) -> int:
        """Return a hash of the weights."""
        return hash(self.digest)

    def rows(self, places: Any, key: int) -> Rows:
        """Return the rows drawn at `places`."""
        bits = _hash(np.asarray(places, dtype=np.uint64), np.uint64(mix(key)))
        drawn = _hash(bits, np.uint64(mix(key, 1))) % self._ends[-1]
        found: Rows = np.searchsorted(self._ends, drawn, side="right").astype(np.int64)
        return found
