"""Reported metrics as small curves, in SVG."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .formatting import abbreviate, count, number
from .timeline import thin

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .job_snapshot import JobSnapshot

MAX_CURVES = 6
WIDTH, HEIGHT = 160, 32
COLUMNS = 40


LOGARITHMIC = 100.0
"""Ratio of the largest to the smallest value from which the scale is logarithmic."""

HOVERED = 24
"""Places of a curve at which the pointer shows a value."""


@dataclass(frozen=True)
class Curve:
    """A metric: its last value, name, range and label in words, and its drawing in SVG."""

    value: str
    name: str
    range: str
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
    return Curve(number(value), abbreviate(name, 20), words, label, drawn)


def _drawing(points: Sequence[tuple[float, float]], scale: Callable[[float], float]) -> str:
    """Return the line, scaled to its own range; nothing if no value is finite."""
    if not points:
        return ""
    steps, values = zip(*[(step, scale(value)) for step, value in points], strict=True)
    left, low = min(steps), min(values)
    wide, high = max(steps) - left or 1.0, max(values) - low or 1.0
    if not math.isfinite(wide) or not math.isfinite(high):
        return ""
    across = [round(2 + (WIDTH - 4) * (step - left) / wide, 1) for step in steps]
    places = [
        f"{x:g} {HEIGHT - 3 - (HEIGHT - 6) * (value - low) / high:.1f}"
        for x, value in zip(across, values, strict=True)
    ]
    # A line without a length: drawings are stretched, and a circle would become an ellipse.
    dot = (
        f'<path class="nbe-end" stroke="currentColor" stroke-width="5" stroke-linecap="round" '
        f'd="M{places[-1]}h0"/>'
    )
    line = f'<path class="nbe-step" fill="none" stroke="currentColor" d="M{"L".join(places)}"/>'
    hovered = dict(zip((int(x * HOVERED / WIDTH) for x in across), points, strict=True))
    part = WIDTH / HOVERED
    tips = "".join(
        f'<rect x="{column * part:.1f}" width="{part:.1f}" height="{HEIGHT}" fill="none" '
        f'pointer-events="all"><title>step {number(step)}: {number(value)}</title></rect>'
        for column, (step, value) in hovered.items()
    )
    return line + dot + tips
