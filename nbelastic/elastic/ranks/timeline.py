"""Timeline of a rank, in Chrome's trace format.

A rank keeps its events until recording stops, or, for ``fit(timeline=...)``, appends them to a part
of its own, so that they survive it. The driver joins the parts at the job's end.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO

from nbelastic.elastic.ranks.context import current_or_none

APPEND_AFTER = 1e5  # microseconds after which events are appended to a rank's part

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class Timeline:
    """Events of one process."""

    def __init__(self) -> None:
        self.is_on = self.marks_cycles = False
        self._part: TextIO | None = None
        self._appended = 0.0
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self.path: Path | None = None  # that was given
        self._rank = 0

    def start(self, path: str | os.PathLike[str], rank: int, *, marks_cycles: bool) -> None:
        """Record from here on, for a file that Chrome and Perfetto open."""
        with self._lock:
            self.marks_cycles = marks_cycles
            self.path, self._rank, self._events = Path(path), rank, []
            self.is_on = True

    def record(self, part: str | os.PathLike[str], rank: int, *, marks_cycles: bool) -> None:
        """Record from here to the end of the function, in a part of the job's timeline."""
        Path(part).unlink(missing_ok=True)  # it may be a link of another user's
        file = open(part, "x", encoding="utf-8")  # noqa: SIM115 (open as long as it records)
        self.start(part, rank, marks_cycles=marks_cycles)
        self._part, self._appended = file, now()

    @property
    def is_the_jobs(self) -> bool:
        """Whether the job has asked for it, and not a call in its function."""
        return self._part is not None

    def close_part(self) -> None:
        """Append the rest of a job's timeline, and end the file."""
        with self._lock:
            if self._part is not None:
                self._append()
                self._part.close()
                self._part = None
                self.is_on = self.marks_cycles = False

    def _append(self) -> None:
        assert self._part is not None
        lines = [json.dumps(event) + "\n" for event in self._events]
        self._events, self._appended = [], now()
        with contextlib.suppress(OSError):  # a full disk ends no training
            self._part.write("".join(lines))
            self._part.flush()

    def stop(self) -> list[dict[str, Any]]:
        """Stop recording and return the events."""
        with self._lock:
            self.is_on = self.marks_cycles = False
            events, self._events = self._events, []
        return events

    def span(self, what: str, name: str | None = None) -> AbstractContextManager[None]:
        """Return a context for a block of the timeline, nearly free when off."""
        return self._timed(what, name) if self.is_on else _NOTHING

    @contextlib.contextmanager
    def _timed(self, what: str, name: str | None) -> Iterator[None]:
        begun = now()
        try:
            yield
        finally:
            self.add_span(what, begun, name)

    def instant(self, what: str) -> None:
        """Record a moment."""
        if self.is_on:
            self._add({"name": what, "ph": "i", "s": "p", "ts": now()})

    def add_span(self, what: str, begun: float, name: str | None = None) -> None:
        """Record a block that began at a time of :func:`time.time`, in microseconds."""
        event: dict[str, Any] = {"name": what, "ph": "X", "ts": begun, "dur": now() - begun}
        if name is not None:
            event["args"] = {"name": name}
        self._add(event)

    def _add(self, event: dict[str, Any]) -> None:
        with self._lock:
            if self.is_on:
                context = current_or_none()  # after a reset the rank may be another
                rank = self._rank if context is None else context.rank
                event["pid"], event["tid"] = rank, threading.get_native_id()
                self._events.append(event)
                if self._part is not None and now() - self._appended > APPEND_AFTER:
                    self._append()


def now() -> float:
    """Return the time in microseconds."""
    return time.time() * 1e6


def part_of(path: str, run: str, start: int) -> str:
    """Return the path of one rank's part of a job's timeline."""
    return f"{path}.{run}-{start}"


def join_parts(path: str, run: str) -> bool:
    """Write a job's timeline from the parts of its ranks, if any, and delete these."""
    file = Path(path)
    mine = f"{file.name}.{run}-"
    parts = sorted(each for each in file.parent.iterdir() if each.name.startswith(mine))
    events = [event for part in parts for event in _read(part)]
    if parts:
        write(file, events)
    for part in parts:
        part.unlink(missing_ok=True)
    return bool(parts)


def _read(part: Path) -> Iterable[dict[str, Any]]:
    for line in part.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):  # the last line of a rank that was killed
            yield json.loads(line)


def write(path: Path, events: list[dict[str, Any]]) -> None:
    """Write events of all ranks, with a row for each rank."""
    ranks = sorted({event["pid"] for event in events})
    names: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in ranks
    ]
    start = min((event["ts"] for event in events), default=now())
    body = {
        "traceEvents": [*names, *events],
        "displayTimeUnit": "ms",
        "metadata": {"start_time_since_epoch_in_micros": int(start)},
    }
    path.write_text(json.dumps(body), encoding="utf-8")


timeline = Timeline()
"""That of this process."""
