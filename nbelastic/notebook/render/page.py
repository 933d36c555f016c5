"""A job as HTML: its parts, and the whole as one fragment that needs nothing else."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from nbelastic.membership import over

from .curves import curves
from .picture import ENDED
from .theme import STYLE, SYMBOLS
from .timeline import legend, timeline
from .words import count, duration, escape, first_lines, limits, rate, shorten

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbelastic.driver.status import HistoryEvent, JobStatus, RankStatus

    from .picture import Picture

__all__ = ["PARTS", "card", "page"]

MOST_ROWS = 20
MOST_RESETS = 5
ERROR_LINES = 12
_COLUMNS = ("Rank", "Worker", "State", "Step", "Commits", "Samples/s", "Device")
_NUMBERS = frozenset({"Step", "Commits", "Samples/s"})
_HAPPENED = {
    "reset": "Reset",
    "refused": "A worker is not used",
    "restarted": "The job starts over",
    "cooldown": "Cooldown",
    "checkpoint": "Checkpoint",
    "backend": "Backend",
    "abandoned": "Without a kernel",
    "attached": "Taken over",
}
_TOLD = frozenset({"joined", "lost", "left", *_HAPPENED}) | ENDED


def page(picture: Picture, note: str = "") -> str:
    """Return a complete static fragment of HTML: style and all, no script, no other file.

    Parameters
    ----------
    picture : Picture
        What to show.
    note : str
        A line of text to put at the end.
    """
    parts = [part(picture) for part in PARTS.values()]
    if note:
        parts.append(f'<p class="nbe-more">{escape(note)}</p>')
    return STYLE + card("".join(parts), picture.status)


def card(content: str, status: JobStatus) -> str:
    """Return parts of a job in a frame of their own."""
    name = escape(shorten(status.name, 60))
    return (
        f'<div class="nbe nbe-card" role="group" aria-label="nbelastic job {name}">{content}</div>'
    )


# -- how it stands ---------------------------------------------------------------------------------


def head(picture: Picture) -> str:
    """Return the state in word, symbol and colour, the name, and the figures."""
    status = picture.status
    bounds = limits(status.min_np, status.max_np)
    facts = [
        ("ranks", f"{status.size} <small>of {escape(bounds)}</small>"),
        ("resets", f"{status.resets:,}"),
        ("commits", f"{status.commits:,}"),
        ("elapsed", duration(status.elapsed)),
        ("samples/s", rate(status.samples_per_s)),
    ]
    listed = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    state = escape(status.state)
    return (
        f'<div class="nbe-head"><span class="nbe-badge nbe-{state}">'
        f'<i aria-hidden="true">{SYMBOLS.get(status.state, "○")}</i>{state}</span>'
        f'<span class="nbe-name">{escape(shorten(status.name, 60))}</span></div>'
        f'<dl class="nbe-facts">{listed}</dl>{_reason(status)}'
    )


def _reason(status: JobStatus) -> str:
    if not status.reason or status.state == "finished":
        return ""
    if status.state == "failed":
        lines = escape(first_lines(status.reason, ERROR_LINES))
        return f'<pre class="nbe-error">{lines}</pre>'
    return f'<p class="nbe-reason">{escape(shorten(status.reason, 300))}</p>'


def progress(picture: Picture) -> str:
    """Return a progress bar with the remaining time, where the job's state has a total."""
    now = picture.status.progress
    if now is None:
        return ""
    where = f"epoch {min(now.epoch + 1, now.epochs)} of {now.epochs}"
    if now.batches and now.epoch < now.epochs:
        where += f", batch {now.batch:,} of {now.batches:,}"
    left = ""
    if now.remaining_s is not None and not picture.ended:
        left = f"<span>{duration(now.remaining_s)} left</span>"
    share = f"{now.fraction:.0%}"
    return (
        f'<div class="nbe-progress"><progress max="1" value="{now.fraction:.4f}" '
        f'aria-label="Training progress">{share}</progress>'
        f"<b>{share}</b><span>{where}</span>{left}</div>"
    )


