"""Divide the slots of a cluster among its jobs: how many, when, and which.

Slots are matched with jobs: a job that could use others makes way for one that cannot (augmenting
paths in a flow network).
"""

from __future__ import annotations

import copy
import heapq
import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Want:
    """What a job wants of the slots of its cluster."""

    job: str  # name
    since: float = 0.0  # when it was submitted
    least: int = 1  # its floor: with fewer slots it cannot train
    # Most slots that it can use, at least `least`; infinite: all that there are.
    most: float = math.inf
    kept: int = 0  # slots that it holds and that are not taken from it, at most `most`
    has: int = 0  # slots that it has, by which ties are decided
    running: bool = False  # it has had its floor, or has a state that can be lost
    waiting_since: float | None = None  # since when it has been below its floor; None: it is not
    priority: int = 0  # jobs of a higher priority are served first
    weight: float = 1.0  # its part of what a priority has, relative to others; above 0
    preemptible: bool = False  # a job of a higher priority may take slots of its floor
    per_host: int | None = None  # most slots on one host; None: no limit


@dataclass(frozen=True)
class SlotGroup:
    """Equivalent slots: on the same host, and of use to the same jobs."""

    size: int  # number of the slots
    host: str = ""
    jobs: frozenset[str] | None = None  # that can use them; None: all


Node: TypeAlias = "str | tuple[str, str] | int"  # a job, a job on a host, or a group of slots


class Allocation:
    """Slots given to jobs so far; at first none."""

    def __init__(self, wants: Sequence[Want], groups: Sequence[SlotGroup]) -> None:
        self.count = {want.job: 0 for want in wants}
        self.used: list[Counter[str]] = [Counter() for _ in groups]  # slots of each job, by group
        self._given = groups
        self._free = [group.size for group in groups]
        self._cap = {want.job: want.per_host for want in wants}
        self._on_host: Counter[tuple[str, str]] = Counter()
        # Groups that a job can use, by host, the scarce ones first.
        self._groups: dict[str, dict[str, list[int]]] = {want.job: {} for want in wants}
        able = [math.inf if group.jobs is None else len(group.jobs) for group in groups]
        for number in sorted(range(len(groups)), key=able.__getitem__):
            allowed, host = groups[number].jobs, groups[number].host
            for job in self.count if allowed is None else allowed & self.count.keys():
                self._groups[job].setdefault(host, []).append(number)

    def give(self, job: str, group: int) -> bool:
        """Give a job a free slot of a group; return False if impossible."""
        allowed, host = self._given[group].jobs, self._given[group].host
        able = (allowed is None or job in allowed) and self._may_have(job, host)
        if not self._free[group] or not able:
            return False
        self._free[group] -= 1
        self.used[group][job] += 1
        self._on_host[job, host] += 1
        self.count[job] += 1
        return True

    def add(self, job: str) -> bool:
        """Give a job another slot; return False if no slot can be freed."""
        if not any(self._free):
            return False
        for groups in self._groups[job].values():
            for group in groups:
                if self._free[group] and self.give(job, group):
                    return True  # no other job has to make way
        before: dict[Node, tuple[Node, Counter[Any], Any, int] | None] = {job: None}
        queue: deque[Node] = deque([job])
        while queue:
            node = queue.popleft()
            if isinstance(node, int) and self._free[node]:
                self._free[node] -= 1
                self.count[job] += 1
                while (step := before[node]) is not None:
                    node, counts, key, by = step
                    counts[key] += by
                return True
            for following, counts, key, by in self._edges(node):
                if following not in before:
                    before[following] = node, counts, key, by
                    queue.append(following)
        return False

    def _edges(self, node: Node) -> Iterator[tuple[Node, Counter[Any], Any, int]]:
        """Yield the next nodes on the way to a free slot, each with the change of a count."""
        if isinstance(node, int):
            used, host = self.used[node], self._given[node].host
            yield from (((job, host), used, job, -1) for job, number in used.items() if number)
        elif isinstance(node, str):
            for host in self._groups[node]:
                if self._may_have(node, host):
                    yield (node, host), self._on_host, (node, host), 1
        else:
            job, host = node
            yield from ((each, self.used[each], job, 1) for each in self._groups[job][host])
            if self._on_host[node]:
                yield job, self._on_host, node, -1

    def _may_have(self, job: str, host: str) -> bool:
        cap = self._cap[job]
        return cap is None or self._on_host[job, host] < cap

    def remove(self, job: str, number: int) -> None:
        """Take so many slots back from a job."""
        for group, used in enumerate(self.used):
            if taken := min(number, used[job]):
                used[job] -= taken
                self._free[group] += taken
                self._on_host[job, self._given[group].host] -= taken
                self.count[job] -= taken
                number -= taken


