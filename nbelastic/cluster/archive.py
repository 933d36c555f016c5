"""What the scheduler keeps of a job for a kernel that comes later, or comes back."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from nbelastic.membership import Publish, Record, StartRank

if TYPE_CHECKING:
    from nbelastic.membership import Effect

    from .protocol import Message

__all__ = ["Archive"]

MOST_OUTPUT = 2**20
"""Characters printed by ranks that are kept; the oldest go first."""

MOST_ROWS = 20_000
"""Reports of ranks that are kept; the oldest go first."""


class Archive:
    """Results, failures, history, output and figures of one job.

    All of it passes through the scheduler anyway. Results and failures are kept whole, until the
    job is closed; of the rest there is only so much.
    """

    def __init__(self) -> None:
        self.results: dict[int, bytes] = {}
        self.failures: dict[int, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.seats: dict[int, tuple[int, str]] = {}
        self._output: deque[tuple[int, str]] = deque()
        self._length = 0
        self._figures: dict[int, list[Any]] = {}
        self._rows: deque[tuple[int, Any]] = deque(maxlen=MOST_ROWS)

    def note_event(self, event: Message, attachment: Any) -> None:
        """Keep what came with an event of a rank."""
        if event["kind"] == "RankReturned":
            self.results[event["start"]] = attachment
        elif event["kind"] == "RankFailed" and attachment:
            self.failures[event["start"]] = attachment

    def note_effect(self, effect: Effect, size: int) -> None:
        """Keep what the machine wants to be remembered."""
        if isinstance(effect, StartRank):
            self.seats[effect.start] = (effect.place.rank, effect.slot.worker)
        elif isinstance(effect, Publish):
            for rank, member in enumerate(effect.plan.members):
                self.seats[member.start] = (rank, member.slot.worker)
        elif isinstance(effect, Record):
            self.record(effect.kind, size=size, **_but_kind(effect))

    def record(self, kind: str, **fields: Any) -> None:
        """Add to the history."""
        start = fields.get("start")
        line = self._figures[start][-1] if start in self._figures else []
        self.history.append({"time": time.time(), "kind": kind, "line": line, **fields})

    def note_message(self, do: str, fields: Message) -> None:
        """Keep what is said to a driver, if it is for people."""
        if do == "output":
            self._output.append((fields["start"], fields["text"]))
            self._length += len(fields["text"])
            while self._length > MOST_OUTPUT and len(self._output) > 1:
                self._length -= len(self._output.popleft()[1])
        elif do == "vitals":
            for start, figures, rows in fields["vitals"]:
                self._figures[start] = figures
                self._rows.extend((start, row) for row in rows)

    def pack(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        rows: dict[int, list[Any]] = {}
        for start, row in self._rows:
            rows.setdefault(start, []).append(row)
        return {
            "results": list(self.results.items()),
            "failures": list(self.failures.items()),
            "history": self.history,
            "seats": list(self.seats.items()),
            "output": list(self._output),
            "vitals": [[start, fig, rows.get(start, [])] for start, fig in self._figures.items()],
        }


def _but_kind(record: Record) -> dict[str, Any]:
    return {
        "generation": record.generation,
        "worker": record.worker,
        "rank": record.rank,
        "start": record.start,
        "detail": record.detail,
    }
