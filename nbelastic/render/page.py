"""A job as HTML: its parts, and a page that needs no script and no other file.

The HTML is in ``job.html``, a template that escapes every value. Functions here select the values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from nbelastic.messages import over
from nbelastic.status import HistoryEvent

from .figures import shown_figures
from .formatting import (
    abbreviate,
    count,
    duration,
    limits,
    number,
    pace,
    printable,
    rate,
    some_lines,
    worker,
)
from .output import MAX_LINE, visible
from .text import JobSnapshot, advice, in_micro_batches, recent_changes, rows_in_words, sentence
from .timeline import legend, thin, timeline, world_sizes

MAX_ROWS = 20
MAX_CHANGES = 6
MAX_AWAY = 3
MAX_LINES = 20
OUTPUT_TITLE = "The last lines of rank 0; all output: job.logs()"
AWAY_S = 120.0  # seconds for which a lost worker is shown among the ranks

SYMBOLS = {
    "waiting": "○",
    "forming": "◐",
    "running": "●",
    "stopping": "◧",
    "finished": "✓",
    "failed": "✕",
    "stopped": "■",
    "detached": "⇥",
}
"""Symbol of each state. It accompanies the word, and never replaces it."""

# Colours and shapes: of JupyterLab's theme, else of the reader's colour scheme.
_COLOURS = {
    # name: (JupyterLab's variable, light, dark)
    "fg": ("--jp-ui-font-color1", "#1f2328", "#e6edf3"),
    "muted": ("--jp-ui-font-color2", "#59636e", "#9aa4af"),
    "bg": ("--jp-layout-color1", "#ffffff", "#15181d"),
    "soft": ("--jp-layout-color2", "#f3f5f7", "#21262d"),
    "line": ("--jp-border-color2", "#d5dae0", "#3a424c"),
    "accent": ("--jp-brand-color1", "#0b66c3", "#58a6ff"),
    "good": ("--jp-success-color1", "#1a7f37", "#4ac26b"),
    "warn": ("--jp-warn-color1", "#b35900", "#e3a008"),
    "bad": ("--jp-error-color1", "#cf222e", "#ff7b72"),
}


def _palette(column: int) -> str:
    return "".join(
        f"--nbe-{name}:var({entry[0]},{entry[column]});" for name, entry in _COLOURS.items()
    )


_RULES = Path(__file__).with_name("theme.css").read_text(encoding="utf-8").strip()

STYLE = (
    f"<style>.nbe,.nbe-panel{{{_palette(1)}}}"
    f"@media (prefers-color-scheme:dark){{.nbe,.nbe-panel{{{_palette(2)}}}}}"
    f"{_RULES}</style>"
)
"""The style of every part, scoped to class ``nbe``. No part needs a script or another file."""


_environment = Environment(autoescape=True, finalize=printable, undefined=StrictUndefined)
_environment.filters |= {
    "duration": duration,
    "some_lines": some_lines,
    "rate": rate,
    "abbreviate": abbreviate,
    "thousands": "{:,}".format,
    "worker": worker,
    "advice": advice,
}
_source = Path(__file__).with_name("job.html").read_text(encoding="utf-8")
_template: Any = _environment.from_string("".join(map(str.strip, _source.splitlines()))).module


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
    if (now := snapshot.status.progress) is None:
        return ""
    return str(_template.progress(now, f"{now.fraction:.0%}", snapshot.ended))


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
    known = [each for each in snapshot.curves.items() if each[1]]
    shown = [_curve(name, points) for name, points in known[:MAX_CURVES]]
    more = len(known) - MAX_CURVES
    words = count(more, "more metric") if more > 0 else ""
    return str(_template.curves(shown, CURVE_WIDTH, CURVE_HEIGHT, words)) if shown else ""


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
    sentences = (sentence(snapshot, event) for event in reversed(snapshot.history))
    return str(_template.live(next(filter(None, sentences), "")))


MAX_CURVES = 6
CURVE_WIDTH, CURVE_HEIGHT = 160, 32
COLUMNS = 40


LOGARITHMIC = 100.0  # ratio of the largest to the smallest value that makes a scale logarithmic
HOVERED = 24  # places of a curve at which the pointer shows a value


def _curve(name: str, points: Sequence[tuple[float, float]]) -> dict[str, str]:
    """Return a metric's last value, name, range and label in words, and its drawing in SVG."""
    step, value = points[-1]
    finite = [each for _, each in points if math.isfinite(each)]
    low, high = min(finite, default=math.nan), max(finite, default=math.nan)
    # A loss that falls from 2 to 0.001 would be a flat line after its first steps.
    scale = math.log10 if low > 0 and high / low >= LOGARITHMIC else float
    words = f"{number(low)} to {number(high)}" if low < high else ""
    label = (
        f"{abbreviate(name, 40)}: {number(value)} at step {number(step)}, "
        f"{count(len(points), 'value')}{words and f', {words}'}"
    )
    words += ", log" if scale is not float else ""
    drawn = _drawing(thin(points, COLUMNS), scale)
    found = {"value": number(value), "name": abbreviate(name, 20), "path": drawn}
    return {**found, "range": words, "label": label}


def _drawing(points: Sequence[tuple[float, float]], scale: Callable[[float], float]) -> str:
    """Return the line, scaled to its own range; nothing if no value is finite."""
    if not points:
        return ""
    steps, values = zip(*[(step, scale(value)) for step, value in points], strict=True)
    left, low = min(steps), min(values)
    wide, high = max(steps) - left or 1.0, max(values) - low or 1.0
    if not math.isfinite(wide) or not math.isfinite(high):
        return ""
    across = [round(2 + (CURVE_WIDTH - 4) * (step - left) / wide, 1) for step in steps]
    places = [
        f"{x:g} {CURVE_HEIGHT - 3 - (CURVE_HEIGHT - 6) * (value - low) / high:.1f}"
        for x, value in zip(across, values, strict=True)
    ]
    # A line without a length: drawings are stretched, and a circle would become an ellipse.
    dot = (
        f'<path class="nbe-end" stroke="currentColor" stroke-width="5" stroke-linecap="round" '
        f'd="M{places[-1]}h0"/>'
    )
    line = f'<path class="nbe-step" fill="none" stroke="currentColor" d="M{"L".join(places)}"/>'
    hovered = dict(zip((int(x * HOVERED / CURVE_WIDTH) for x in across), points, strict=True))
    part = CURVE_WIDTH / HOVERED
    tips = "".join(
        f'<rect x="{column * part:.1f}" width="{part:.1f}" height="{CURVE_HEIGHT}" fill="none" '
        f'pointer-events="all"><title>step {number(step)}: {number(value)}</title></rect>'
        for column, (step, value) in hovered.items()
    )
    return line + dot + tips


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
