"""Changes of a job in words: each with its causes and its cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .formatting import abbreviate, count, duration, worker
from .job_snapshot import ENDED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbelastic.driver.status import HistoryEvent

    from .job_snapshot import JobSnapshot

MAX_NAMED = 3

HAPPENED = {
    "reset": "Reset",
    "refused": "A worker is not used",
    "restarted": "The job starts over",
    "cooldown": "Cooldown",
    "share": "Share of the cluster",
    "notice": "Notice",
    "checkpoint": "Checkpoint",
    "warning": "Warning",
    "backend": "Backend",
    "abandoned": "Without a kernel",
    "attached": "Taken over",
    "alias": "Alias",
    "straggler": "Straggler",
}
"""Kinds of event that are changes by themselves, and how a sentence on one begins."""

_ANNOUNCED = frozenset({"joined", "lost", "left", *HAPPENED}) | ENDED


@dataclass
class _Change:
    """A change of membership: the ranks that left and joined, and its cost."""

    at: float
    gone: list[HistoryEvent]
    cause: str = ""
    come: list[HistoryEvent] = field(default_factory=list)
    size: int = 0
    cost: Mapping[str, float] = field(default_factory=dict)

    def words(self) -> str:
        parts = [_gone(event) for event in self.gone[:MAX_NAMED]]
        parts += [f"{_rank(event)} joined" for event in self.come[:MAX_NAMED]]
        left_out = len(self.gone[MAX_NAMED:]) + len(self.come[MAX_NAMED:])
        if left_out:
            parts.append(f"{left_out:,} more left or joined")
        what = "; ".join(parts) or self.cause
        if self.size and f"→ {self.size} ranks" not in what:
            what += f" → {count(self.size, 'rank')}"
        lost = [advice(event) for event in self.gone if event.kind == "lost"]
        return what + _cost(self.cost) + (f" · {lost[0]}" if lost else "")


def recent_changes(snapshot: JobSnapshot) -> list[tuple[float, str]]:
    """Return the seconds after the start and the words of each change, oldest first."""
    found: list[tuple[float, _Change | str]] = []
    gone: list[HistoryEvent] = []
    change: _Change | None = None
    for event in snapshot.history:
        at = snapshot.offset(event)
        if event.kind in ("lost", "left"):
            gone.append(event)
        elif event.kind == "reset":
            change = _Change(at, gone, event.detail, size=event.size)
            gone = []
            found.append((at, change))
        elif event.kind == "joined" and change is not None:
            change.come.append(event)
            change.size = max(change.size, event.size)
        elif event.kind == "phases" and change is not None:
            change.cost = event.figures
        elif event.kind in HAPPENED and event.kind != "warning":  # the head of the page shows those
            found.append((at, with_advice(_happened(event), event)))
    found += [(snapshot.offset(event), with_advice(_gone(event), event)) for event in gone]
    return [(at, each.words() if isinstance(each, _Change) else each) for at, each in found]


def advice(event: HistoryEvent) -> str:
    """Return the user's remedy for a rank or worker that does not train; empty for none."""
    if event.kind == "lost":
        return "the cause: job.why()" if event.rank is None else f"the cause: job.why({event.rank})"
    if event.kind == "refused":
        return "dask elastic doctor compares what workers have installed"
    if event.kind == "cooldown" and "for good" in event.detail:
        return "with blacklist_cooldown=(lo, hi) it may come back"
    return ""


def with_advice(words: str, event: HistoryEvent) -> str:
    """Return a sentence on an event, with the user's remedy."""
    return " · ".join(filter(None, [words, advice(event)]))


def newest_event(snapshot: JobSnapshot) -> str:
    """Return a sentence on the newest event, or an empty string."""
    sentences = (sentence(snapshot, event) for event in reversed(snapshot.history))
    return next(filter(None, sentences), "")


def sentence(snapshot: JobSnapshot, event: HistoryEvent) -> str:
    """Return a sentence on an event with its time; empty for an unannounced event."""
    if event.kind not in _ANNOUNCED:
        return ""
    return f"{duration(snapshot.offset(event))} {_sentence(event)}"


def _sentence(event: HistoryEvent) -> str:
    if event.kind in HAPPENED:
        return _happened(event, 160)
    detail = f": {abbreviate(event.detail, 160)}" if event.detail else ""
    if event.kind in ENDED:
        return f"The job has {'been ' if event.kind == 'stopped' else ''}{event.kind}{detail}"
    rank = "A rank" if event.rank is None else f"Rank {event.rank}"
    verb = {"joined": "has joined", "lost": "is lost", "left": "has left"}[event.kind]
    return f"{rank} {verb}{detail}"


def _happened(event: HistoryEvent, most: int = 1_000) -> str:
    if event.kind == "straggler":
        return f"{_rank(event)} {abbreviate(event.detail, 160)}"
    which = f" ({worker(event.name, event.worker)})" if event.kind == "refused" else ""
    detail = f": {abbreviate(event.detail, most)}" if event.detail else ""
    return f"{HAPPENED[event.kind]}{which if event.worker else ''}{detail}"


def _gone(event: HistoryEvent) -> str:
    verb = "lost" if event.kind == "lost" else "left"
    detail = f": {abbreviate(event.detail, 160)}" if event.kind == "lost" and event.detail else ""
    return f"{_rank(event)} {verb}{detail}"


def _rank(event: HistoryEvent) -> str:
    rank = "A rank" if event.rank is None else f"Rank {event.rank}"
    where = worker(event.name, event.worker)
    return f"{rank} on {where}" if where else rank


def _cost(figures: Mapping[str, float]) -> str:
    """Return the time until training went on, and the work that was repeated."""
    after = figures.get("synchronised", figures.get("stepped"))
    if after is None:
        return ""
    words = f" · training went on after {after:,.0f} ms"
    batches, samples = round(figures.get("batches", 0)), round(figures.get("samples", 0))
    if "restored" not in figures:
        return words
    if not batches:
        return f"{words}, no batch redone"
    again = f"{batches:,} {'batch' if batches == 1 else 'batches'}"
    return f"{words}, {again}{f' ({samples:,} samples)' if samples else ''} redone"
