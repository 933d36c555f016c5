"""The timeline: world size over time, what changed it, and the throughput under it, as SVG."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .picture import ENDED
from .words import count, duration, escape, rate, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .picture import Picture

__all__ = ["MARKS", "legend", "thin", "timeline", "timeline_key"]

WIDTH, LEFT, RIGHT = 720, 34, 12
TOP, STEP_HEIGHT = 16, 92
PACE_HEIGHT, GAP = 34, 20
LARGEST = 19_000
"""Characters of SVG, at most."""

MOST_MARKS = 80
COLUMNS = 180
"""Into how many columns a long line is thinned."""

MARKS = {
    "lost": ("loss", "m-4-4l8 8m0-8l-8 8"),
    "left": ("leave", "m-4.5-4h9l-4.5 8z"),
    "joined": ("join", "m-4.5 4h9l-4.5-8z"),
    "reset": ("reset", "m0-5l4.5 5l-4.5 5l-4.5-5z"),
}
"""What is marked: its noun, and its shape around the current point. Each has a shape of its own."""

_NICE = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200)


@dataclass(frozen=True)
class _Scale:
    """From seconds and ranks to places in the drawing."""

    end: float
    top: int

    def x(self, seconds: float) -> float:
        share = min(max(seconds / self.end, 0.0), 1.0)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, size: float) -> float:
        return round(TOP + STEP_HEIGHT * (1 - size / self.top), 1)


def timeline_key(picture: Picture) -> tuple[object, ...]:
    """Return what a timeline depends on, as far as the eye can tell.

    While it is equal, a timeline drawn before still shows the truth: time goes on in steps of
    1/200 of what has passed, of at least a second.
    """
    status = picture.status
    tick = max(1.0, status.elapsed / 200)
    limits = (status.min_np, status.max_np, status.state)
    return (len(picture.history), bool(picture.pace), int(status.elapsed / tick), *limits)


def timeline(picture: Picture) -> str:
    """Return the timeline as SVG, shorter than 20 KB however long the history is."""
    most = MOST_MARKS
    drawn = _draw(picture, most)
    while len(drawn) > LARGEST and most > 1:
        most //= 2
        drawn = _draw(picture, most)
    return drawn


def legend(picture: Picture) -> str:
    """Return what the marks mean and how many there are, as an HTML list."""
    items = []
    for kind, (noun, shape) in MARKS.items():
        amount = picture.count(kind)
        if amount:
            items.append(
                f'<li><svg viewBox="0 0 12 12" aria-hidden="true">{_mark(kind, 6, 6, shape)}</svg>'
                f"{count(amount, noun)}</li>"
            )
    return f'<ul class="nbe-legend">{"".join(items)}</ul>' if items else ""


def thin(points: Sequence[tuple[float, float]], columns: int) -> list[tuple[float, float]]:
    """Return at most two points a column: the lowest and the highest, in their order."""
    finite = [p for p in points if math.isfinite(p[0]) and math.isfinite(p[1])]
    if len(finite) <= 2 * columns:
        return finite
    first, last = finite[0][0], finite[-1][0]
    width = (last - first) / columns or 1.0
    ends: dict[int, list[tuple[float, float]]] = {}
    for point in finite:
        column = min(int((point[0] - first) / width), columns - 1)
        low_high = ends.setdefault(column, [point, point])
        if point[1] < low_high[0][1]:
            low_high[0] = point
        if point[1] > low_high[1][1]:
            low_high[1] = point
    kept = (point for pair in ends.values() for point in pair)
    return sorted(dict.fromkeys(kept))


def _draw(picture: Picture, most_marks: int) -> str:
    steps = _steps(picture)
    status = picture.status
    sizes = [size for _, size in steps]
    end = max(status.elapsed, steps[-1][0], 1.0)
    limit = status.max_np if status.max_np and status.max_np <= 2 * max(*sizes, 2) else 0
    scale = _Scale(end, max(*sizes, limit, status.min_np, 1))
    height = TOP + STEP_HEIGHT + (PACE_HEIGHT + GAP if picture.pace else 0) + 22
    return "".join(
        [
            f'<svg viewBox="0 0 {WIDTH} {height}" role="img" '
            f'aria-label="{escape(_summary(picture, sizes, end))}">',
            _axes(scale, height, status.min_np, limit),
            _line(scale, steps),
            _pace(scale, picture.pace),
            *_marks(picture, scale, most_marks),
            "</svg>",
        ]
    )


def _steps(picture: Picture) -> list[tuple[float, int]]:
    """When the world size changed, and to what."""
    steps = [(0.0, 0)]
    for event in picture.history:
        if event.kind not in ENDED and event.size != steps[-1][1]:
            steps.append((max(picture.offset(event), steps[-1][0]), event.size))
    return steps


def _summary(picture: Picture, sizes: Sequence[int], end: float) -> str:
    counts = (count(picture.count(kind), noun) for kind, (noun, _) in MARKS.items())
    most = count(max(sizes), "rank")
    return f"World size over {duration(end)}: {sizes[-1]} at last, at most {most}; " + ", ".join(
        counts
    )


def _axes(scale: _Scale, height: int, min_np: int, limit: int) -> str:
    right, floor = WIDTH - RIGHT, scale.y(0)
    parts = []
    middle = {scale.top // 2} if scale.top >= 4 else set()
    for size in sorted({0, scale.top} | middle):
        y = scale.y(size)
        parts.append(f'<path class="nbe-grid" d="M{LEFT} {y:g}H{right}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:g}" text-anchor="end">{size}</text>')
    for name, size in (("min", min_np), ("max", limit)):
        if size:
            y = scale.y(size)
            parts.append(f'<path class="nbe-limit" d="M{LEFT} {y:g}H{right}">')
            parts.append(f"<title>{name}_np {size}</title></path>")
    step = next((s for s in _NICE if scale.end / s <= 7), 86400 * math.ceil(scale.end / 604800))
    for i in range(int(scale.end / step) + 1):
        x = scale.x(i * step)
        parts.append(f'<path class="nbe-grid" d="M{x:g} {floor:g}v4"/>')
        parts.append(f'<text x="{x:g}" y="{height - 6}" text-anchor="middle">')
        parts.append(f"{duration(i * step)}</text>")
    parts.append(f'<text x="0" y="{TOP - 7}">ranks</text>')
    return "".join(parts)


def _line(scale: _Scale, steps: Sequence[tuple[float, int]]) -> str:
    """The step line: per column at most its first, lowest, highest and last size."""
    columns: dict[int, list[int]] = {}
    for at, size in steps:
        columns.setdefault(int(at / scale.end * COLUMNS), []).append(size)
    parts: list[str] = []
    exact = len(columns) == len(steps)
    for column, sizes in columns.items():
        at = steps[len(parts)][0] if exact else column * scale.end / COLUMNS
        turns = [min(sizes), max(sizes), sizes[-1]]
        turns = [size for i, size in enumerate(turns) if i == 0 or size != turns[i - 1]]
        heights = "".join(f"V{scale.y(size):g}" for size in turns)
        parts.append(f"H{scale.x(at):g}{heights}" if parts else heights)
    path = f"M{LEFT} {scale.y(0):g}{''.join(parts)}H{scale.x(scale.end):g}"
    return (
        f'<path class="nbe-under" fill="none" d="{path}V{scale.y(0):g}z"/>'
        f'<path class="nbe-step" fill="none" stroke="currentColor" d="{path}"/>'
    )


def _pace(scale: _Scale, pace: Sequence[tuple[float, float]]) -> str:
    """The throughput, as a small area under the time axis."""
    points = thin(pace, COLUMNS // 2)
    if not points:
        return ""
    highest = max((value for _, value in points), default=0.0) or 1.0
    floor = TOP + STEP_HEIGHT + GAP + PACE_HEIGHT
    places = [
        f"{scale.x(at):g} {floor - PACE_HEIGHT * max(value, 0.0) / highest:.1f}"
        for at, value in points
    ]
    last = rate(points[-1][1])
    title = f"throughput: {last} samples/s at last, at most {rate(highest)}"
    left, right = scale.x(points[0][0]), scale.x(points[-1][0])
    return (
        f'<path class="nbe-under" fill="none" d="M{left:g} {floor}L{"L".join(places)}'
        f'L{right:g} {floor}z"><title>{title}</title></path>'
        f'<path class="nbe-step" fill="none" stroke="currentColor" d="M{"L".join(places)}"/>'
        f'<path class="nbe-grid" d="M{LEFT} {floor}H{WIDTH - RIGHT}"/>'
        f'<text x="{LEFT}" y="{TOP + STEP_HEIGHT + 15}">samples/s, at most {rate(highest)}</text>'
    )


# -- marks -----------------------------------------------------------------------------------------


@dataclass
class _Group:
    """Events of one kind that are so close that one mark stands for all."""

    kind: str
    first: float
    last: float
    size: int
    amount: int
    words: str


def _marks(picture: Picture, scale: _Scale, most: int) -> Iterable[str]:
    columns = COLUMNS
    groups = _grouped(picture, scale.end, columns)
    while len(groups) > most and columns > 1:
        columns = columns * 3 // 4
        groups = _grouped(picture, scale.end, columns)
    for group in groups:
        noun, shape = MARKS[group.kind]
        y = TOP - 8.0 if group.kind == "reset" else scale.y(min(group.size, scale.top))
        when = duration(group.first)
        if group.amount > 1:
            words = f"{count(group.amount, noun)}, {when} to {duration(group.last)}"
        else:
            words = f"{group.words}, {when}"
        yield _mark(group.kind, scale.x((group.first + group.last) / 2), y, shape, words)


def _grouped(picture: Picture, end: float, columns: int) -> list[_Group]:
    groups: dict[tuple[str, int], _Group] = {}
    for event in picture.history:
        if event.kind not in MARKS:
            continue
        at = picture.offset(event)
        key = (event.kind, int(at / end * columns))
        group = groups.get(key)
        if group is None:
            groups[key] = _Group(event.kind, at, at, event.size, 1, "")
            who = "" if event.rank is None else f" of rank {event.rank}"
            detail = f": {shorten(event.detail, 60)}" if event.detail else ""
            groups[key].words = f"{MARKS[event.kind][0]}{who}{detail}"
        else:
            group.last, group.size = at, event.size
            group.amount += 1
    return list(groups.values())


def _mark(kind: str, x: float, y: float, shape: str, title: str = "") -> str:
    tip = f"<title>{escape(title)}</title>" if title else ""
    return f'<path class="nbe-{kind}" stroke="currentColor" d="M{x:g} {y:g}{shape}">{tip}</path>'
