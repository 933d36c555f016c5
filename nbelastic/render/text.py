"""A job in lines of text, for ``text/plain`` and for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbelastic.messages import over

from .formatting import abbreviate, count, duration, limits, pace

if TYPE_CHECKING:
    from nbelastic.driver.status import DataStatus

    from .job_snapshot import JobSnapshot


def text(snapshot: JobSnapshot) -> str:
    """Return a line without differences between runs of a notebook.

    It has no times, addresses or ports. It counts ranks, resets and commits of a finished job only,
    because those of another depend on the moment, as does its state.
    """
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
