"""Detect a deadlock of suspended jobs, and choose the jobs that end it.

A suspended job holds one slot, because its state is in that worker's memory. If workers are lost,
these slots may be what keeps every suspended job below its floor.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from .fair_share import shares

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from .model import SlotGroup, Want


def jobs_to_yield(
    wants: Sequence[Want], capacity: Sequence[SlotGroup], now: float, patience: float = math.inf
) -> frozenset[str]:
    """Return suspended jobs that should yield what they keep, for another's floor.

    While a job trains, a suspended job that is resumable yields to one that comes before it: of a
    higher priority, or older. If no job trains and none can start, suspended jobs yield to any
    job: first those that are resumable, then those of the lowest priority, then the youngest.

    They are no more than it takes; none if nothing is gained, or if a job is about to start.
    `capacity` has all slots; `now` and `patience` are as for :func:`~nbelastic.sharing.shares`.
    """
    suspended = [want for want in wants if want.preemptible and 0 < want.kept < want.least]
    suspended = [want for want in suspended if want.running and want.has < want.least]
    suspended.sort(key=_standing)
    if not suspended:
        return frozenset()

    def given(yielded: Collection[Want]) -> dict[str, int]:
        without = [replace(want, kept=0) if want in yielded else want for want in wants]
        return shares(without, capacity, now, patience)

    present = given(())
    if any(_starts(want, present) for want in wants):
        return frozenset()
    idle = all(present[want.job] < want.least for want in wants)
    candidates = [want for want in suspended if want.resumable or idle]
    if idle:
        candidates.sort(key=lambda want: not want.resumable)

    def helps(yielded: Sequence[Want]) -> bool:
        best = max(map(_standing, yielded), default=())
        gaining = wants if idle else [want for want in suspended if _standing(want) > best]
        then = given(yielded)
        return any(_starts(want, then) for want in gaining if want not in yielded)

    for number in range(1, len(candidates) + 1):
        yielded = candidates[:number]
        if helps(yielded):
            for want in candidates[: number - 1]:
                fewer = [each for each in yielded if each is not want]
                yielded = fewer if helps(fewer) else yielded
            return frozenset(want.job for want in yielded)
    return frozenset()


def _standing(want: Want) -> tuple[int, float, str]:
    """Return what is larger the later a suspended job yields."""
    return want.priority, -want.since, want.job


def _starts(want: Want, given: dict[str, int]) -> bool:
    return want.has < want.least <= given[want.job]
