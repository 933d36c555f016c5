"""Quotas: how many micro-batches of a step each rank computes; pure.

Ranks differ in speed, and all wait for the slowest. So the time that each takes for a micro-batch
travels with every reduction, and all ranks derive the same quotas from it. Quotas decide who
computes a micro-batch, and nothing else: rows, weights and the order of sums do not depend on them.

A generation begins with even quotas, whatever the generation before had. A commit may fix others,
which are in force from the next step on.

Ranks cannot disagree. What they decide from is the same on all of them: quotas of the generation,
which begin even, and times that one operation has summed. Where a rank joins, leaves or fails, the
generation ends, and its quotas with it.
"""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from collections.abc import Sequence

GAIN = 0.05  # part of a step by which other quotas must shorten it to be taken

STEPS = 5
"""Steps of which the second shortest is the time of a rank. What disturbs some of them is noise, of
which a machine that is shared has much."""

LEAST_STEPS = 3  # steps after which a time counts as known: the first ones are slow everywhere
PATIENCE = 64  # steps after which a rank without micro-batches is tried again; doubled each time
STRAGGLER = 1.5  # times as long as the others, from which on a rank counts as a straggler


def predict(quotas: Sequence[int], times: Sequence[float]) -> float:
    """Return the time of a step, equal to the slowest rank's."""
    return max(quota * time for quota, time in zip(quotas, times, strict=True))


def plan(quotas: tuple[int, ...], times: Sequence[float]) -> tuple[int, ...]:
    """Return the quotas to take: `quotas`, unless others make the step clearly shorter."""
    # The next micro-batch goes to the rank that would be done with it first, and so on until all
    # are given away. No other quotas have a shorter step. A rank whose time is not known is
    # supposed to be as fast as the others are in the median. It gets no more than it has, or the
    # one that `_deal` gives each rank: so its time becomes known at the least cost.
    known = [time for time in times if time > 0.0]
    if not known:
        return quotas
    supposed = [time or statistics.median_low(known) for time in times]
    limit = (1.0 - GAIN) * predict(quotas, supposed)
    count = sum(quotas)
    if predict(_deal(supposed, count, [count] * len(quotas)), supposed) >= limit:
        return quotas
    most = [count if time > 0.0 else quota for quota, time in zip(quotas, times, strict=True)]
    found = _deal(supposed, count, most)
    tries = any(new > 0 == old for old, new in zip(quotas, found, strict=True))
    return found if tries or predict(found, supposed) < limit else quotas


def _deal(times: Sequence[float], count: int, most: Sequence[int]) -> tuple[int, ...]:
    """Give micro-batches away in turn, each to the rank that would be done first."""
    quotas = [0] * len(times)
    # Of ranks that would be done at once, the one that has less: a slow one stays in practice.
    done = [(time, 0, rank) for rank, time in enumerate(times)]
    heapq.heapify(done)
    for _ in range(count):
        rank = done[0][2]
        quotas[rank] += 1
        if quotas[rank] < most[rank]:
            entry = ((quotas[rank] + 1) * times[rank], quotas[rank], rank)
            heapq.heapreplace(done, entry)
        else:
            heapq.heappop(done)
    return tuple(quotas)


def slowness(times: Sequence[float], rank: int) -> float:
    """Return a rank's time relative to the other ranks' median; 0 if unknown."""
    others = [time for each, time in enumerate(times) if each != rank and time > 0.0]
    return times[rank] / statistics.median_low(others) if others else 0.0


class Pace:
    """Time of a rank for a micro-batch. It outlives generations."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._patience = PATIENCE
        self._busy = self._idle = 0

    @property
    def seconds(self) -> float:
        """Seconds for a micro-batch; 0 while that is not known."""
        return sorted(self._steps)[1] if len(self._steps) >= LEAST_STEPS else 0.0

    def note(self, seconds: float) -> None:
        """Add the time of a micro-batch in one step."""
        self._steps.append(seconds)
        self._idle = 0
        self._busy += 1
        if self._busy > PATIENCE:
            self._patience = PATIENCE

    def note_idle(self) -> None:
        """Add a step in which the rank had no micro-batch."""
        self._busy = 0
        self._idle += 1
        # A rank without a time is given a micro-batch: whatever slowed it down may be over.
        if self._steps and self._idle >= self._patience:
            self._steps.clear()
            self._patience *= 2
