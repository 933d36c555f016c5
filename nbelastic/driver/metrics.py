"""Aggregate the telemetry of ranks: speed, progress and metrics of the whole job.

The driver's thread writes it, other threads read it, under a lock that is held for moments only.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from nbelastic.messages import MetricsReport, RankTelemetry
from nbelastic.status import DataStatus, Progress, RankStatus, same_fields

WINDOW = 3.0  # seconds over which speed is measured
MOST_POINTS = 600  # of the pace; then every second one is dropped and the interval doubles


@dataclass
class _Row:
    time: float
    generation: int
    step: float | None
    ranks: int = 0
    sums: dict[str, tuple[float, int]] = field(default_factory=dict)

    def add(self, values: dict[str, float]) -> None:
        self.ranks += 1
        for name, value in values.items():
            total, count = self.sums.get(name, (0.0, 0))
            self.sums[name] = (total + value, count + 1)

    def means(self) -> dict[str, float]:
        return {name: total / count for name, (total, count) in self.sums.items()}


class MetricsAggregator:
    """Telemetry and metrics of a job that was `started` at a time, in seconds since the epoch."""

    def __init__(self, started: float = 0.0) -> None:
        self._started = started
        self._lock = threading.Lock()
        self._latest: dict[int, RankTelemetry] = {}
        self._seen: dict[int, deque[tuple[float, int, int]]] = {}  # time, samples and steps
        self._rows: dict[tuple[int, int], _Row] = {}
        self._order: list[tuple[int, int]] = []
        self._pace: list[tuple[float, float]] = []
        self._interval = 0.0
        self._first: tuple[float, float] | None = None

    def take(self, now: float, ranks: Iterable[RankTelemetry]) -> None:
        """Add what ranks have sent; `now` in seconds since the job was started."""
        with self._lock:
            for each in ranks:
                self._latest[each.start] = each
                seen = self._seen.setdefault(each.start, deque())
                seen.append((now, each.samples, each.step))
                while len(seen) > 2 and seen[1][0] <= now - WINDOW:
                    seen.popleft()
                for report in each.reports:  # those of before this kernel came have a time
                    at = max(report.time - self._started, 0.0) if report.time else now
                    self._add(at, report)

    def _add(self, now: float, report: MetricsReport) -> None:
        key = (report.commit, report.number)
        row = self._rows.get(key)
        if row is None:
            bisect.insort(self._order, key)  # at the end, nearly always
        if row is None or row.generation < report.generation:  # done again after a rollback
            row = self._rows[key] = _Row(now, report.generation, report.step)
        if row.generation == report.generation:
            row.add(report.values)

    def of_rank(self, start: int) -> dict[str, Any]:
        """Return the newest telemetry of a rank, by the fields of its status."""
        with self._lock:
            if (latest := self._latest.get(start)) is None:
                return {}
            return same_fields(RankStatus, latest) | {
                "samples_per_s": self._speed(start),
                "steps_per_s": self._speed(start, 2),
                "micro_batches": (latest.first, latest.last) if latest.micro_batches else None,
            }

    def _speed(self, start: int, what: int = 1) -> float | None:
        """Return samples or steps per second of a rank over the window; None before the first."""
        seen = self._seen.get(start) or deque()
        # Time in which it was still setting up does not count.
        first = next((place for place, after in itertools.pairwise(seen) if after[what]), None)
        if first is None:
            return None
        seconds = seen[-1][0] - first[0]
        return (seen[-1][what] - first[what]) / seconds if seconds > 0 else None

    def state_bytes(self) -> int:
        """Return the size of the largest state of a rank; 0 while none is known."""
        with self._lock:
            return max((each.state_bytes for each in self._latest.values()), default=0)

    def total(self, starts: Iterable[int]) -> float | None:
        """Return the speed of several ranks together; None where it is not known."""
        with self._lock:
            known = [speed for speed in map(self._speed, starts) if speed is not None]
        return sum(known) if known else None

    def _of(self, starts: Iterable[int]) -> list[RankTelemetry]:
        return [self._latest[start] for start in starts if start in self._latest]

    def micro_batches(self, starts: Iterable[int]) -> tuple[int, str]:
        """Return the micro-batches of a step, and what keeps the first of ranks from exactness."""
        with self._lock:
            found = self._of(starts)
        count = max((each.micro_batches for each in found), default=0)
        return count, next((each.why_not_exact for each in found if each.why_not_exact), "")

    def data(self, starts: Iterable[int]) -> tuple[DataStatus, ...]:
        """Return the rows of each source, as the furthest of `starts` reported them."""
        with self._lock:
            every = [each.data for each in self._latest.values() if each.data]
            present = [each.data for each in self._of(starts) if each.data] or every
        if not present:
            return ()
        furthest = max(present, key=lambda data: [each.seen for each in data])
        return tuple(
            # A rank that was lost since may have known of more that was rolled back.
            replace(each, redone=max(data[n].redone for data in every if n < len(data)))
            for n, each in enumerate(furthest)
        )

    def note_pace(self, now: float, speed: float | None) -> None:
        """Add a point to the pace, and thin the pace at many points."""
        with self._lock:
            if speed is None or (self._pace and now < self._pace[-1][0] + self._interval):
                return
            self._pace.append((now, speed))
            if len(self._pace) > MOST_POINTS:
                self._pace = self._pace[::2]
                self._interval = max(2 * self._interval, 1.0)

    def pace(self) -> tuple[tuple[float, float], ...]:
        """Return the speed over time."""
        with self._lock:
            return tuple(self._pace)

    def progress(
        self, now: float, starts: Iterable[int], *, finished: bool = False
    ) -> Progress | None:
        """Return how far the first of `starts` with a declared total has come."""
        with self._lock:
            first = next((each for each in self._of(starts) if each.epochs or each.batches), None)
            if first is None:
                return None
            batch = min(first.batch + 1, first.batches)
            if not first.epochs:  # a loop without epochs
                step = first.batches if finished else batch
                progress = Progress(0, 0, step=step, steps=first.batches)
            elif finished:
                progress = Progress(first.epochs, first.epochs, 0, first.batches)
            else:
                progress = Progress(first.epoch, first.epochs, batch, first.batches)
            if finished:
                return progress
            if self._first is None and first.step:  # after a checkpoint was read, if there is one
                self._first = (now, progress.fraction)
            since, start = self._first or (now, 0.0)
            done = progress.fraction - start
            if done <= 0 or now <= since:
                return progress
            left = (1.0 - progress.fraction) * (now - since) / done
            return replace(progress, remaining_s=left)

    def committed(
        self, after: tuple[int, int], commits: float
    ) -> list[tuple[tuple[int, int], float | None, dict[str, float]]]:
        """Return place, step and means of the rows after a place that are in so many commits."""
        with self._lock:
            first = bisect.bisect_right(self._order, after)
            keys = itertools.takewhile(lambda key: key[0] < commits, self._order[first:])
            return [(key, self._rows[key].step, self._rows[key].means()) for key in keys]

    def rows(self) -> list[dict[str, float]]:
        """Return the metrics, a row for each place, in the order of training."""
        with self._lock:
            return [
                {"step": step, "time": row.time, "ranks": row.ranks, **row.means()}
                for step, row in self._ordered(1)
            ]

    def curves(self, most: int) -> dict[str, list[tuple[float, float]]]:
        """Return each metric as points ``(step, mean)``: every n-th row, so that `most` suffice."""
        curves: dict[str, list[tuple[float, float]]] = {}
        with self._lock:
            for step, row in self._ordered(-(-len(self._order) // most)):
                for name, value in row.means().items():
                    curves.setdefault(name, []).append((step, value))
        return curves

    def _ordered(self, stride: int) -> Iterator[tuple[float, _Row]]:
        """Yield every `stride`-th row with its step, the newest among them."""
        first = (len(self._order) - 1) % stride if self._order else 0
        for number in range(first, len(self._order), max(stride, 1)):
            row = self._rows[self._order[number]]
            yield (float(number) if row.step is None else row.step), row
