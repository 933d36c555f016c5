"""Balancer of micro-batches between ranks, by the times that they take.

:mod:`.plan.quotas` decides; this module measures, and keeps the quotas of the present generation.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from nbelastic.collectives.reduction_tree import Blocks
from nbelastic.data.plan.quotas import STEPS, pace, plan
from nbelastic.elastic.ranks.context import current_or_none

if TYPE_CHECKING:
    from nbelastic.elastic.ranks.step_share import StepShare

clock = time.perf_counter


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
        self._spans.append((self._opened, clock() if type(self._opened) is float else _event()))

    def take(self) -> float | None:
        """Return the mean time of those whose end is known and was not taken; None without any."""
        seconds = []
        while self._spans:
            first, last = self._spans[0]
            if type(last) is float:
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
