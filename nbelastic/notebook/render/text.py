"""A job in one line of text: for ``text/plain``, and for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbelastic.membership import over

from .words import count, duration, limits, rate, shorten

if TYPE_CHECKING:
    from .picture import Picture

__all__ = ["line", "text"]


def text(picture: Picture) -> str:
    """Return one line that is the same in every run of the same notebook.

    No times, addresses or ports. Ranks, resets and commits are counted for a finished job only:
    how far one had come when it failed or was stopped depends on the moment, and so does in which
    state one that goes on happens to be.
    """
    status = picture.status
    head = f"nbelastic job {shorten(status.name, 60)}"
    if status.state == "finished":
        facts = [
            "finished",
            count(status.size, "rank"),
            count(status.resets, "reset"),
            count(status.commits, "commit"),
        ]
    elif picture.ended:
        facts = [status.state]
    else:
        ranks = limits(status.min_np, status.max_np)
        facts = ["under way", f"{ranks} rank" if ranks == "1" else f"{ranks} ranks"]
    return f"{head}: {' · '.join(facts)}"


def line(picture: Picture) -> str:
    """Return one line on how the job stands now, for a terminal."""
    status = picture.status
    state = status.state
    if status.reason and not picture.ended:
        state = f"{state} ({shorten(status.reason, 60)})"
    ranks = f"{count(status.size, 'rank')} {over(status.backend)}".rstrip()
    facts = [state, ranks, count(status.commits, "commit")]
    if status.progress is not None:
        facts.append(f"{status.progress.fraction:.0%}")
    if status.samples_per_s is not None:
        facts.append(f"{rate(status.samples_per_s)} samples/s")
    if status.progress is not None and status.progress.remaining_s is not None:
        facts.append(f"{duration(status.progress.remaining_s)} left")
    return f"{shorten(status.name, 30)}: {' · '.join(facts)}"
