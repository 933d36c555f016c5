"""Sentences for people: details of the history, and lines of a status."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbelastic.messages import LossReason, Lost, RankError, Reason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbelastic.driver.status import DataStatus

OUTPUT_GAP = "output of ranks was left out, because this kernel did not read it for a while"


def in_micro_batches(count: int, why_not_exact: str) -> str:
    """Return how a step is divided, and whether the training is exact; empty without a loader."""
    if not count:
        return ""
    exact = f"not exact: {why_not_exact}" if why_not_exact else "exact"
    return f"{count} micro-batch{'es' * (count != 1)} a step, {exact}"


def rows_in_words(data: DataStatus, *, ended: bool) -> str:
    """Return the rows of a source: of the job if it has ended, else also those of the epoch."""
    counts = f"{data.redone:,} redone, {data.lost:,} lost"
    rows = data.seen if ended else data.done
    noun = f"{rows:,} row{'s' * (rows != 1)}"
    if ended:
        return f"{noun} once, {counts}"
    left = "" if data.left is None else f", {data.left:,} left"
    return f"{data.source}: {noun} of epoch {data.epoch + 1} done{left}, {counts}"


def history_detail(reason: Reason | None, *, executing: str = "", raised: str = "") -> str:
    """Return the detail of a history entry, which names its rank and worker apart.

    With it go the line of code that the rank was executing last, and the one at which it raised.
    """
    if isinstance(reason, RankError):
        return reason.at(raised)
    if not isinstance(reason, Lost):
        return str(reason or "")
    words = reason.cause
    if reason.reason in (LossReason.STALLED, LossReason.NOT_READY) and executing:
        return f"{words}; it was executing {executing}"
    return f"{words}; raised at {raised}" if raised else words


def reset_detail(figures: Mapping[str, float]) -> str:
    """Return the detail of a history entry about a reset, from its timings in milliseconds."""
    batches, samples = (int(figures.get(name, 0)) for name in ("batches", "samples"))
    phases = [f"{k} {v:.1f}" for k, v in figures.items() if k not in ("batches", "samples")]
    words = ", ".join(phases) + " ms"
    if not batches:
        return words
    again = f"{batches:,} {'batch' if batches == 1 else 'batches'}"
    return f"{words}; {again}{f' of {samples:,} samples' if samples else ''} redone"


def straggler_detail(figures: Mapping[str, float]) -> str:
    """Return the detail of a history entry about a rank that holds the others up."""
    after, before, of = (int(figures.get(name, 0)) for name in ("micro_batches", "before", "of"))
    return (
        f"takes {figures.get('times', 0.0):.1f} times as long for a micro-batch as the others; "
        f"computes {after} of {of} now, {before} before"
    )
