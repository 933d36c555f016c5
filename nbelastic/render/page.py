"""A job as HTML: its parts, and a page that needs no script and no other file.

The HTML is in ``job.html``, a template that escapes every value. Functions here select the values.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined

from nbelastic.messages import over

from .changes import advice, newest_event, recent_changes
from .curves import HEIGHT, WIDTH, shown_curves
from .figures import shown_figures
from .formatting import (
    abbreviate,
    count,
    duration,
    limits,
    pace,
    printable,
    rate,
    some_lines,
    worker,
)
from .output import MAX_LINE, visible
from .text import in_micro_batches, rows_in_words
from .theme import STYLE, SYMBOLS
from .timeline import legend, timeline, world_sizes

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbelastic.driver.status import HistoryEvent

    from .job_snapshot import JobSnapshot

MAX_ROWS = 20
MAX_CHANGES = 6
MAX_AWAY = 3
MAX_LINES = 20
OUTPUT_TITLE = "The last lines of rank 0; all output: job.logs()"
AWAY_S = 120.0
"""Seconds after its loss for which a worker that has not come back is shown among the ranks."""


def _load() -> Any:
    environment = Environment(autoescape=True, finalize=printable, undefined=StrictUndefined)
    environment.filters |= {
        "duration": duration,
        "some_lines": some_lines,
        "rate": rate,
        "abbreviate": abbreviate,
        "thousands": "{:,}".format,
        "worker": worker,
        "advice": advice,
    }
    source = Path(__file__).with_name("job.html").read_text(encoding="utf-8")
    return environment.from_string("".join(map(str.strip, source.splitlines()))).module


_template = _load()


def page(snapshot: JobSnapshot, note: str = "") -> str:
    """Return a complete static fragment of HTML, style included, with a note at the end."""
    parts = [part(snapshot) for name, part in PARTS.items() if name not in ("live", "output")]
    if printed := output(snapshot):
        parts.append(_template.folded(OUTPUT_TITLE, printed))
    return STYLE + str(_template.page(snapshot.status.name, parts, note))


def head(snapshot: JobSnapshot) -> str:
    """Return the state in word, symbol and colour, the name, the figures and any errors."""
    status = snapshot.status
    symbol = SYMBOLS.get(status.state_in_words, "⚠")
    ranks, words = status.size, f"({limits(status.min_np, status.max_np)})"
    if snapshot.ended:  # a stopped job has no ranks any more
        ranks, words = ranks or world_sizes(snapshot)[-1][1], "at the end"
    return str(_template.head(status, symbol, ranks, words, snapshot.error, *pace(status)))


def progress(snapshot: JobSnapshot) -> str:
    """Return a progress bar with the remaining time, if the job's state has a total."""
    now = snapshot.status.progress
    return (
        "" if now is None else str(_template.progress(now, f"{now.fraction:.0%}", snapshot.ended))
    )


def data(snapshot: JobSnapshot) -> str:
    """Return a line for the rows of each source, if there are loaders."""
    lines = [rows_in_words(each, ended=snapshot.ended) for each in snapshot.status.data]
    return str(_template.data(lines)) if lines else ""


def figure(snapshot: JobSnapshot) -> str:
    """Return the timeline with its legend; nothing before the first event."""
    if not snapshot.history:
        return ""
    return f'<div class="nbe-figure">{timeline(snapshot)}{legend(snapshot)}</div>'


def curves(snapshot: JobSnapshot) -> str:
    """Return a small curve of each metric, with its last value."""
    shown, more = shown_curves(snapshot)
    words = count(more, "more metric") if more > 0 else ""
    return str(_template.curves(shown, WIDTH, HEIGHT, words)) if shown else ""


def ranks(snapshot: JobSnapshot) -> str:
    """Return a table of ranks, and of workers that were lost and may come back."""
    every, away = snapshot.status.ranks, _away(snapshot)
    if not every and not away:
        return ""
    states = Counter(rank.state for rank in every)
    words = [f"{amount:,} {state}" for state, amount in states.most_common()]
    status = snapshot.status
    divided = in_micro_batches(status.micro_batches, status.why_not_exact)
    summary = ", ".join(filter(None, [", ".join(words), over(status.backend), divided]))
    several_hosts = len({rank.host for rank in every}) > 1
    lost = {event.name for event in snapshot.history if event.kind == "lost" and event.name}
    more = len(every) - MAX_ROWS
    figures = shown_figures(status)
    return str(_template.ranks(summary, every[:MAX_ROWS], figures, several_hosts, lost, away, more))


def _away(snapshot: JobSnapshot) -> list[tuple[float, HistoryEvent]]:
    """Return the recent losses of workers that may come back, if the job has room."""
    status = snapshot.status
    full = status.max_np is not None and len(status.ranks) >= status.max_np
    if snapshot.ended or full:
        return []
    here = {rank.name for rank in status.ranks} | {""}
    losses = {event.name: event for event in snapshot.history if event.kind == "lost"}
    found = [(snapshot.offset(e), e) for name, e in losses.items() if name not in here]
    return [(at, event) for at, event in found if status.elapsed - at < AWAY_S][-MAX_AWAY:]


def changes(snapshot: JobSnapshot) -> str:
    """Return the last changes, newest first."""
    lines = recent_changes(snapshot)
    shown = lines[: -MAX_CHANGES - 1 : -1]
    return str(_template.changes(shown, len(lines) - MAX_CHANGES)) if lines else ""


def output(snapshot: JobSnapshot) -> str:
    """Return the last lines that rank 0 has printed."""
    lines = [visible(line) for line in snapshot.output.replace("\r\n", "\n").split("\n")]
    shown = "\n".join(line[:MAX_LINE] for line in lines[-MAX_LINES:]).strip("\n")
    return str(_template.output(shown)) if shown else ""


def live(snapshot: JobSnapshot) -> str:
    """Return the newest event for screen readers."""
    return str(_template.live(newest_event(snapshot)))


PARTS: dict[str, Callable[[JobSnapshot], str]] = {
    "head": head,
    "progress": progress,
    "data": data,
    "timeline": figure,
    "curves": curves,
    "ranks": ranks,
    "changes": changes,
    "output": output,
    "live": live,
}
"""The parts of a page, from top to bottom; each is empty if there is nothing to show."""
