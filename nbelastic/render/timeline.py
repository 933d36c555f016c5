"""Timeline: world size, events and throughput over time, as SVG.

The drawing is as wide as its place allows, and keeps its height and the size of its text: positions
are percentages, and lines are in a nested drawing that is stretched. So it can be read on a phone,
in a narrow column and without its style.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nbelastic.status import HistoryEvent

from .formatting import abbreviate, count, duration, escape, rate, worker
from .text import JobSnapshot

WIDTH = 1000  # units across the drawing: a tenth of a percent each

TOP, STEP_HEIGHT = 22, 88
PACE_HEIGHT, GAP = 34, 20
FOOT = 22
MAX_SIZE = 19_000  # maximum of characters of SVG
COLUMNS = 180  # in which marks of a kind are one; fewer if the drawing gets too large
MAX_TICKS = 4  # they must not touch at a width of 180 pixels

MARKS = {
    "lost": ("rank lost", "m-4-4l8 8m0-8l-8 8"),
    "left": ("leave", "m-4.5-4h9l-4.5 8z"),
    "joined": ("join", "m-4.5 4h9l-4.5-8z"),
}
"""Marked kinds of event: noun, and shape around the current point. No two share a shape."""

SIZED = frozenset({"formed", "reset", "lost", "left"})  # their size is the world size
MOST_OF_PACE = 0.99  # share of values that set the scale: a spike would flatten all others
_STROKE = 'fill="none" stroke="currentColor" vector-effect="non-scaling-stroke"'
_WIDE = '<tspan class="nbe-wide">{}</tspan>'
_TEXT = '<text fill="currentColor"'

_NICE = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200)


@dataclass(frozen=True)
class _Scale:
    begin: float
    end: float
    top: int

    def share(self, seconds: float) -> float:
        return min(max((seconds - self.begin) / (self.end - self.begin), 0.0), 1.0)

    def x(self, seconds: float) -> float:
        return round(WIDTH * self.share(seconds), 1)

    def y(self, size: float) -> float:
        return round(TOP + STEP_HEIGHT * (1 - size / self.top), 1)


def timeline(snapshot: JobSnapshot) -> str:
    """Return the timeline as SVG of less than 20 KB."""
    columns = COLUMNS
    while len(drawn := _draw(snapshot, columns)) > MAX_SIZE and columns > 1:
        columns = columns * 3 // 4
    return drawn


def legend(snapshot: JobSnapshot) -> str:
    """Return the meaning of the marks as an HTML list. The page's head counts the resets."""
    counts = Counter(event.kind for event in _changes(snapshot))
    items = [
        f'<li><svg viewBox="0 0 12 12" width="12" height="12" aria-hidden="true">'
        f"{_mark(kind, 6, 6, shape)}</svg>{count(counts[kind], noun)}</li>"
        for kind, (noun, shape) in MARKS.items()
        if counts[kind]
    ]
    return f'<ul class="nbe-legend">{"".join(items)}</ul>' if items else ""


def thin(points: Sequence[tuple[float, float]], columns: int) -> list[tuple[float, float]]:
    """Return the lowest, the highest and the last point of each column, in their order."""
    finite = [p for p in points if math.isfinite(p[0]) and math.isfinite(p[1])]
    if len(finite) <= 2 * columns:
        return finite
    first, last = finite[0][0], finite[-1][0]
    width = (last - first) / columns or 1.0
    parts: dict[int, list[tuple[float, float]]] = {}
    for point in finite:
        parts.setdefault(min(int((point[0] - first) / width), columns - 1), []).append(point)
    kept: list[tuple[float, float]] = []
    for part in parts.values():
        by_value = sorted(enumerate(part), key=lambda each: each[1][1])
        ends = {by_value[0], by_value[-1], (len(part) - 1, part[-1])}
        kept += [point for _, point in sorted(ends)]
    return kept


