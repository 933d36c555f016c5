"""A job at a moment, and in words: a line on its state, changes with their costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbelastic.driver import driver_of
from nbelastic.messages import over
from nbelastic.status import DataStatus, HistoryEvent, JobStatus

from .formatting import abbreviate, count, duration, limits, pace, worker

MOST_POINTS = 500  # points of a curve, evenly chosen, the newest among them
MOST_OUTPUT = 8_000  # characters at the end of rank 0's output that are looked at
ENDED = frozenset({"finished", "failed", "stopped", "detached"})  # states, and kinds of event
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
}
"""Kinds of event that are changes by themselves, and how a sentence on one begins."""

_ANNOUNCED = frozenset({"joined", "lost", "left", *HAPPENED}) | ENDED


@dataclass(frozen=True)
class JobSnapshot:
    """A job at one moment, with its past."""

    status: JobStatus
    history: Sequence[HistoryEvent] = ()  # oldest first
    started: float = 0.0  # seconds since the epoch, like the times of the history
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    pace: Sequence[tuple[float, float]] = ()  # seconds since the start, and samples/s
    output: str = ""  # the last that rank 0 has printed
    error: str = ""  # what the job's result raises

    @classmethod
    def of(cls, job: Any) -> JobSnapshot:
        """Return a snapshot of a job."""
        log, status = driver_of(job).log, job.status
        curves = log.metrics.curves(MOST_POINTS)
        error = str(job.exception()) if status.state == "failed" else ""
        pace, output = log.metrics.pace(), log.printed.last(0, MOST_OUTPUT)
        return cls(status, job.history, job.started, curves, pace, output, error)

    @property
    def ended(self) -> bool:
        """Whether the job has ended."""
        return self.status.state in ENDED

    def offset(self, event: HistoryEvent) -> float:
        """Return the seconds from the start to an event."""
        return event.time - self.started


def text(snapshot: JobSnapshot) -> str:
    """Return a line on a job, equal in each run of a notebook."""
    # It has no times, addresses or ports. Ranks, resets and commits depend on the moment, as the
    # state does, unless the job has finished.
    status = snapshot.status
    head = f"nbelastic job {abbreviate(status.name, 60)}"
    if status.state == "finished":
        facts = [
            status.state_in_words,
            count(status.size, "rank"),
            count(status.resets, "reset"),
            count(status.commits, "commit"),
            *(rows_in_words(each, ended=True) for each in status.data),
            *(f"warning: {abbreviate(headline, 120)}" for headline in status.headlines),
        ]
    elif snapshot.ended:
        facts = [status.state]
    else:
        ranks = limits(status.min_np, status.max_np)
        facts = ["under way", f"{ranks} rank" if ranks == "1" else f"{ranks} ranks"]
    return f"{head}: {' · '.join(facts)}"


def line(snapshot: JobSnapshot) -> str:
    """Return one line on the current state, for a terminal."""
    status = snapshot.status
    state = status.state_in_words
    if status.reason and not snapshot.ended:
        state = f"{state} ({abbreviate(status.reason, 60)})"
    ranks = f"{count(status.size, 'rank')} {over(status.backend)}".rstrip()
    facts = [state, ranks, count(status.commits, "commit")]
    if status.progress is not None:
        facts.append(f"{status.progress.fraction:.0%}")
    facts += filter(None, [" ".join(pace(status)).strip()])
    if status.progress is not None and status.progress.remaining_s is not None:
        facts.append(f"{duration(status.progress.remaining_s)} left")
    facts += [f"warning: {abbreviate(headline, 60)}" for headline in status.headlines]
    return f"{abbreviate(status.name, 30)}: {' · '.join(facts)}"


def in_micro_batches(count: int, why_not_exact: str) -> str:
    """Return how a step is divided, and whether the training is exact; empty without a loader."""
    if not count:
        return ""
    exact = f"not exact: {why_not_exact}" if why_not_exact else "exact"
    return f"{count} micro-batch{'es' * (count != 1)} a step, {exact}"


def rows_in_words(data: DataStatus, *, ended: bool) -> str:
    """Return the rows of a source in words: the job's if `ended`, else the epoch's."""
    counts = f"{data.redone:,} redone, {data.lost:,} lost"
    rows = data.seen if ended else data.done
    noun = f"{rows:,} row{'s' * (rows != 1)}"
    if ended:
        return f"{noun} once, {counts}"
    left = "" if data.left is None else f", {data.left:,} left"
    return f"{data.source}: {noun} of epoch {data.epoch + 1} done{left}, {counts}"


# -- changes ---------------------------------------------------------------------------------------


def recent_changes(snapshot: JobSnapshot) -> list[tuple[float, str]]:
    """Return the seconds after the start and the words of each change, oldest first."""
    found: list[list[HistoryEvent]] = []
    gone: list[HistoryEvent] = []
    change: list[HistoryEvent] | None = None  # a reset, who left before, who joined, its phases
    for event in snapshot.history:
        if event.kind in ("lost", "left"):
            gone.append(event)
        elif event.kind == "reset":
            change, gone = [event, *gone], []
            found.append(change)
        elif event.kind in ("joined", "phases") and change is not None:
            change.append(event)
        elif event.kind in HAPPENED and event.kind != "warning":  # the head of the page shows those
            found.append([event])
    found += [[event] for event in gone]
    return [(snapshot.offset(events[0]), _change(*events)) for events in found]


def _change(first: HistoryEvent, *more: HistoryEvent) -> str:
    if first.kind != "reset":
        words = _gone(first) if first.kind in ("lost", "left") else _happened(first)
        return " · ".join(filter(None, [words, advice(first)]))
    gone = [event for event in more if event.kind in ("lost", "left")]
    come = [event for event in more if event.kind == "joined"]
    parts = [_gone(event) for event in gone[:MAX_NAMED]]
    parts += [f"{_rank(event)} joined" for event in come[:MAX_NAMED]]
    if left_out := len(gone[MAX_NAMED:]) + len(come[MAX_NAMED:]):
        parts.append(f"{left_out:,} more left or joined")
    what = "; ".join(parts) or first.detail
    size = max(event.size for event in (first, *come))
    if size and f"→ {size} ranks" not in what:
        what += f" → {count(size, 'rank')}"
    cost = [_cost(event.figures) for event in more if event.kind == "phases"]
    lost = [f" · {advice(event)}" for event in gone if event.kind == "lost"]
    return "".join([what, *cost[-1:], *lost[:1]])


def advice(event: HistoryEvent) -> str:
    """Return the user's remedy for a rank or worker that does not train; empty for none."""
    if event.kind == "lost":
        return "the cause: job.why()" if event.rank is None else f"the cause: job.why({event.rank})"
    if event.kind == "refused":
        return "dask elastic doctor compares what workers have installed"
    if event.kind == "cooldown" and "for good" in event.detail:
        return "with blacklist_cooldown=(lo, hi) it may come back"
    return ""


