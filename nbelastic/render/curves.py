"""Reported metrics as small curves, in SVG."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .formatting import abbreviate, count, number
from .timeline import thin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .job_snapshot import JobSnapshot

MAX_CURVES = 6
WIDTH, HEIGHT = 160, 32
COLUMNS = 40


@dataclass(frozen=True)
class Curve:
    """A metric: its last value, name and label in words, and its path in SVG."""

    value: str
    name: str
    label: str
    path: str


def curves_key(snapshot: JobSnapshot) -> tuple[object, ...]:
    """Return a value that changes when the curves must be redrawn: each second, and at the end."""
    return (int(snapshot.status.elapsed), snapshot.status.state, len(snapshot.curves))


def shown_curves(snapshot: JobSnapshot) -> tuple[list[Curve], int]:
    """Return the curves to show, and the number of further metrics."""
    known = {name: points for name, points in snapshot.curves.items() if points}
    shown = [_curve(name, points) for name, points in list(known.items())[:MAX_CURVES]]
    return shown, len(known) - MAX_CURVES


def _curve(name: str, points: Sequence[tuple[float, float]]) -> Curve:
    step, value = points[-1]
    label = (
        f"{abbreviate(name, 40)}: {number(value)} at step {number(step)}, "
        f"{count(len(points), 'value')}"
    )
    return Curve(number(value), abbreviate(name, 20), label, _path(thin(points, COLUMNS)))


def _path(points: Sequence[tuple[float, float]]) -> str:
    """Return the line, scaled to its own range; nothing if no value is finite."""
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
    # A line without a length: drawings are stretched, and a circle would become an ellipse.
    dot = (
        f'<path class="nbe-end" stroke="currentColor" stroke-width="5" stroke-linecap="round" '
        f'd="M{places[-1]}h0"/>'
    )
    line = f'<path class="nbe-step" fill="none" stroke="currentColor" d="M{"L".join(places)}"/>'
    return line + dot
