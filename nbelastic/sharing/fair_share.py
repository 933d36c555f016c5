"""Divide the slots of a cluster among its jobs."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .allocation import Allocation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .allocation import SlotGroup, Want


def shares(
    wants: Sequence[Want], capacity: Sequence[SlotGroup], now: float, patience: float = math.inf
) -> dict[str, int]:
    """Return how many slots each job should have.

    First come the floors, each all or nothing: those of running jobs, then by priority, then by
    age. What is left goes to the jobs that have their floor: by priority, and within a priority by
    weight. Ties go to the job that has the slot, then to the older one. A job that gets no floor
    has what it keeps; a new one has 0.

    A preemptible job gives its floor, but not what it keeps, to a higher priority. A job that has
    waited for `patience` seconds *closes the door*: no job that was submitted later starts before
    it. A preemptible job closes no door.

    Asked again with its outcome, it returns the same. `capacity` has the free slots and those that
    jobs hold; `now` is on the clock of the wants.
    """
    allocation = Allocation(wants, capacity)
    for want in wants:
        _raise(allocation, want, want.kept)
    allocation = _Floors(allocation, wants, now - patience).serve(capacity)
    served = [want for want in wants if allocation.count[want.job] >= want.least]
    for priority in sorted({want.priority for want in served}, reverse=True):
        _fill(allocation, [want for want in served if want.priority == priority])
    return dict(allocation.count)


def _raise(allocation: Allocation, want: Want, to: int) -> bool:
    """Raise a job to a number of slots; return whether it has them."""
    while allocation.count[want.job] < to:
        if not allocation.add(want.job):
            return False
    return True


@dataclass
class _Floors:
    """Serves floors, and takes them back from preemptible jobs for a higher priority."""

    allocation: Allocation
    wants: Sequence[Want]
    patient_until: float

    def serve(self, capacity: Sequence[SlotGroup]) -> Allocation:
        running = [want for want in self.wants if want.running]
        for want in sorted(running, key=lambda w: (w.preemptible, -w.priority, w.since, w.job)):
            self._try(want)
        waiting = [want for want in self.wants if not want.running]
        by_age = sorted(waiting, key=lambda w: (w.since, w.job))
        by_priority = sorted(by_age, key=lambda w: -w.priority)
        door = math.inf
        first = [want for want in by_age if self._impatient(want)]
        for want in [*first, *by_priority]:
            if want.since > door or self._try_with_victims(want):
                continue
            # A floor that does not fit even alone waits in vain, and holds no job up.
            if self._impatient(want) and _raise(Allocation([want], capacity), want, want.least):
                door = want.since
        for want in sorted(running, key=lambda w: (-w.priority, w.since, w.job)):
            self._try(want)  # what was taken back in vain
        return self.allocation

    def _impatient(self, want: Want) -> bool:
        since = want.waiting_since
        return since is not None and since <= self.patient_until and not want.preemptible

    def _try(self, want: Want) -> bool:
        """Give a job its floor or nothing of it."""
        before = self.allocation.count[want.job]
        if _raise(self.allocation, want, want.least):
            return True
        self.allocation.remove(want.job, self.allocation.count[want.job] - before)
        return False

    def _try_with_victims(self, want: Want) -> bool:
        """The same, and take floors of preemptible jobs of lower priority if need be."""
        if self._try(want):
            return True
        count = self.allocation.count
        victims = [
            each
            for each in self.wants
            if each.preemptible and each.priority < want.priority and count[each.job] > each.kept
        ]
        saved = self.allocation.save() if victims else self.allocation
        for victim in sorted(victims, key=lambda w: (w.priority, -w.since, w.job)):
            self.allocation.remove(victim.job, self.allocation.count[victim.job] - victim.kept)
            if self._try(want):
                return True
        self.allocation = saved
        return False


def _fill(allocation: Allocation, wants: Sequence[Want]) -> None:
    """Give free slots to jobs of one priority, each to the one with least by weight."""
    heap = [_turn(allocation, want) for want in wants if allocation.count[want.job] < want.most]
    heapq.heapify(heap)
    by_name = {want.job: want for want in wants}
    while heap:
        want = by_name[heap[0][-1]]
        if allocation.add(want.job) and allocation.count[want.job] < want.most:
            heapq.heapreplace(heap, _turn(allocation, want))
        else:
            heapq.heappop(heap)  # what it cannot have now it cannot have later


def _turn(allocation: Allocation, want: Want) -> tuple[float, bool, float, str]:
    count = allocation.count[want.job]
    return count / want.weight, want.has <= count, want.since, want.job
