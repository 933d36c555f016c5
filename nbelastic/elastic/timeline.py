"""Timeline of a rank, in Chrome's trace format."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = ["Timeline", "now", "timeline", "write"]

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class Timeline:
    """Events of one process, written to a file when recording stops."""

    def __init__(self) -> None:
        self.is_on = self.marks_cycles = False
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._rank = 0

    def start(self, path: str | os.PathLike[str], rank: int, *, marks_cycles: bool) -> None:
        """Record from here on, for a file that Chrome and Perfetto open."""
        with self._lock:
            self.marks_cycles = marks_cycles
            self._path, self._rank, self._events = Path(path), rank, []
            self.is_on = True

    def stop(self) -> list[dict[str, Any]]:
        """Stop recording and return the events."""
        with self._lock:
            self.is_on = self.marks_cycles = False
            events, self._events = self._events, []
        return events

    @property
    def path(self) -> Path | None:
        """The file that was given."""
        return self._path

    def span(self, what: str, name: str | None = None) -> AbstractContextManager[None]:
        """Return a context that is recorded as one block; it costs next to nothing when off."""
        return _Span(self, what, name) if self.is_on else _NOTHING

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
                event["pid"], event["tid"] = self._rank, threading.get_native_id()
                self._events.append(event)


class _Span:
    def __init__(self, timeline: Timeline, what: str, name: str | None) -> None:
        self._timeline, self._what, self._name = timeline, what, name

    def __enter__(self) -> None:
        self._begun = now()

    def __exit__(self, *_: object) -> None:
        self._timeline.add_span(self._what, self._begun, self._name)


def now() -> float:
    """Return the time in microseconds."""
    return time.time() * 1e6


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