@dataclass(frozen=True)
class SharedSlot:
    """A slot in a cluster that jobs share."""

    id: str
    host: str = ""
    jobs: frozenset[str] | None = None  # that can use it; None: all
    holder: str | None = None  # the job that has it, and is to have it if its share allows
    free: bool = True  # it can be claimed now


@dataclass
class Assignment:
    """Slots for jobs to claim, and slots for jobs to leave."""

    reserved: dict[str, str] = field(default_factory=dict)  # the job for which each free slot is
    # By job: slots that it has to leave, because another job can use no other.
    reclaimed: dict[str, list[str]] = field(default_factory=dict)


def assign(
    wants: Sequence[Want], given: Mapping[str, int], slots: Sequence[SharedSlot]
) -> Assignment:
    """Return the slots for each job to claim, and for each to leave; first wants first."""
    everyone = {want.job for want in wants}
    alike = all(slot.jobs is None or everyone <= slot.jobs for slot in slots)
    capped = any(want.per_host is not None for want in wants)
    return (_in_order if alike and not capped else _matched)(wants, given, slots)


def _in_order(
    wants: Sequence[Want], given: Mapping[str, int], slots: Sequence[SharedSlot]
) -> Assignment:
    """Reserve free slots one after the other: whatever becomes free will do."""
    held = dict.fromkeys(given, 0)
    for slot in slots:
        if slot.holder in held:
            held[slot.holder] += 1
    free = iter([slot.id for slot in slots if slot.free and slot.holder is None])
    found = Assignment()
    for want in wants:
        for _ in range(given[want.job] - held[want.job]):
            slot_id = next(free, None)
            if slot_id is None:
                return found
            found.reserved[slot_id] = want.job
    return found


def _matched(
    wants: Sequence[Want], given: Mapping[str, int], slots: Sequence[SharedSlot]
) -> Assignment:
    """Match slots with jobs; a job may exchange a slot that another job needs."""
    matched = Allocation(wants, [SlotGroup(1, slot.host, slot.jobs) for slot in slots])
    for number, slot in enumerate(slots):
        holder = slot.holder
        if holder is not None and matched.count.get(holder, 0) < given.get(holder, 0):
            matched.give(holder, number)
    for want in wants:
        for number, slot in enumerate(slots):
            if slot.free and matched.count[want.job] < given[want.job]:
                matched.give(want.job, number)
        _raise(matched, want, given[want.job])
    found = Assignment()
    for number, slot in enumerate(slots):
        owner = next((job for job, used in matched.used[number].items() if used), None)
        if slot.holder is not None and owner != slot.holder and slot.holder in given:
            found.reclaimed.setdefault(slot.holder, []).append(slot.id)
        elif slot.free and slot.holder is None and owner is not None:
            found.reserved[slot.id] = owner
    return found


