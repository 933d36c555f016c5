"""What a job's driver keeps for people: history, output, figures, results. It decides nothing.

Written by the driver's thread, read by others, under a lock that is held for moments only.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from nbelastic.cluster import Failure, unpack_error
from nbelastic.membership import HELD_UP, Publish, Record, StartRank

from . import display
from .gauges import Gauges
from .status import HistoryEvent, Output

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nbelastic.membership import Effect

__all__ = ["Books"]


class Books:
    """The books of one job.

    Attributes
    ----------
    started : float
        When the job was started, in seconds since the epoch.
    gauges : Gauges
        What ranks tell of themselves.
    names : dict of int to str
        What to call each start of the function.
    results : dict of int to bytes
        What each start has returned, pickled.
    failures : dict of int to Failure
        What was raised in each start.
    highest_rank : int or None
        Highest number that a rank has had; None while there was none.
    """

    def __init__(self) -> None:
        self.started = time.time()
        self.gauges = Gauges()
        self.names: dict[int, str] = {}
        self.results: dict[int, bytes] = {}
        self.failures: dict[int, Failure] = {}
        self.highest_rank: int | None = None
        self._ranks: dict[int, int] = {}
        self._lock = threading.Lock()
        self._history: list[HistoryEvent] = []
        self._output: list[Output] = []

    # -- what others may see -------------------------------------------------------------------

    def history(self) -> tuple[HistoryEvent, ...]:
        """Return what has happened so far."""
        with self._lock:
            return tuple(self._history)

    def output(self, since: int = 0) -> tuple[Output, ...]:
        """Return what ranks have printed, but for the first `since` pieces."""
        with self._lock:
            return tuple(self._output[since:])

    def latest_rank(self, start: int) -> int | None:
        """Return the rank that a start of the function had last."""
        return self._ranks.get(start)

    # -- for the driver's thread ---------------------------------------------------------------

    def note_attachment(self, kind: str, start: int, attachment: Any) -> None:
        """Keep what came with the last word of a rank."""
        if kind == "RankReturned":
            self.results[start] = attachment
        elif kind == "RankFailed" and attachment:
            self.failures[start] = unpack_error(attachment)

    def note_effect(self, effect: Effect, size: int) -> None:
        """Keep what the machine wants to be remembered, and who is who."""
        if isinstance(effect, StartRank):
            self._seat(effect.start, effect.place.rank, effect.slot.worker)
        elif isinstance(effect, Publish):
            for rank, member in enumerate(effect.plan.members):
                self._seat(member.start, rank, member.slot.worker)
        elif isinstance(effect, Record):
            fields = {name: getattr(effect, name) for name in ("worker", "rank", "start", "detail")}
            self.note(effect.kind, generation=effect.generation, size=size, **fields)

    def _seat(self, start: int, rank: int, worker: str) -> None:
        self.highest_rank = max(rank, self.highest_rank or 0)
        self._ranks[start], self.names[start] = rank, f"rank {rank} on {worker}"

    def note(
        self,
        kind: str,
        *,
        generation: int = 0,
        detail: str = "",
        size: int = 0,
        worker: str | None = None,
        rank: int | None = None,
        start: int | None = None,
        line: list[Any] | None = None,
        time: float | None = None,
    ) -> None:
        """Put something into the history; a rank that was waited for, with the line it stood at."""
        if not line and start is not None:
            line = self.gauges.rank(start).line
        if detail.startswith(HELD_UP) and line:
            file, number, function = line
            place = display.label(file) or file
            detail += f"; it stood at {place}, line {number}, in {function}"
        when = _now() if time is None else time
        event = HistoryEvent(when, kind, worker, rank, generation, detail, size)
        with self._lock:
            self._history.append(event)

    def note_output(self, start: int, text: str) -> None:
        """Keep what a rank has printed."""
        with self._lock:
            self._output.append(Output(start, self._ranks.get(start), text))

    def note_vitals(self, vitals: list[Any], members: Iterable[int]) -> None:
        """Keep what ranks tell of themselves."""
        elapsed = time.time() - self.started
        self.gauges.take(elapsed, vitals)
        self.gauges.note_pace(elapsed, self.gauges.total(members))

    def adopt(self, started: float, archive: Mapping[str, Any]) -> None:
        """Take over the books of a job as the scheduler has kept them."""
        self.started = started
        with self._lock:
            self._history.clear()
            self._output.clear()
        self.gauges.reset()
        self.results = dict(archive["results"])
        self.failures = {start: unpack_error(each) for start, each in archive["failures"]}
        for start, (rank, worker) in archive["seats"]:
            self._seat(start, rank, worker)
        self.note_vitals(archive["vitals"], ())
        for start, text in archive["output"]:
            self.note_output(start, text)
        for fields in archive["history"]:
            self.note(**fields)


def _now() -> float:
    return time.time()
