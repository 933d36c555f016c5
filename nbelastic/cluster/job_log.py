"""Keep a job's history, output, telemetry and results.

Runs in the scheduler, in its event loop, for a kernel that attaches later; and in the kernel, in
the driver's thread, where a subclass shows the same to people. It decides nothing.
"""

from __future__ import annotations

import enum
import re
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from itertools import islice

import msgspec
from msgspec.structs import replace

from nbelastic import messages as m
from nbelastic.status import Output

MOST_OUTPUT = 2**20  # bytes printed by ranks that are kept; the oldest go first
MOST_REPORTS = 20_000  # reports of ranks that are kept; the oldest go first


class JobLog:
    """Log of one job: of all but results and failures only the newest; keys are starts."""

    def __init__(self) -> None:
        self.results: dict[int, bytes] = {}  # pickled
        self.failures: dict[int, m.PackedError] = {}  # packed: unpacking runs the user's code
        self.ranks: dict[int, tuple[int, str]] = {}  # the last rank and the worker
        self.printed = OutputLog(MOST_OUTPUT)
        self._latest: dict[int, m.RankTelemetry] = {}
        self._records: list[m.Record] = []
        self._reports: deque[tuple[int, m.MetricsReport]] = deque(maxlen=MOST_REPORTS)

    def note_event(self, event: m.Event, result: bytes | None, error: m.PackedError | None) -> None:
        """Keep the result or the error that belongs to an event."""
        if isinstance(event, m.RankReturned | m.RankLeft) and result is not None:
            self.results[event.start] = result
        elif isinstance(event, m.RankRaised) and error is not None:
            self.failures[event.start] = error

    def note_effect(self, effect: m.Effect, size: int, seen: m.Event) -> m.Record | None:
        """Note an effect's ranks, or add its entry to the history with the causing event."""
        if isinstance(effect, m.StartRank):
            self._note_rank(effect.start, effect.place.rank, effect.slot.worker)
        elif isinstance(effect, m.Publish):
            for rank, member in enumerate(effect.plan.members):
                self._note_rank(member.start, rank, member.slot.worker)
        elif isinstance(effect, m.Record):
            seen_by = describe_event(seen, self.ranks)
            return self.note(replace(effect, size=size, seen=seen_by))
        return None

    def _note_rank(self, start: int, rank: int, worker: str) -> None:
        self.ranks[start] = rank, worker

    def note(self, record: m.Record) -> m.Record:
        """Add an entry to the history, with the latest known line of its rank."""
        latest = None if record.start is None else self._latest.get(record.start)
        entry = replace(record, time=self._now(), line=None if latest is None else latest.line)
        self._add(entry)
        return entry

    def _now(self) -> float:
        """Return the time of a record, in seconds since the epoch."""
        return time.time()

    def _add(self, record: m.Record) -> None:
        self._records.append(record)

    def note_output(self, start: int, text: str) -> None:
        """Keep the output of a rank."""
        self.printed.add(Output(start, self.latest_rank(start), text))

    def latest_rank(self, start: int) -> int | None:
        """Return the rank that a start of the function had last."""
        return self.ranks[start][0] if start in self.ranks else None

    def note_telemetry(self, ranks: Iterable[m.RankTelemetry]) -> None:
        """Keep the telemetry of ranks."""
        for each in ranks:
            self._latest[each.start] = replace(each, job="", reports=())
            reports = [replace(report, time=self._now()) for report in each.reports]
            self._reports.extend((each.start, report) for report in reports)

    def contents(self) -> m.LogContents:
        """Return all of it, for another kernel."""
        reports: defaultdict[int, list[m.MetricsReport]] = defaultdict(list)
        for start, report in self._reports:
            reports[start].append(report)
        return m.LogContents(
            results=self.results,
            failures=self.failures,
            history=tuple(self._records),
            ranks=self.ranks,
            output=self.printed.since(0)[1],
            telemetry=tuple(
                replace(latest, reports=tuple(reports[start]))
                for start, latest in self._latest.items()
            ),
        )


PIECE_BYTES = 200  # bytes of a piece, without its text


class OutputLog:
    """The newest output of a job's ranks, at most so many bytes; any thread may read it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.dropped = 0  # pieces
        self._lock = threading.Lock()
        self._pieces: deque[Output] = deque()
        self._bytes = 0

    def add(self, piece: Output) -> None:
        """Keep a piece, and drop the oldest."""
        with self._lock:
            self._pieces.append(piece)
            self._bytes += _size(piece)
            while self._bytes > self.most and self._pieces:
                self._bytes -= _size(self._pieces.popleft())
                self.dropped += 1

    def since(self, cursor: int) -> tuple[int, tuple[Output, ...]]:
        """Return the next cursor, and the kept pieces since the given cursor."""
        with self._lock:
            first = max(cursor - self.dropped, 0)
            return self.dropped + len(self._pieces), tuple(islice(self._pieces, first, None))

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


def _size(piece: Output) -> int:
    return sys.getsizeof(piece.text) + PIECE_BYTES


def in_one_line(entry: m.Record) -> str:
    """Return an entry of the history for a logger, with its numbers."""
    words = [f"{entry.kind} in generation {entry.generation} of {entry.size} ranks"]
    if entry.worker is not None:
        start = "no rank" if entry.start is None else f"start {entry.start}"
        words.append(f"{start if entry.rank is None else f'rank {entry.rank}'} on {entry.worker}")
    words.append(" ".join(str(entry.reason or entry.detail).split()))
    values = {} if entry.reason is None else msgspec.structs.asdict(entry.reason)
    numbers = {key: value for key, value in values.items() if type(value) in (int, float)}
    words += [_fact(key, number) for key, number in {**numbers, **entry.figures}.items()]
    return "; ".join(filter(None, [*words, f"seen by {entry.seen}" * bool(entry.seen)]))


def describe_event(event: m.Event, ranks: Mapping[int, tuple[int, str]]) -> str:
    """Return a line on an event and its source."""
    if isinstance(event, m.Tick):
        return "the clock: a time limit was reached"
    by = "the scheduler"
    start: int | None = getattr(event, "start", None)
    if isinstance(event, m.LimitsChanged | m.StopRequested):
        unattended = "no kernel" in getattr(event, "reason", "")
        by = "the scheduler" if unattended else "a user"
    elif isinstance(event, m.ClusterGone):
        by = "the driver in the kernel"
    elif start is not None:
        rank, worker = ranks.get(start, (None, ""))
        by = "the agent of " * isinstance(event, m.RankDied | m.RankExited)
        by += f"start {start}" if rank is None else f"rank {rank} on {worker}"
    what = re.sub("(?<!^)([A-Z])", r" \1", type(event).__name__).lower()
    fields = msgspec.structs.asdict(event).items()
    facts = [_fact(name, value) for name, value in fields if name not in ("start", "slot")]
    return f"{by}: {', '.join([what, *filter(None, facts)])}"


def _fact(name: str, value: object) -> str:
    """Return a field of an event in words; empty for an uninformative field."""
    if isinstance(value, enum.Enum):
        value = value.name.lower().replace("_", " ")  # its value may be a template
    if value in (None, "", False, 0) or name == "store":
        return ""
    if isinstance(value, str):
        return f"{name} {' '.join(value.split())[:200]}"
    if isinstance(value, tuple | dict):  # slots, heartbeats, samples: there may be a thousand
        return f"{len(value)} {name}" if value else ""
    if isinstance(value, float):
        return f"{name} {value:g}"
    return name if value is True else f"{name} {value}"
