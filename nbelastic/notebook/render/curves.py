"""Reported metrics as small curves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .timeline import thin
from .words import count, escape, number, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .picture import Picture

__all__ = ["curves", "curves_key"]

MOST_CURVES = 6
WIDTH, HEIGHT = 160, 32
COLUMNS = 40


def curves_key(picture: Picture) -> tuple[object, ...]:
    """Return what changes when the curves are to be drawn again: once a second, and at the end."""
    return (int(picture.status.elapsed), picture.status.state, len(picture.curves))


def curves(picture: Picture) -> str:
    """Return a small curve for each metric, with its last value; at most six."""
    known = {name: points for name, points in picture.curves.items() if points}
    if not known:
        return ""
    items = "".join(_curve(name, points) for name, points in list(known.items())[:MOST_CURVES])
    more = len(known) - MOST_CURVES
    rest = f'<p class="nbe-more">+ {count(more, "more metric")}</p>' if more > 0 else ""
    return f'<div><ul class="nbe-curves" aria-label="Metrics">{items}</ul>{rest}</div>'


def _curve(name: str, points: Sequence[tuple[float, float]]) -> str:
    shown = escape(shorten(name, 20))
    step, value = points[-1]
    label = escape(
        f"{shorten(name, 40)}: {number(value)} at step {number(step)}, "
        f"{count(len(points), 'value')}"
    )
    return (
        f"<li><b>{escape(number(value))}</b><span>{shown}</span>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f"<title>{label}</title>{_path(thin(points, COLUMNS))}</svg></li>"
    )


def _path(points: Sequence[tuple[float, float]]) -> str:
    """The line, over the range of its own values; nothing where none of them is finite."""
    if not points:
        return ""
    steps, values = zip(*points, strict=True)
    left, low = min(steps), min(values)
    wide, high = max(steps) - left or 1.0, max(values) - low or 1.0
    if not math.isfinite(wide) or not math.isfinite(high):
        return ""
    places = [
        f"{2 + (WIDTH - 4) * (step - left) / wide:.1f} "
        f"{HEIGHT - 3 - (HEIGHT - 6) * (value - low) / high:.1f}"
        for step, value in points
    ]
    end = places[-1].split()
    dot = f'<circle cx="{end[0]}" cy="{end[1]}" r="2.2" class="nbe-dot" fill="currentColor"/>'
    line = f'<path class="nbe-step" fill="none" stroke="currentColor" d="M{"L".join(places)}"/>'
    return line + dot
