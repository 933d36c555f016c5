"""Balancer of micro-batches between ranks, by the times that they take.

:mod:`.plan.quotas` decides; this module measures, keeps the quotas of the present generation, and
tells of stragglers.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nbelastic.collectives.reduction_tree import Blocks
from nbelastic.data.plan.quotas import STRAGGLER, Pace, plan, slowness
from nbelastic.elastic.ranks.context import current_or_none
from nbelastic.elastic.ranks.session import note

if TYPE_CHECKING:
    from nbelastic.elastic.ranks.step_share import StepShare

clock = time.perf_counter


class _Balance(NamedTuple):
    place: tuple[int, int, int]  # generation, rank and size
    blocks: Blocks  # of all ranks in the next step

    @property
    def block(self) -> range:
        """Micro-batches of this rank in the next step."""
        return self.blocks.block(self.place[1])


class Balancer:
    """Quotas of the present generation, even or by the speed of ranks."""

    def __init__(self, micro_batches: int, *, by_speed: bool) -> None:
        self.timed: StepShare | None = None  # the last step of the present quotas
        self.watch = Stopwatch()  # of the micro-batch that this rank computes
        self._micro_batches = micro_batches
        self._by_speed = by_speed
        self._pace = Pace()
        self._balance: _Balance | None = None
        self._straggles = False

    @property
    def present(self) -> _Balance:
        """The quotas of this generation, even at its start."""
        context = current_or_none()
        place = (0, 0, 1) if context is None else (context.generation, context.rank, context.size)
        if self._balance is None or self._balance.place != place:
            blocks = Blocks.even(self._micro_batches, place[2])
            self._balance = _Balance(place, blocks)
            self.timed, self._straggles = None, False
        return self._balance

    def note(self, share: StepShare, *, full: bool) -> None:
        """Note the time of a step's micro-batches, and let it travel with the gradients."""
        seconds = self.watch.take()
        if full and seconds is not None:
            self._pace.note(seconds)
        share.seconds = self._pace.seconds

    def committed(self) -> None:
        """Take better quotas at a commit. All ranks call this at the same commits."""
        context, (place, blocks), share = current_or_none(), self.present, self.timed
        if not self._by_speed or context is None or share is None:
            return
        rank, times, before = context.rank, share.times, blocks.quotas
        found = plan(before, times) if len(times) == context.size else before
        if found == before:
            return
        self._balance = _Balance(place, Blocks(found))
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
