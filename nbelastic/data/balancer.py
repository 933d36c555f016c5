"""Balancer of micro-batches between ranks, by the times that they take.

:mod:`.plan.quotas` decides; this module measures, keeps the quotas of the present generation, and
tells of stragglers.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from nbelastic.collectives.reduction_tree import Blocks
from nbelastic.data.plan.quotas import STEPS, STRAGGLER, pace, plan, slowness
from nbelastic.elastic.ranks.context import current_or_none
from nbelastic.elastic.ranks.session import note

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
        self._straggles = False

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
            self.timed, self._straggles = None, False
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
        rank, times = context.rank, share.times
        found = plan(before, times) if len(times) == context.size else before
        if found == before:
            return
        self._balance = self.place, Blocks(found)
        slow, told = slowness(times, rank), self._straggles
        self._straggles = slow >= STRAGGLER
        if self._straggles and not told:  # this rank has become slow, and others get its work
            figures = {
                "times": slow,
                "micro_batches": float(found[rank]),
                "before": float(before[rank]),
                "of": float(self._micro_batches),
            }
            note(context, "straggler", figures=figures)


class Stopwatch:
    """Time of micro-batches, without the waits for data and for other ranks."""

    # On CUDA devices, kernels run later than they are launched. Their time is taken by events on
    # the stream, of which only those that are over are read: nothing waits for the device.

    def __init__(self) -> None:
        self._began = 0.0
        self._opened: Any = None
        self._spans: deque[tuple[Any, Any]] = deque()
        self._seconds: list[float] = []

    def start(self) -> None:
        """Begin a micro-batch."""
        self._opened = _event() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self._began = clock()

    def stop(self) -> None:
        """End it."""
        if self._opened is None:
            self._seconds.append(clock() - self._began)
        else:
            self._spans.append((self._opened, _event()))

    def take(self) -> float | None:
        """Return the mean time of those whose end is known and was not taken; None without any."""
        while self._spans and self._spans[0][1].query():
            first, last = self._spans.popleft()
            self._seconds.append(first.elapsed_time(last) / 1e3)
        seconds, self._seconds = self._seconds, []
        return sum(seconds) / len(seconds) if seconds else None


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
