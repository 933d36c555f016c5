"""Balancer of micro-batches between ranks, by the times that they take.

:mod:`.quotas` decides; this module measures, keeps the quotas of the present generation, and tells
of stragglers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbelastic.data.quotas import Balance, Pace, is_straggler, slowness
from nbelastic.data.stopwatch import Stopwatch
from nbelastic.elastic.ranks.context import current_or_none
from nbelastic.elastic.ranks.session import note

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbelastic.elastic.ranks.context import Context
    from nbelastic.elastic.ranks.step_share import StepShare


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
        """Return the quotas of this generation, which are even when it begins."""
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
