"""Balancer of micro-batches between ranks, by the times that they take.

:mod:`.plan.quotas` decides; this module measures, keeps the quotas of the present generation, and
tells of stragglers.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from nbelastic.data.plan import Balance, Pace, is_straggler, slowness
from nbelastic.elastic.ranks.context import current_or_none
from nbelastic.elastic.ranks.session import note

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbelastic.elastic.ranks.context import Context
    from nbelastic.elastic.ranks.step_share import StepShare

clock = time.perf_counter


class Balancer:
    """Quotas of the present generation, even or by the speed of ranks."""

    def __init__(self, micro_batches: int, *, by_speed: bool) -> None:
        self.timed: StepShare | None = None  # the last step of the present quotas
        self.watch = Stopwatch()  # of the micro-batch that this rank computes
        self._micro_batches = micro_batches
        self._by_speed = by_speed
        self._pace = Pace()
        self._balance: Balance | None = None
        self._straggles = False

    def present(self) -> Balance:
        """Return the quotas of this generation, even at its start."""
        place = _place()
        if self._balance is None or self._balance.place != place:
            self._balance = Balance(place, self._micro_batches)
            self.timed, self._straggles = None, False
        return self._balance

    def note(self, share: StepShare, *, full: bool) -> None:
        """Note the time of a step's micro-batches, and let it travel with the gradients.

        A step that is not `full`, as an epoch's last one may be, tells too little.
        """
        seconds = self.watch.take()
        if full:
            if not share.expected:
                self._pace.note_idle()
            elif seconds is not None:
                self._pace.note(seconds)
        share.seconds = self._pace.seconds

    def committed(self, next_step: int) -> bool:
        """Fix other quotas for the step after `next_step`, if they are clearly better.

        All ranks call this at the same commits. They come to the same quotas. Returns whether
        others are fixed.
        """
        context, balance, share = current_or_none(), self.present(), self.timed
        if not self._by_speed or context is None or share is None:
            return False
        before = balance.consider(share.times, next_step)
        if before:
            self._name_straggler(context, balance, share.times, before)
        return bool(before)

    def _name_straggler(
        self, context: Context, balance: Balance, times: Sequence[float], before: Sequence[int]
    ) -> None:
        """Add an entry to the history, if this rank has become slow and others get its work."""
        straggles = is_straggler(times, context.rank)
        told, self._straggles = self._straggles, straggles
        if straggles and not told:
            figures = {
                "times": slowness(times, context.rank),
                "micro_batches": float(balance.coming[context.rank]),
                "before": float(before[context.rank]),
                "of": float(self._micro_batches),
            }
            note(context, "straggler", figures=figures)


def _place() -> tuple[int, int, int]:
    """Return the present generation, this rank, and the number of ranks."""
    context = current_or_none()
    return (0, 0, 1) if context is None else (context.generation, context.rank, context.size)


class Stopwatch:
    """Time of micro-batches, from when each was handed out until the next was asked for.

    So neither waiting for data nor waiting for other ranks is in it. On CUDA devices, kernels run
    later than they are launched. Their time is taken by events on the stream, of which only those
    that are over are read: nothing waits for the device.
    """

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