def _draw(snapshot: JobSnapshot, columns: int) -> str:
    steps = world_sizes(snapshot)
    status = snapshot.status
    sizes = [size for _, size in steps]
    begin = next((at for at, size in steps if size), 0.0)
    end = max(status.elapsed, steps[-1][0], begin + 1.0)
    limit = status.max_np if status.max_np and status.max_np <= 2 * max(*sizes, 2) else 0
    scale = _Scale(begin, end, max(*sizes, limit, status.min_np, 1))
    height = TOP + STEP_HEIGHT + (PACE_HEIGHT + GAP if snapshot.pace else 0) + FOOT
    lines = [_grid(scale, status.min_np, limit), _line(scale, steps), _pace(scale, snapshot.pace)]
    return "".join(
        [
            f'<svg width="100%" height="{height}" role="img" font-size="12" '
            f'aria-label="{escape(_summary(snapshot, sizes, end - begin))}">',
            f'<svg class="nbe-lines" viewBox="0 0 {WIDTH} {height}" width="100%" '
            f'height="{height}" preserveAspectRatio="none">{"".join(lines)}</svg>',
            _labels(scale, height, snapshot.pace),
            *_marks(snapshot, scale, columns),
            "</svg>",
        ]
    )


def world_sizes(snapshot: JobSnapshot) -> list[tuple[float, int]]:
    """Return the times and values of the world size."""
    steps = [(0.0, 0)]
    for event in snapshot.history:
        if event.kind in SIZED and event.size != steps[-1][1]:
            steps.append((max(snapshot.offset(event), steps[-1][0]), event.size))
    return steps


def _changes(snapshot: JobSnapshot) -> Iterator[HistoryEvent]:
    """Yield the marked events; the ranks of the first generation do not count as joins."""
    formed = False
    for event in snapshot.history:
        formed = formed or event.kind in SIZED
        if event.kind in MARKS and formed:
            yield event


def _summary(snapshot: JobSnapshot, sizes: Sequence[int], seconds: float) -> str:
    counts = Counter(event.kind for event in _changes(snapshot))
    words = ", ".join(count(counts[kind], noun) for kind, (noun, _) in MARKS.items())
    most = count(max(sizes), "rank")
    return f"World size over {duration(seconds)}: {sizes[-1]} at last, at most {most}; {words}"