def shares(
    wants: Sequence[Want], capacity: Sequence[SlotGroup], now: float, patience: float = math.inf
) -> dict[str, int]:
    """Return how many slots each job should have; asked again with its outcome, the same.

    First come the floors, each all or nothing: those of running jobs, then by priority, then by
    age. What is left goes to the jobs that have their floor: by priority, and within a priority by
    weight. Ties go to the job that has the slot, then to the older one. A job that gets no floor
    has what it keeps. A preemptible job gives its floor, but not what it keeps, to a higher
    priority. A job that has waited for `patience` seconds *closes the door*, unless it is
    preemptible: no job that was submitted later starts before it.
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
    """Raise a job to a number of slots; return False if impossible."""
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
        saved = copy.deepcopy(self.allocation) if victims else self.allocation
        for victim in sorted(victims, key=lambda w: (w.priority, -w.since, w.job)):
            self.allocation.remove(victim.job, self.allocation.count[victim.job] - victim.kept)
            if self._try(want):
                return True
        self.allocation = saved
        return False


def _fill(allocation: Allocation, wants: Sequence[Want]) -> None:
    """Give free slots to jobs of equal priority, each slot to the job with least by weight."""
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


# -- at once, or later, so that jobs reset rarely --------------------------------------------------


@dataclass(frozen=True)
class SharingRules:
    """Rules by which jobs share a cluster, with times in seconds."""

    policy: str = "fair"  # fair, or first: every job takes what it finds free, and keeps it
    # How long a job's share has to be different before it grows, or shrinks only to be fair.
    settle: float = 2.0
    protect: float = 30.0  # how long a job keeps its size before it shrinks only to be fair
    patience: float = 300.0  # how long a job waits for its floor before no later job starts first


@dataclass
class _Memory:
    """A job's share, the time of its change, and since when it is to grow or shrink."""

    share: int | None = None
    changed: float = -math.inf
    since: dict[str, float] = field(default_factory=dict)


class SharePolicy:
    """Shares of the jobs of one cluster, in the course of time.

    A job is admitted, and others shrink for that, at once. All other changes wait for `settle`
    seconds, and a job shrinks only to be fair no sooner than `protect` seconds after its last
    change.
    """

    def __init__(self, rules: SharingRules) -> None:
        self.rules = rules
        self._jobs: dict[str, _Memory] = {}

    def decide(
        self, wants: Sequence[Want], capacity: Sequence[SlotGroup], now: float
    ) -> dict[str, int | None]:
        """Return the share that each job has from now on; None for no bound."""
        self._jobs = {want.job: self._jobs.get(want.job, _Memory()) for want in wants}
        if self.rules.policy == "first":
            return dict.fromkeys(self._jobs)
        if len(wants) < 2:
            return {want.job: self._alone(want, now) for want in wants}
        aims = shares(wants, capacity, now, self.rules.patience)
        admitting = any(want.has < want.least <= aims[want.job] for want in wants)
        keeping = {
            want.job: self._keeps(want, aims[want.job], now, admitting=admitting) for want in wants
        }
        bounded = [self._bounded(want, aims[want.job], now, keeping[want.job]) for want in wants]
        given = shares(bounded, capacity, now, self.rules.patience)
        return {job: self._note(job, max(given[job], keeping[job]), now) for job in given}

    def _alone(self, want: Want, now: float) -> int | None:
        memory = self._jobs[want.job]
        bounded = memory.share is not None and want.has >= want.least
        if bounded and not self._may(memory, "grow", now):
            return memory.share
        return self._note(want.job, None, now)

    def _keeps(self, want: Want, aim: int, now: float, *, admitting: bool) -> int:
        """Return the share kept by a job, because shrinking would be too soon; 0 for none."""
        memory = self._jobs[want.job]
        if memory.share is None or aim >= memory.share:
            memory.since.pop("shrink", None)
            return 0
        protected = now < memory.changed + self.rules.protect
        stays = not admitting and (not self._may(memory, "shrink", now) or protected)
        return memory.share if stays else 0

    def _bounded(self, want: Want, aim: int, now: float, keeps: int) -> Want:
        """Return a want with the slots that must stay now, and without premature growth."""
        memory = self._jobs[want.job]
        if memory.share is None:
            return want
        kept, most = max(want.kept, min(want.has, keeps)), max(aim, memory.share)
        if aim <= memory.share:
            memory.since.pop("grow", None)
        elif memory.share >= want.least and not self._may(memory, "grow", now):
            most = memory.share
        return replace(want, kept=kept, most=max(min(want.most, most), want.least, kept))

    def _may(self, memory: _Memory, change: str, now: float) -> bool:
        return now >= memory.since.setdefault(change, now) + self.rules.settle

    def _note(self, job: str, share: int | None, now: float) -> int | None:
        memory = self._jobs[job]
        if share != memory.share:
            memory.share, memory.changed = share, now
            memory.since.pop("grow", None)
            memory.since.pop("shrink", None)
        return share
