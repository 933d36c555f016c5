"""Units of unknown length, leased to the streams of an epoch; pure.

A *unit* is what can be read from its start: a file of lines, a generator, a queue's partition. How
many rows it has is known once it has ended. A *stream* has the rows of the micro-batches with one
number, so there are V streams. Each reads one unit at a time, its *lease*. When units end, the
streams that they have left get the next units, in the order of the streams' numbers. A stream for
which there is no unit has no rows any more. When no stream has a lease, the epoch is over.

===================  =================================================================
in the commit        the table, and the step: all micro-batches of a lease but its last
                     are full, so the step says how many of its rows are done
owner                each rank has the whole table, and reads the units of its block
a unit ends          its rank knows that with the unit's last row. At the end of each
                     step ranks exchange whether any has ended, and if so, which
a rank fails         table and step go back to the commit. The rank that takes the
                     stream over reads its unit from the last mark, up to the step
ranks join, leave    the same from a commit at the present step, for which ranks exchange marks
                     where they are; so nothing is read again
another size         the table has no number of ranks in it
uneven end           streams without a lease have weight 0, until all have ended
===================  =================================================================
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Lease:
    """A unit that a stream reads."""

    unit: int  # its place in the order of the epoch
    begun: int  # step in which the stream has its first rows of it


@dataclass(frozen=True)
class LeaseTable:
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
            following = min(following + 1, self.units)
        return dataclasses.replace(self, leases=tuple(leases), next=following, finished=finished)

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

    def to_text(self) -> str:
        """Return the table as a text, which states have in each commit."""
        return json.dumps(dataclasses.astuple(self))

    @classmethod
    def from_text(cls, text: str) -> LeaseTable:
        """Return the table that :meth:`to_text` has written."""
        epoch, units, leases, following, finished = json.loads(text)
        read = tuple(None if each is None else Lease(*each) for each in leases)
        return cls(epoch, units, read, following, finished)
