"""Rows drawn with replacement, by weights."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from nbelastic.data.plan.permutation import hash_places
from nbelastic.errors import OptionError

if TYPE_CHECKING:
    from nbelastic.data.plan.permutation import Rows

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
        drawn = hash_places(np.asarray(places, dtype=np.uint64), key) % self._ends[-1]
        found: Rows = np.searchsorted(self._ends, drawn, side="right").astype(np.int64)
        return found
