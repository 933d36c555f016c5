"""A job's log for people: history in words, output, metrics and warnings.

The driver's thread writes it, other threads read it, under a lock that is held for moments only.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable

from dask.utils import parse_bytes

from nbelastic import messages as m
from nbelastic.cluster import JobLog, Modules, OutputLog, Returned
from nbelastic.driver import display
from nbelastic.driver.metrics import MetricsAggregator
from nbelastic.errors import OptionError
from nbelastic.status import HistoryEvent, same_fields

BYTES = "NBELASTIC_LOG_BYTES"
DEFAULT = "64 MB"

OUTPUT_GAP = "output of ranks was left out, because this kernel did not read it for a while"


def steady_time() -> float:
    """Return seconds on a clock that is never set, and also counts a laptop's sleep."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)  # Linux; there, time.monotonic stands still
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class KernelLog(JobLog):
    """Log of one job in the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.printed = OutputLog(_most())
        self.started = time.time()
        self._began = steady_time()
        self.metrics = MetricsAggregator()
        self.modules = Modules()
        self.returned = Returned(None, {})
        self.highest_rank: int | None = None
        self._lock = threading.Lock()
        self._history: list[HistoryEvent] = []

    # -- for all threads -----------------------------------------------------------------------

    @property
    def elapsed(self) -> float:
        """Seconds since the job's start, whatever the kernel's clock is set to meanwhile."""
        return steady_time() - self._began

    def _now(self) -> float:
        return self.started + self.elapsed

    def history(self) -> tuple[HistoryEvent, ...]:
        """Return the history so far."""
        with self._lock:
            return tuple(self._history)

    def warnings(self) -> tuple[str, ...]:
        """Return the warnings so far, oldest first."""
        return tuple(event.detail for event in self.history() if event.kind == "warning")

    def in_words(self, reason: m.Reason) -> str:
        """Return a reason in words, with its ranks' lines of code, if known."""
        if not isinstance(reason, m.RanksAt):
            return str(reason)
        at = {start: each.line for start, each in self._latest.items()}
        pairs = zip(reason.ranks, reason.lines, strict=False)
        at |= {rank.start: line for rank, line in pairs if line is not None}
        return reason.at({start: _code_place(line) for start, line in at.items()})

    # -- for the driver's thread ---------------------------------------------------------------

    def _note_rank(self, start: int, rank: int, worker: str) -> None:
        super()._note_rank(start, rank, worker)
        self.highest_rank = max(rank, self.highest_rank or 0)

    def _add(self, record: m.Record) -> None:
        error = None if record.start is None else self.failures.get(record.start)
        detail = detail_of(record, None if error is None else error.place)
        event = HistoryEvent(**same_fields(HistoryEvent, record) | {"detail": detail})
        with self._lock:
            said = (each.detail for each in self._history if each.kind == record.kind)
            if record.kind in ("warning", "alias") and detail in said:
                return  # each once, also that of another rank
            self._history.append(event)

    def note_output(self, start: int, text: str) -> None:
        complete = not self.printed.dropped
        super().note_output(start, text)
        if complete and self.printed.dropped:
            self.note(m.Record("warning", detail=self.remark()))

    def remark(self) -> str:
        """Return a line on dropped output; empty if nothing was dropped."""
        if not self.printed.dropped:
            return ""
        kept = self.printed.most
        most = f"{kept / 1e6:,.0f} MB" if kept >= 1_000_000 else f"{kept:,} bytes"
        return f"only the last {most} of what ranks printed are in memory ({BYTES})"

    def note_gap(self, start: int) -> None:
        """Note that output of ranks is missing from here on, because this kernel did not read."""
        self.note_output(start, f"[{OUTPUT_GAP}]\n")
        self.note(m.Record("warning", detail=OUTPUT_GAP))

    def note_telemetry(self, ranks: Iterable[m.RankTelemetry], members: Iterable[int] = ()) -> None:
        ranks = tuple(ranks)
        self._latest.update((each.start, each) for each in ranks)
        elapsed = self.elapsed
        self.metrics.take(elapsed, ranks)
        self.metrics.note_pace(elapsed, self.metrics.total(members))

    def adopt(self, started: float, contents: m.LogContents) -> None:
        """Take over the scheduler's log of a job."""
        self._began = steady_time() - max(self._now() - started, 0.0)
        self.started = started
        with self._lock:
            self._history.clear()
        self.printed = OutputLog(self.printed.most)
        self.metrics = MetricsAggregator(started)
        self.results = dict(contents.results)
        self.failures = dict(contents.failures)
        for start, (rank, worker) in contents.ranks.items():
            self._note_rank(start, rank, worker)
        self.note_telemetry(contents.telemetry)
        for piece in contents.output:
            self.printed.add(piece)
        for record in contents.history:
            self._add(record)


def _code_place(line: m.CodeLine | None) -> str:
    if line is None:
        return ""
    return f"{display.label(line.file) or line.file}, line {line.line}, in {line.function}"


def detail_of(record: m.Record, raised: m.CodeLine | None = None) -> str:
    """Return the detail of a history entry: figures in words, or a reason with lines of code."""
    reason, figures, place = record.reason, record.figures, _code_place(raised)
    if record.kind == "phases" and figures:
        batches, samples = (int(figures.get(name, 0)) for name in ("batches", "samples"))
        phases = [f"{k} {v:.1f}" for k, v in figures.items() if k not in ("batches", "samples")]
        again = f"; {batches:,} {'batch' if batches == 1 else 'batches'}"
        again += f"{f' of {samples:,} samples' if samples else ''} redone"
        return f"{', '.join(phases)} ms{again if batches else ''}"
    if isinstance(reason, m.RankError):
        return reason.at(place)
    if not isinstance(reason, m.Lost):
        return record.detail if reason is None else str(reason)
    if reason.reason in (m.LossReason.STALLED, m.LossReason.NOT_READY) and record.line:
        return f"{reason.cause}; it was executing {_code_place(record.line)}"
    return f"{reason.cause}; raised at {place}" if place else reason.cause


def _most() -> int:
    value = os.environ.get(BYTES) or DEFAULT
    try:
        most = parse_bytes(value)
    except (ValueError, OverflowError):
        most = 0
    if most <= 0:
        raise OptionError(f"{BYTES}={value!r}: must be a number of bytes, such as 64000000 or 64MB")
    return most
