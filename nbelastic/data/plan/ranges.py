"""Rows of units, dealt to streams and to windows of an epoch; pure.

A *unit* is what can be opened by itself: a row group, a record batch, a partition. A *stream* has
the rows of the micro-batches with one number, in their order: there are V streams. The units of an
epoch are permuted and laid in a line, which is cut into a contiguous part for each stream. A unit
at a cut belongs to two streams, as two *ranges*.

A stream is read in *windows*, runs of whole ranges, and the rows of a window are permuted. So the
shuffle buffer is a function of seed, epoch, stream and window. It has no state to track, to drain
or to lose: the step alone says which rows are done.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from nbelastic.data.plan.permutation import Permutation, Rows, mix

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from nbelastic.data.plan.dealing import BlockSchedule, Dealing

# Kinds of seeds, apart from those of the loader.
_UNITS, _WINDOW = 11, 12


@dataclass(frozen=True)
class RowRange:
    """Rows ``start … stop - 1`` of a unit."""

    unit: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Window:
    """Ranges of a stream that are read together, and whose rows are permuted."""

    stream: int
    number: int  # in the stream, from 0
    start: int  # place of its first row in the stream
    ranges: tuple[RowRange, ...]  # its rows, before they are permuted
    key: int | None  # of the permutation; None for none

    @cached_property
    def rows(self) -> int:
        """Number of its rows."""
        return sum(map(len, self.ranges))

    @property
    def places(self) -> range:
        """Places of its rows in the stream."""
        return range(self.start, self.stop)

    @property
    def stop(self) -> int:
        """Place in the stream after its last row."""
        return self.start + self.rows

    def order(self, first: int = 0, last: int | None = None) -> Rows:
        """Return the positions in the ranges, laid one after the other, of rows in their order."""
        places = np.arange(first, self.rows if last is None else last)
        return places if self.key is None else Permutation(self.rows, self.key).rows(places)


def cut(units: Sequence[int], sizes: Rows, lengths: Iterable[int]) -> list[list[RowRange]]:
    """Lay units in a line and cut it into parts of so many rows each.

    `sizes` are the rows of each unit, by its number. What is left after the last part is in none.
    """
    line = iter([RowRange(unit, 0, int(sizes[unit])) for unit in units if sizes[unit]])
    rest: RowRange | None = None
    parts = []
    for length in lengths:
        part: list[RowRange] = []
        missing = length
        while missing:
            whole = rest or next(line)
            middle = min(whole.stop, whole.start + missing)
            part.append(RowRange(whole.unit, whole.start, middle))
            missing -= len(part[-1])
            rest = RowRange(whole.unit, middle, whole.stop) if middle < whole.stop else None
        parts.append(part)
    return parts


class UnitStreams:
    """Streams of an epoch, and their windows.

    A window has at most `window_rows` rows. A larger range is a window by itself.
    """

    def __init__(self, sizes: Rows, dealing: Dealing, window_rows: int) -> None:
        self._sizes = sizes
        self._dealing = dealing
        self._window_rows = window_rows
        self._firsts = np.concatenate([[0], np.cumsum(sizes)])
        self._windows: dict[int, list[Window]] = {}

    @cached_property
    def _parts(self) -> list[list[RowRange]]:
        dealing = self._dealing
        units = np.arange(len(self._sizes))
        if dealing.shuffle:
            units = Permutation(len(units), self._key(_UNITS)).rows(units)
        return cut(units.tolist(), self._sizes, map(self.length, range(dealing.micro_batches)))

    def _key(self, *words: int) -> int:
        return mix(self._dealing.seed, self._dealing.epoch, *words)

    @property
    def steps(self) -> int:
        """Number of steps of the epoch."""
        return self._dealing.steps

    def place(self, step: int, stream: int) -> range:
        """Return the places in its stream of the rows of a micro-batch."""
        start = step * self._dealing.micro
        return range(start, start + len(self._dealing.places(step, stream)))

    def length(self, stream: int) -> int:
        """Return the number of rows of a stream.

        All have equally many rows in full steps. The rows of a smaller last step go to as few
        micro-batches as can have them, see :meth:`Dealing.places`.
        """
        last = self._dealing.steps - 1
        return self.place(last, stream).stop if last >= 0 else 0

    def windows(self, stream: int) -> list[Window]:
        """Return the windows of a stream."""
        found = self._windows.get(stream)
        if found is None:
            found = self._windows[stream] = list(self._windows_of(stream))
        return found

    def _windows_of(self, stream: int) -> Iterator[Window]:
        start = number = rows = 0
        ranges: list[RowRange] = []
        for each in self._parts[stream]:
            if ranges and rows + len(each) > self._window_rows:
                yield self._window(stream, number, start, ranges)
                start, number, rows, ranges = start + rows, number + 1, 0, []
            ranges.append(each)
            rows += len(each)
        if ranges:
            yield self._window(stream, number, start, ranges)

    def _window(self, stream: int, number: int, start: int, ranges: list[RowRange]) -> Window:
        key = self._key(_WINDOW, stream, number) if self._dealing.shuffle else None
        return Window(stream, number, start, tuple(ranges), key)

    def needed(self, first: int, blocks: BlockSchedule) -> Iterator[Window]:
        """Yield the windows of a rank's micro-batches from step `first` on, as they are needed.

        A stream that leaves the block gives up its window.
        """
        before = range(0)
        for steps, block in blocks.parts(first, self.steps):
            yield from self._needed_in(steps, block, before)
            before = block

    def _needed_in(self, steps: range, block: range, before: range) -> Iterator[Window]:
        """Yield the windows of a block to read in a run of steps; `before` lists streams held.

        Such a stream has had a window until the first of these steps, which may go on.
        """

        def of_stream(stream: int) -> Iterator[tuple[int, int, int, Window]]:
            done = self.place(steps.start, stream).start
            for window in self.windows(stream):
                is_there = stream in before and window.start < done
                if window.stop > done and not is_there:
                    step = max(window.start, done) // self._dealing.micro
                    yield step, stream, window.number, window

        for step, _, _, window in heapq.merge(*map(of_stream, block), key=lambda each: each[:3]):
            if step >= steps.stop:
                return
            yield window

    def rows(self, step: int, stream: int) -> Rows:
        """Return the rows of a micro-batch, numbered through all units in their own order."""
        places = self.place(step, stream)
        found = [np.zeros(0, dtype=np.int64)]
        for window in self.windows(stream):
            first, last = max(places.start, window.start), min(places.stop, window.stop)
            if first < last:
                ends = np.cumsum([len(each) for each in window.ranges])
                # Position 0 of a range, were all ranges to begin where its unit does.
                shift = [
                    self._firsts[each.unit] + each.start - (end - len(each))
                    for each, end in zip(window.ranges, ends.tolist(), strict=True)
                ]
                order = window.order(first - window.start, last - window.start)
                found.append(order + np.array(shift)[np.searchsorted(ends, order, side="right")])
        return np.concatenate(found)
