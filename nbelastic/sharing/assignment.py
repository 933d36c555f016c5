"""Assign slots to jobs, once it is known how many each should have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .allocation import MatchedSlots
from .model import SlotGroup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .model import Want


@dataclass(frozen=True)
class SharedSlot:
    """A slot in a cluster that jobs share.

    Attributes
    ----------
    id : str
        Its identity.
    host : str
        Its host.
    jobs : frozenset of str or None
        The jobs that can use it; None for all.
    holder : str or None
        The job that has it, and is to have it if its share allows.
    free : bool
        Whether it can be claimed now.
    """

    id: str
    host: str = ""
    jobs: frozenset[str] | None = None
    holder: str | None = None
    free: bool = True


@dataclass
class Assignment:
    """Slots and jobs.

    Attributes
    ----------
    reserved : dict of str to str
        The job for which each free slot is.
    reclaimed : dict of str to list of str
        Slots that a job has to leave because another can use no other.
    """

    reserved: dict[str, str] = field(default_factory=dict)
    reclaimed: dict[str, list[str]] = field(default_factory=dict)


def assign(
    wants: Sequence[Want], given: Mapping[str, int], slots: Sequence[SharedSlot]
) -> Assignment:
    """Return which slots are whose.

    Parameters
    ----------
    wants : sequence of Want
        What the jobs want; earlier ones choose first.
    given : mapping of str to int
        Their shares.
    slots : sequence of SharedSlot
        All slots. Of a job that has more than its share, the first are those that it keeps.
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
    """Match slots with jobs; a job leaves a slot that another needs, and has another instead."""
    matched = MatchedSlots(wants, [SlotGroup(1, slot.host, slot.jobs) for slot in slots])
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