def sentence(snapshot: JobSnapshot, event: HistoryEvent) -> str:
    """Return a sentence on an event with its time; empty for an unannounced event."""
    if event.kind not in _ANNOUNCED:
        return ""
    at, detail = duration(snapshot.offset(event)), abbreviate(event.detail, 160)
    if event.kind in HAPPENED:
        return f"{at} {_happened(event, 160)}"
    rank = "A rank" if event.rank is None else f"Rank {event.rank}"
    been = "been " if event.kind == "stopped" else ""
    verb = {"joined": "has joined", "lost": "is lost", "left": "has left"}.get(event.kind)
    words = f"The job has {been}{event.kind}" if verb is None else f"{rank} {verb}"
    return f"{at} {words}{detail and f': {detail}'}"


def _happened(event: HistoryEvent, most: int = 1_000) -> str:
    which = f" ({worker(event.name, event.worker)})" if event.kind == "refused" else ""
    detail = f": {abbreviate(event.detail, most)}" if event.detail else ""
    return f"{HAPPENED[event.kind]}{which if event.worker else ''}{detail}"


def _gone(event: HistoryEvent) -> str:
    detail = f": {abbreviate(event.detail, 160)}" if event.kind == "lost" and event.detail else ""
    return f"{_rank(event)} {event.kind}{detail}"


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
    again = count(batches, "batch") if batches else "no batch"
    return f"{words}, {again}{f' ({samples:,} samples)' if samples else ''} redone"
