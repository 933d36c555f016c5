"""Units dealt, or leased, to the streams of an epoch; pure.

A *unit* is what can be opened by itself: a row group, a partition, a file of lines, a queue. A
*stream* has the rows of the micro-batches with one number, in their order: there are V streams.
docs/design/gradients.md says how units of known length are cut into streams and *windows*. Both
have no state to track, to drain or to lose: the step alone says which rows are done.

How many rows a unit of unknown length has is known once it has ended. Each stream reads one such
unit at a time, its *lease*. When units end, the streams that they have left get the next units, in
the order of the streams' numbers. A stream for which there is no unit has no rows any more. When no
stream has a lease, the epoch is over.

===================  =================================================================
in the commit        the table, and the step: all micro-batches of a lease but its last
                     are full, so the step says how many of its rows are done
owner                each rank has the whole table, and reads the units of its block
a unit ends          its rank knows that with the unit's last row. At the end of each
                     step ranks exchange whether any has ended, and if so, which
a rank fails         table and step go back to the commit. The rank that takes the
                     stream over reads its unit from the last mark, up to the step
ranks join, leave    the same from a commit at the present step
another size         the table has no number of ranks in it
uneven end           streams without a lease have weight 0, until all have ended
===================  =================================================================
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from nbelastic.data.plan.dealing import Dealing, Permutation, Rows, mix

# Kinds of seeds, apart from those of the loader.
_UNITS, _WINDOW = 11, 12


@dataclass(frozen=True)
class Window:
    """Ranges of a stream that are read together, and whose rows are permuted."""

    stream: int
    number: int  # in the stream, from 0
    start: int  # place of its first row in the stream
    ranges: tuple[tuple[int, range], ...]  # units, each with its rows, before they are permuted
    key: int | None  # of the permutation; None for none

    @cached_property
    def rows(self) -> int:
        """Number of its rows."""
        return sum(len(rows) for _, rows in self.ranges)

    @property
    def stop(self) -> int:
        """Place in the stream after its last row."""
        return self.start + self.rows

    def order(self) -> Rows:
        """Return the positions in the ranges, laid one after the other, of rows in their order."""
        places = np.arange(self.rows)
        return places if self.key is None else Permutation(self.rows, self.key).rows(places)


class UnitStreams:
    """Streams of an epoch, and their windows of `window_rows` or of one larger range."""

    def __init__(self, sizes: Rows, dealing: Dealing, window_rows: int) -> None:
        self._sizes = sizes
        self._dealing = dealing
        self._window_rows = window_rows

    def _key(self, *words: int) -> int:
        return mix(self._dealing.seed, self._dealing.epoch, *words)

    def place(self, step: int, stream: int) -> range:
        """Return the places in its stream of the rows of a micro-batch."""
        start = step * self._dealing.micro
        return range(start, start + len(self._dealing.places(step, stream)))

    def length(self, stream: int) -> int:
        """Return the number of rows of a stream."""
        last = self._dealing.steps - 1
        return self.place(last, stream).stop if last >= 0 else 0

    @cached_property
    def windows(self) -> list[list[Window]]:
        """The windows of each stream: units are laid in a line, and cut into the streams."""
        units = np.arange(len(self._sizes))
        if self._dealing.shuffle:
            units = Permutation(len(units), self._key(_UNITS)).rows(units)
        ends = np.cumsum(self._sizes[units])
        streams, begin = [], 0
        for stream in range(self._dealing.micro_batches):
            end = begin + self.length(stream)
            first, last = np.searchsorted(ends, [begin, end], side="right")
            part, its = [], slice(first, last + 1)
            for unit, stop in zip(units[its].tolist(), ends[its].tolist(), strict=True):
                start = stop - int(self._sizes[unit])
                part.append((unit, range(max(begin - start, 0), min(end, stop) - start)))
            streams.append([*self._windows_of(stream, [each for each in part if each[1]])])
            begin = end
        return streams

    def _windows_of(self, stream: int, part: list[tuple[int, range]]) -> Iterator[Window]:
        ends = [0, *itertools.accumulate(len(rows) for _, rows in part)]
        first = number = 0
        while first < len(part):
            last = max(bisect.bisect(ends, ends[first] + self._window_rows) - 1, first + 1)
            key = self._key(_WINDOW, stream, number) if self._dealing.shuffle else None
            yield Window(stream, number, ends[first], tuple(part[first:last]), key)
            first, number = last, number + 1

    def needed(self, first: int, block: range) -> list[Window]:
        """Return the windows of a block's micro-batches from step `first` on, as needed."""
        micro = self._dealing.micro
        done = first * micro  # rows of each stream
        left = [each for stream in block for each in self.windows[stream] if each.stop > done]
        return sorted(left, key=lambda w: (max(w.start, done) // micro, w.stream, w.number))

    def pieces(self, step: int, stream: int) -> Iterator[tuple[Window, int, int]]:
        """Yield the windows of a micro-batch, each with the first and last of its rows in it."""
        places, windows = self.place(step, stream), self.windows[stream]
        index = bisect.bisect(windows, places.start, key=operator.attrgetter("start")) - 1
        while places and index < len(windows) and windows[index].start < places.stop:
            window = windows[index]
            first, last = max(places.start, window.start), min(places.stop, window.stop)
            yield window, first - window.start, last - window.start
            index += 1


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """A unit that a stream reads."""

    unit: int  # its place in the order of the epoch
    begun: int  # step in which the stream has its first rows of it


class LeaseTable(msgspec.Struct, frozen=True, array_like=True):
    """Leases of all streams between two steps."""

    epoch: int
    units: int  # of the epoch
    leases: tuple[Lease | None, ...]  # of each stream
    next: int  # the unit that is leased next, if there is one
    finished: int = 0  # rows of the units that have ended

    @classmethod
    def first(cls, epoch: int, units: int, streams: int) -> LeaseTable:
        """Return the table at the start of an epoch: stream v has unit v."""
        leases = tuple(Lease(v, 0) if v < units else None for v in range(streams))
        return cls(epoch, units, leases, min(units, streams))

    def after(self, step: int, ended: Mapping[int, int], micro: int) -> LeaseTable:
        """Return the table after a step, in which units of some streams have ended.

        `ended` has for each of these the rows of its micro-batch; a full one has `micro`.
        """
        leases, following, finished = list(self.leases), self.next, self.finished
        for stream in sorted(ended):
            finished += self.position(step, stream, micro) + ended[stream]
            leases[stream] = Lease(following, step + 1) if following < self.units else None
            following += 1
        return LeaseTable(self.epoch, self.units, tuple(leases), following, finished)

    def position(self, step: int, stream: int, micro: int) -> int:
        """Return how many rows of a stream's unit come before a step."""
        lease = self.leases[stream]
        return 0 if lease is None else (step - lease.begun) * micro

    def rows_before(self, step: int, micro: int) -> int:
        """Return how many rows of the epoch come before the step that the table is for."""
        streams = range(len(self.leases))
        return self.finished + sum(self.position(step, stream, micro) for stream in streams)

    @property
    def is_over(self) -> bool:
        """Whether the epoch is over."""
        return not any(self.leases)
