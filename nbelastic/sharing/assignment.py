"""Assign slots to jobs, once the number that each should have is known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .allocation import Allocation
from .model import SlotGroup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .model import Want


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
    """Slots that jobs may claim, and slots that they have to leave."""

    reserved: dict[str, str] = field(default_factory=dict)  # the job for which each free slot is
    # By job: slots that it has to leave, because another job can use no other.
    reclaimed: dict[str, list[str]] = field(default_factory=dict)


def assign(
    wants: Sequence[Want], given: Mapping[str, int], slots: Sequence[SharedSlot]
) -> Assignment:
    """Return the slots that each job may claim, and those that it has to leave.

    Earlier `wants` choose first; `given` has the share of each job; `slots` has all slots. A job
    that has more than its share keeps the first of its slots.
    """
    everyone = {want.job for want in wants}
    alike = all(want.per_host is None for want in wants) and all(
        slot.jobs is None or everyone <= slot.jobs for slot in slots
    )
    return _in_order(wants, given, slots) if alike else _matched(wants, given, slots)


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
        while matched.count[want.job] < given[want.job]:
            if not matched.add(want.job):
                break
    found = Assignment()
    for number, slot in enumerate(slots):
        owner = next((job for job, used in matched.used[number].items() if used), None)
        if slot.holder is not None and owner != slot.holder and slot.holder in given:
            found.reclaimed.setdefault(slot.holder, []).append(slot.id)
        elif slot.free and slot.holder is None and owner is not None:
            found.reserved[slot.id] = owner
    return found
