"""Quotas: how many micro-batches of a step each rank computes.

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
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from nbelastic.collectives.reduction_tree import Blocks
from nbelastic.elastic.ranks.context import current_or_none

if TYPE_CHECKING:
    from nbelastic.elastic.ranks.step_share import StepShare

clock = time.perf_counter

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


class Balancer:
    """Quotas of the present generation, even or by the speed of ranks."""

    def __init__(self, micro_batches: int, *, by_speed: bool) -> None:
        self.timed: StepShare | None = None  # the last step of the present quotas
        self.watch = Stopwatch()  # of the micro-batch that this rank computes
        self._micro_batches = micro_batches
        self._by_speed = by_speed
        self._latest: deque[float] = deque(maxlen=STEPS)  # times of this rank; outlive generations
        self._balance = ((-1, 0, 1), Blocks.even(micro_batches, 1))  # the quotas at a place

    @property
    def place(self) -> tuple[int, int, int]:
        """Generation, rank and size."""
        context = current_or_none()
        return (0, 0, 1) if context is None else (context.generation, context.rank, context.size)

    @property
    def blocks(self) -> Blocks:
        """Micro-batches of all ranks in the next step; even at the start of a generation."""
        place = self.place
        if self._balance[0] != place:
            self._balance = place, Blocks.even(self._micro_batches, place[2])
            self.timed = None
        return self._balance[1]

    def note(self, share: StepShare, *, full: bool) -> None:
        """Note the time of a step's micro-batches, and let it travel with the gradients."""
        seconds = self.watch.take()
        if full and seconds is not None:
            self._latest.append(seconds)
        share.seconds = pace(self._latest)

    def committed(self) -> None:
        """Take better quotas at a commit. All ranks call this at the same commits."""
        context, before, share = current_or_none(), self.blocks.quotas, self.timed
        if not self._by_speed or context is None or share is None:
            return
        if len(share.times) == context.size:
            found = plan(before, share.times)
            if found != before:
                self._balance = self.place, Blocks(found)


class Stopwatch:
    """Time of micro-batches, without the waits for data and for other ranks."""

    # On CUDA devices, kernels run later than they are launched. Their time is taken by events on
    # the stream, of which only those that are over are read: nothing waits for the device.

    def __init__(self) -> None:
        self._opened: Any = None
        self._spans: deque[tuple[Any, Any]] = deque()  # pairs of times or of events

    def start(self) -> None:
        """Begin a micro-batch."""
        self._opened = _event() if torch.cuda.is_initialized() else clock()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """End it."""
        self._spans.append((self._opened, clock() if isinstance(self._opened, float) else _event()))

    def take(self) -> float | None:
        """Return the mean time of those whose end is known and was not taken; None without any."""
        seconds = []
        while self._spans:
            first, last = self._spans[0]
            if isinstance(last, float):
                seconds.append(last - first)
            elif last.query():
                seconds.append(first.elapsed_time(last) / 1e3)
            else:
                break
            self._spans.popleft()
        return sum(seconds) / len(seconds) if seconds else None


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
