"""A job's log for people: history in words, output, metrics and warnings.

The driver's thread writes it, other threads read it, under a lock that is held for moments only.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from dask.utils import parse_bytes

from nbelastic import messages as m
from nbelastic.cluster import JobLog, Modules, Returned
from nbelastic.driver import display
from nbelastic.driver.metrics import MetricsAggregator
from nbelastic.driver.status import HistoryEvent, Output, same_fields
from nbelastic.errors import OptionError

OUTPUT_GAP = "output of ranks was left out, because this kernel did not read it for a while"


def steady_time() -> float:
    """Return seconds on a clock that is never set, and also counts a laptop's sleep."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)  # Linux; there, time.monotonic stands still
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class KernelLog(JobLog):
    """Log of one job in the kernel."""

    def __init__(self, job: str = "job") -> None:
        super().__init__()
        self.started = time.time()
        self._began = steady_time()
        self.metrics = MetricsAggregator()
        self.modules = Modules()
        self.returned = Returned(None, {})
        self.highest_rank: int | None = None
        self._lock = threading.Lock()
        self._history: list[HistoryEvent] = []
        self.printed = OutputLog(job)

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

    def logged_to(self, name: str) -> tuple[tuple[int, int], int]:
        """Return the place of a logger's last row, and its number of rows."""
        for event in self.history():
            if event.kind == "logged" and event.detail == name:
                commit, number, rows = map(int, event.figures.values())
                return (commit, number), rows
        return (-1, -1), 0

    def in_words(self, reason: m.Reason) -> str:
        """Return a reason in words, with its ranks' lines of code, if known."""
        if not isinstance(reason, m.RanksAt):
            return str(reason)
        at = {start: each.line for start, each in self._latest.items()}
        pairs = zip(reason.ranks, reason.lines, strict=False)
        at |= {rank.start: line for rank, line in pairs if line is not None}
        return reason.at({start: _code_place(line) for start, line in at.items()})

    def latest_rank(self, start: int) -> int | None:
        """Return the rank that a start of the function had last."""
        return self.ranks[start][0] if start in self.ranks else None

    # -- for the driver's thread ---------------------------------------------------------------

    def _note_rank(self, start: int, rank: int, worker: str) -> None:
        super()._note_rank(start, rank, worker)
        self.highest_rank = max(rank, self.highest_rank or 0)

    def _add(self, record: m.Record) -> None:
        error = None if record.start is None else self.failures.get(record.start)
        detail = detail_of(record, None if error is None else error.place)
        event = HistoryEvent(**same_fields(HistoryEvent, record) | {"detail": detail})
        with self._lock:
            if record.kind in ("warning", "alias", "logged"):  # once each
                what = (record.kind, detail)
                same = [each for each in self._history if (each.kind, each.detail) == what]
                if same and record.kind != "logged":  # another rank's, too
                    return
                for each in same:  # a logger has come further
                    self._history.remove(each)
            self._history.append(event)

    def note_output(self, start: int, text: str, *, write: bool = True) -> None:
        if problem := self.printed.add(Output(start, self.latest_rank(start), text), write=write):
            self.note(m.Record("warning", detail=problem))

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
        self.printed.clear()
        self.metrics = MetricsAggregator(started)
        self.results = dict(contents.results)
        self.failures = dict(contents.failures)
        for start, (rank, worker) in contents.ranks.items():
            self._note_rank(start, rank, worker)
        self.note_telemetry(contents.telemetry)
        write = not self.printed.written  # a driver that attaches again has written it before
        for start, text in contents.output:
            self.note_output(start, text, write=write)
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


BYTES = "NBELASTIC_LOG_BYTES"
DIRECTORY = "NBELASTIC_LOG_DIR"
DEFAULT = "64 MB"

PIECE_BYTES = 200  # bytes of a piece, without its text


class OutputLog:
    """Output of a job's ranks: the newest in memory, all of it in files if so set."""

    def __init__(self, job: str) -> None:
        self._most = _most()
        self._place = _place(job)
        self._lock = threading.Lock()
        self._pieces: deque[Output] = deque()
        self._bytes = self._gone = 0  # of the kept pieces, and number of the dropped ones
        self.written = False  # whether anything has gone to a file
        self._problem = ""

    def add(self, piece: Output, *, write: bool = True) -> str:
        """Keep a piece and drop the oldest; return a warning for the user, each one once."""
        told, problem = self._gone > 0, self._problem
        if write:
            self._write(piece)
        with self._lock:
            self._pieces.append(piece)
            self._bytes += _size(piece)
            while self._bytes > self._most and self._pieces:
                self._bytes -= _size(self._pieces.popleft())
                self._gone += 1
        if self._problem != problem:
            return self._problem
        return "" if told else self.remark()

    def since(self, cursor: int) -> tuple[int, tuple[Output, ...]]:
        """Return the next cursor, and the kept pieces since the given cursor."""
        with self._lock:
            first = max(cursor - self._gone, 0)
            return self._gone + len(self._pieces), tuple(islice(self._pieces, first, None))

    def last(self, rank: int, most: int) -> str:
        """Return the last pieces of a rank, of `most` characters or somewhat more."""
        found: list[str] = []
        with self._lock:
            for piece in reversed(self._pieces):
                if piece.rank == rank:
                    found.append(piece.text)
                    most -= len(piece.text)
                if most <= 0:
                    break
        return "".join(reversed(found))

    def clear(self) -> None:
        """Forget all that is in memory, and count anew."""
        with self._lock:
            self._pieces.clear()
            self._bytes = self._gone = 0

    def remark(self) -> str:
        """Return a line on dropped output and its place on disk; empty if nothing was dropped."""
        if not self._gone:
            return ""
        kept = self._most
        most = f"{kept / 1e6:,.0f} MB" if kept >= 1_000_000 else f"{kept:,} bytes"
        what = f"only the last {most} of what ranks printed are in memory ({BYTES})"
        if self._place is not None and not self._problem:
            return f"{what}; all of it is in {self._place}"
        return f"{what}; with {DIRECTORY} set to a directory, all of it goes there"

    def _write(self, piece: Output) -> None:
        if self._place is None or self._problem:
            return
        try:
            self._place.mkdir(parents=True, exist_ok=True)
            with open(
                self._place / f"start-{piece.start}.log",
                "a",
                encoding="utf-8",
                errors="backslashreplace",
                newline="",
            ) as file:
                file.write(piece.text)
        except OSError as error:
            self._problem = f"what ranks print cannot be written to {self._place}: {error}"
        self.written = True


def _size(piece: Output) -> int:
    return sys.getsizeof(piece.text) + PIECE_BYTES


def _most() -> int:
    value = os.environ.get(BYTES) or DEFAULT
    try:
        most = parse_bytes(value)
    except (ValueError, OverflowError):
        most = 0
    if most <= 0:
        raise OptionError(f"{BYTES}={value!r}: must be a number of bytes, such as 64000000 or 64MB")
    return most


def _place(job: str) -> Path | None:
    directory = os.environ.get(DIRECTORY)
    if not directory:
        return None
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise OptionError(f"{DIRECTORY}={directory!r}: must be a directory: {error}") from None
    name = f"{job}-{time.strftime('%Y%m%d-%H%M%S')}".replace(os.sep, "_")
    return Path(directory).absolute() / name
