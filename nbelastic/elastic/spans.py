"""Sets of whole numbers as sorted spans; pure.

What is left of an epoch is few spans, however many samples it has: ranks work through their shares
in order. So what ranks must agree on takes neither time nor memory that grows with the samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Iterable

Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Spans:
    """Numbers from each of `starts` until before that of `stops`; no two spans touch.

    Attributes
    ----------
    starts, stops : ndarray
        Bounds of the spans, in their order.
    """

    starts: Indices
    stops: Indices

    @staticmethod
    def of(pairs: Iterable[tuple[int, int]]) -> Spans:
        """Return the union of spans, which may overlap or be empty."""
        bounds = np.array([*pairs], dtype=np.int64).reshape(-1, 2)
        return Spans._union(bounds[:, 0], bounds[:, 1])

    @staticmethod
    def of_numbers(numbers: Indices) -> Spans:
        """Return a set of single numbers, in any order."""
        return Spans._union(numbers, numbers + 1)

    @staticmethod
    def _union(starts: Indices, stops: Indices) -> Spans:
        order = np.argsort(starts, kind="stable")
        order = order[starts[order] < stops[order]]
        starts, stops = starts[order], np.maximum.accumulate(stops[order])
        begins = np.append(True, starts[1:] > stops[:-1])[: len(starts)]
        ends = np.append(begins[1:], True)[: len(starts)]
        return Spans(starts[begins], stops[ends])

    @cached_property
    def _counts(self) -> Indices:
        """How many numbers there are up to the end of each span."""
        return np.cumsum(self.stops - self.starts)

    def __len__(self) -> int:
        """Return how many numbers there are."""
        return int(self._counts[-1]) if len(self.starts) else 0

    def __or__(self, other: Spans) -> Spans:
        return Spans._union(
            np.concatenate([self.starts, other.starts]), np.concatenate([self.stops, other.stops])
        )

    def __and__(self, other: Spans) -> Spans:
        length = int(max(self.stops.max(initial=0), other.stops.max(initial=0)))
        return (self.outside(length) | other.outside(length)).outside(length)

    def __sub__(self, other: Spans) -> Spans:
        return self & other.outside(int(self.stops.max(initial=0)))

    def outside(self, length: int) -> Spans:
        """Return the numbers from 0 until before `length` that are not here."""
        return Spans._union(
            np.append(0, self.stops), np.append(np.minimum(self.starts, length), length)
        )

    def at(self, places: Indices) -> Indices:
        """Return the numbers that have certain places in the order of all of them."""
        shift: Indices = self.stops - self._counts
        if len(shift) > 1:
            shift = shift[np.searchsorted(self._counts, places, "right")]
        return places + shift

    def within(self, places: Spans) -> Spans:
        """Return the numbers that have certain places, as :meth:`at` does."""
        counts = self._counts
        first = np.searchsorted(counts, places.starts, "right")
        last = np.searchsorted(counts, places.stops, "left")
        parts = last - first + 1
        which = np.repeat(np.arange(len(parts)), parts)
        span = np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts - first, parts)
        shift = (self.stops - counts)[span]
        begin = counts[span] - (self.stops - self.starts)[span]
        return Spans._union(
            np.maximum(places.starts[which], begin) + shift,
            np.minimum(places.stops[which], counts[span]) + shift,
        )

    def places_of(self, numbers: Indices) -> Indices:
        """Return the places of those of `numbers` that are here, in the order of all."""
        span = np.searchsorted(self.stops, numbers, "right")
        here = span < len(self.starts)
        here[here] = self.starts[span[here]] <= numbers[here]
        span = span[here]
        return numbers[here] - (self.stops - self._counts)[span]

    def numbers(self) -> Indices:
        """Return all numbers."""
        return self.at(np.arange(len(self)))