def figure(picture: Picture) -> str:
    """Return the timeline with its legend; nothing before something has happened."""
    if not picture.history:
        return ""
    return f'<div class="nbe-figure">{timeline(picture)}{legend(picture)}</div>'


# -- who takes part --------------------------------------------------------------------------------


def ranks(picture: Picture) -> str:
    """Return the table of ranks: at most 20 rows, and how many more there are."""
    every = picture.status.ranks
    if not every:
        return ""
    states = Counter(rank.state for rank in every)
    summary = ", ".join(f"{amount:,} {escape(state)}" for state, amount in states.most_common())
    way = over(picture.status.backend)
    summary += f", {escape(way)}" if way else ""
    titles = "".join(f'<th scope="col"{_side(title)}>{title}</th>' for title in _COLUMNS)
    rows = "".join(_row(rank) for rank in every[:MOST_ROWS])
    more = len(every) - MOST_ROWS
    rest = f'<p class="nbe-more">+ {more:,} more</p>' if more > 0 else ""
    return (
        f'<div><div class="nbe-rows"><table class="nbe-ranks"><caption>Ranks: {summary}</caption>'
        f"<thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table></div>{rest}</div>"
    )


def _side(title: str) -> str:
    return ' class="nbe-n"' if title in _NUMBERS else ""


def _row(rank: RankStatus) -> str:
    host = f" <small>on {escape(shorten(rank.host, 24))}</small>" if rank.host else ""
    return (
        f'<tr><th scope="row">{"–" if rank.rank is None else rank.rank}</th>'
        f"<td>{escape(shorten(rank.worker, 48))}{host}</td><td>{escape(rank.state)}</td>"
        f'<td class="nbe-n">{rank.step:,}</td><td class="nbe-n">{rank.commits:,}</td>'
        f'<td class="nbe-n">{rate(rank.samples_per_s)}</td>'
        f"<td>{escape(shorten(rank.device, 24)) or '–'}</td></tr>"
    )


# -- what has happened -----------------------------------------------------------------------------


def resets(picture: Picture) -> str:
    """Return the last resets with what caused them, newest first."""
    every = [event for event in picture.history if event.kind == "reset"]
    if not every:
        return ""
    items = "".join(
        f"<li><time>{duration(picture.offset(event))}</time>"
        f"{escape(shorten(event.detail, 200)) or 'ranks join or leave'}</li>"
        for event in reversed(every[-MOST_RESETS:])
    )
    more = len(every) - MOST_RESETS
    rest = f'<p class="nbe-more">+ {more:,} more</p>' if more > 0 else ""
    title = count(len(every), "reset")
    listed = f'<ol class="nbe-causes">{items}</ol>{rest}'
    return f"<details open><summary>{title}</summary>{listed}</details>"


def live(picture: Picture) -> str:
    """Return the newest join, loss, leave, reset or end, politely spoken to screen readers."""
    newest = next((event for event in reversed(picture.history) if event.kind in _TOLD), None)
    words = "" if newest is None else f"{duration(picture.offset(newest))} {_words(newest)}"
    return f'<p class="nbe-live" role="status" aria-live="polite">{escape(words)}</p>'


def _words(event: HistoryEvent) -> str:
    detail = f": {shorten(event.detail, 160)}" if event.detail else ""
    if event.kind in _HAPPENED:
        which = (
            f" ({shorten(event.worker, 48)})" if event.kind == "refused" and event.worker else ""
        )
        return f"{_HAPPENED[event.kind]}{which}{detail}"
    if event.kind in ENDED:
        return f"The job has {'been ' if event.kind == 'stopped' else ''}{event.kind}{detail}"
    who = "A rank" if event.rank is None else f"Rank {event.rank}"
    said = {"joined": "has joined", "lost": "is lost", "left": "has left"}[event.kind]
    return f"{who} {said}{detail}"


PARTS: dict[str, Callable[[Picture], str]] = {
    "head": head,
    "progress": progress,
    "timeline": figure,
    "curves": curves,
    "ranks": ranks,
    "resets": resets,
    "live": live,
}
"""The parts of a page, from top to bottom; each is empty where there is nothing to show."""
