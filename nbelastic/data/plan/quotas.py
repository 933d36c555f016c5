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
from collections.abc import Sequence

GAIN = 0.05  # part of a step by which other quotas must shorten it to be taken

STEPS = 5
"""Steps of which the second shortest is the time of a rank. What disturbs some of them is noise, of
which a machine that is shared has much."""

LEAST_STEPS = 3  # steps after which a time counts as known: the first ones are slow everywhere


def predict(quotas: Sequence[int], times: Sequence[float]) -> float:
    """Return the time of a step, equal to the slowest rank's."""
    return max(quota * time for quota, time in zip(quotas, times, strict=True))


def plan(quotas: tuple[int, ...], times: Sequence[float]) -> tuple[int, ...]:
    """Return the quotas to take: `quotas`, unless others make the step clearly shorter."""
    # Each rank keeps one micro-batch, by which it is timed again. Of the rest, the next goes to the
    # rank that would be done with it first. No other quotas have a shorter step.
    if not all(times) or sum(quotas) < len(quotas):
        return quotas
    found = [1] * len(quotas)
    # Of ranks that would be done at once, the one that has less: a slow one stays in practice.
    done = [(2 * time, 1, rank) for rank, time in enumerate(times)]
    heapq.heapify(done)
    for _ in range(sum(quotas) - len(quotas)):
        rank = done[0][2]
        found[rank] += 1
        heapq.heapreplace(done, ((found[rank] + 1) * times[rank], found[rank], rank))
    gains = predict(found, times) < (1.0 - GAIN) * predict(quotas, times)
    return tuple(found) if gains else quotas


def pace(latest: Sequence[float]) -> float:
    """Return a rank's time for a micro-batch, by those of its latest steps; 0 if not yet known."""
    return sorted(latest)[1] if len(latest) >= LEAST_STEPS else 0.0
