"""Time changes of shares: at once, or later, so that jobs reset rarely."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .fair_share import SlotGroup, Want, shares


@dataclass(frozen=True)
class SharingRules:
    """Rules by which jobs share a cluster, with times in seconds."""

    policy: str = "fair"  # fair, or first: every job takes what it finds free, and keeps it
    # How long a job's share has to be different before it grows, or shrinks only to be fair.
    settle: float = 2.0
    protect: float = 30.0  # how long a job keeps its size before it shrinks only to be fair
    patience: float = 300.0  # how long a job waits for its floor before no later job starts first


@dataclass
class _Memory:
    """A job's share, the time of its change, and since when it is to grow or shrink."""

    share: int | None = None
    changed: float = -math.inf
    since: dict[str, float] = field(default_factory=dict)


class SharePolicy:
    """Shares of the jobs of one cluster, in the course of time.

    A job is admitted, and others shrink for that, at once. All other changes wait for `settle`
    seconds, and a job shrinks only to be fair no sooner than `protect` seconds after its last
    change.
    """

    def __init__(self, rules: SharingRules) -> None:
        self.rules = rules
        self._jobs: dict[str, _Memory] = {}

    def decide(
        self, wants: Sequence[Want], capacity: Sequence[SlotGroup], now: float
    ) -> dict[str, int | None]:
        """Return the share that each job has from now on; None for no bound."""
        self._jobs = {want.job: self._jobs.get(want.job, _Memory()) for want in wants}
        if self.rules.policy == "first":
            return dict.fromkeys(self._jobs)
        if len(wants) < 2:
            return {want.job: self._alone(want, now) for want in wants}
        aims = shares(wants, capacity, now, self.rules.patience)
        admitting = any(want.has < want.least <= aims[want.job] for want in wants)
        keeping = {
            want.job: self._keeps(want, aims[want.job], now, admitting=admitting) for want in wants
        }
        bounded = [self._bounded(want, aims[want.job], now, keeping[want.job]) for want in wants]
        given = shares(bounded, capacity, now, self.rules.patience)
        return {job: self._note(job, max(given[job], keeping[job]), now) for job in given}

    def _alone(self, want: Want, now: float) -> int | None:
        memory = self._jobs[want.job]
        bounded = memory.share is not None and want.has >= want.least
        if bounded and not self._may(memory, "grow", now):
            return memory.share
        return self._note(want.job, None, now)

    def _keeps(self, want: Want, aim: int, now: float, *, admitting: bool) -> int:
        """Return the share kept by a job, because shrinking would be too soon; 0 for none."""
        memory = self._jobs[want.job]
        if memory.share is None or aim >= memory.share:
            memory.since.pop("shrink", None)
            return 0
        protected = now < memory.changed + self.rules.protect
        stays = not admitting and (not self._may(memory, "shrink", now) or protected)
        return memory.share if stays else 0

    def _bounded(self, want: Want, aim: int, now: float, keeps: int) -> Want:
        """Return a want with the slots that must stay now, and without premature growth."""
        memory = self._jobs[want.job]
        if memory.share is None:
            return want
        kept, most = max(want.kept, min(want.has, keeps)), max(aim, memory.share)
        if aim <= memory.share:
            memory.since.pop("grow", None)
        elif memory.share >= want.least and not self._may(memory, "grow", now):
            most = memory.share
        return replace(want, kept=kept, most=max(min(want.most, most), want.least, kept))

    def _may(self, memory: _Memory, change: str, now: float) -> bool:
        return now >= memory.since.setdefault(change, now) + self.rules.settle

    def _note(self, job: str, share: int | None, now: float) -> int | None:
        memory = self._jobs[job]
        if share != memory.share:
            memory.share, memory.changed = share, now
            memory.since.pop("grow", None)
            memory.since.pop("shrink", None)
        return share