def _levels(scale: _Scale) -> list[int]:
    return sorted({0, scale.top} | ({scale.top // 2} if scale.top >= 4 else set()))


def _grid(scale: _Scale, min_np: int, limit: int) -> str:
    parts = [f'<path class="nbe-grid" d="M0 {scale.y(n):g}H{WIDTH}"/>' for n in _levels(scale)]
    for name, size in (("min", min_np), ("max", limit)):
        if size:
            y = scale.y(size)
            parts.append(f'<path class="nbe-limit" d="M0 {y:g}H{WIDTH}">')
            parts.append(f"<title>{name}_np {size}</title></path>")
    return "".join(parts)


def _labels(scale: _Scale, height: int, pace: Sequence[tuple[float, float]]) -> str:
    parts = []
    for size in _levels(scale)[1:]:
        words = str(size)
        if size == scale.top:
            words += _WIDE.format(count(size, "rank").removeprefix(words))
        parts.append(f'{_TEXT} x="0" y="{scale.y(size) - 4:g}">{words}</text>')
    length = scale.end - scale.begin
    nice = (s for s in _NICE if length / s < MAX_TICKS)
    step = next(nice, 86400 * math.ceil(length / 86400 / MAX_TICKS))
    for i in range(math.ceil(scale.begin / step), int(scale.end / step) + 1):
        at = scale.x(i * step) / 10
        seldom = ' class="nbe-wide"' if i % 2 else ""
        anchor = "start" if at < 5 else "end" if at > 90 else "middle"
        parts.append(f'{_TEXT}{seldom} x="{at:g}%" y="{height - 6}" text-anchor="{anchor}">')
        parts.append(f"{duration(i * step)}</text>")
    if pace:
        words = f"samples/s{_WIDE.format(f', {_most_of(pace)[1]}')}"
        parts.append(f'{_TEXT} x="0" y="{TOP + STEP_HEIGHT + 15}">{words}</text>')
    return "".join(parts)


def _line(scale: _Scale, steps: Sequence[tuple[float, int]]) -> str:
    turns = [f"H{scale.x(at):g}V{scale.y(size):g}" for at, size in thin(steps, COLUMNS // 2)]
    path = f"M0 {scale.y(0):g}{''.join(turns)}H{scale.x(scale.end):g}"
    return (
        f'<path class="nbe-under" fill="none" d="{path}V{scale.y(0):g}z"/>'
        f'<path class="nbe-step" {_STROKE} d="{path}"/>'
    )


def _pace(scale: _Scale, pace: Sequence[tuple[float, float]]) -> str:
    points = thin(pace, COLUMNS // 2)
    if not points:
        return ""
    highest, most = _most_of(pace)
    floor = TOP + STEP_HEIGHT + GAP + PACE_HEIGHT
    places = [
        f"{scale.x(at):g} {floor - PACE_HEIGHT * min(max(value / highest, 0.0), 1.0):.1f}"
        for at, value in points
    ]
    last = rate(points[-1][1])
    title = f"throughput: {last} samples/s at last, {most}"
    left, right = scale.x(points[0][0]), scale.x(points[-1][0])
    return (
        f'<path class="nbe-under" fill="none" d="M{left:g} {floor}L{"L".join(places)}'
        f'L{right:g} {floor}z"><title>{title}</title></path>'
        f'<path class="nbe-step" {_STROKE} d="M{"L".join(places)}"/>'
        f'<path class="nbe-grid" d="M0 {floor}H{WIDTH}"/>'
    )


def _most_of(pace: Sequence[tuple[float, float]]) -> tuple[float, str]:
    """Return the value at the top of the throughput's scale, and its label."""
    values = sorted(value for _, value in pace if math.isfinite(value)) or [0.0]
    most = values[int(MOST_OF_PACE * (len(values) - 1))]
    if values[-1] <= 2 * most:
        return values[-1] or 1.0, f"max {rate(values[-1])}"
    return most or values[-1], f"{MOST_OF_PACE:.0%} below {rate(most)}"


# -- marks -----------------------------------------------------------------------------------------


def _marks(snapshot: JobSnapshot, scale: _Scale, columns: int) -> Iterable[str]:
    groups: dict[tuple[str, int], list[HistoryEvent]] = {}
    for event in _changes(snapshot):
        column = int(scale.share(snapshot.offset(event)) * columns)
        groups.setdefault((event.kind, column), []).append(event)
    for (kind, _), events in groups.items():
        noun, shape = MARKS[kind]
        first, last = snapshot.offset(events[0]), snapshot.offset(events[-1])
        if len(events) > 1:
            words = f"{count(len(events), noun)}, {duration(first)} to {duration(last)}"
        else:
            (event,) = events
            who = "a rank" if event.rank is None else f"rank {event.rank}"
            who += f" on {worker(event.name, event.worker)}" if event.worker else ""
            detail = f": {abbreviate(event.detail, 60)}" if event.detail else ""
            words = f"{who} {kind}{detail}, {duration(first)}"
        x, y = scale.x((first + last) / 2) / 10, scale.y(min(events[-1].size, scale.top))
        mark = _mark(kind, 0, 0, shape, words)
        yield f'<svg class="nbe-at" x="{x:g}%" y="{y:g}" overflow="visible">{mark}</svg>'


def _mark(kind: str, x: float, y: float, shape: str, title: str = "") -> str:
    tip = f"<title>{escape(title)}</title>" if title else ""
    return f'<path class="nbe-{kind}" stroke="currentColor" d="M{x:g} {y:g}{shape}">{tip}</path>'
