"""The live view: frames at the bottom of a terminal, with output scrolling above.

With rich, the extra ``nbelastic[cli]``. Frames go to stderr. Output of ranks goes there, too, where
stdout is the terminal, else to stdout.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from nbelastic.cli.view.display import WaitView
from nbelastic.render import (
    FIGURES,
    JobSnapshot,
    abbreviate,
    count,
    duration,
    number,
    pace,
    printable,
    sentence,
)

if TYPE_CHECKING:
    from nbelastic.driver import HistoryEvent
    from nbelastic.driver.status import JobStatus, RankStatus

BETWEEN_FRAMES_S = 0.25
"""Seconds between two frames."""


def as_text(row: Row) -> Text:
    """Return a row of a frame for rich."""
    text = Text(no_wrap=True, overflow="crop")
    for words, style in row:
        text.append(words, STYLES.get(style))
    return text


class LiveView(WaitView):
    """Frames of a job, and output of ranks above them."""

    def __init__(self, *args: Any, console: Console | None = None) -> None:
        super().__init__(*args)
        self._console = console or Console(file=sys.stderr, highlight=False, markup=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._next = 0.0

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._take()
            self.write_rest()
        finally:
            self._live.__exit__(None, None, None)  # the cursor is back
        if self.job.done():
            self._console.print(self._frame())
            self.write_end()

    def tick(self) -> None:
        super().tick()
        now = time.monotonic()
        if now >= self._next:
            self._next = now + BETWEEN_FRAMES_S
            self._live.update(self._frame(), refresh=True)

    def _frame(self) -> Group:
        width, height = self._console.size
        return Group(*map(as_text, frame(JobSnapshot.of(self.job), width, height)))

    def write_lines(self, lines: list[tuple[int | None, str]]) -> None:
        if sys.stdout is None or not sys.stdout.isatty():
            super().write_lines(lines)
            return
        for rank, line in lines:
            self._console.print(Text.from_ansi(self.prefixed(rank, line)), soft_wrap=True)

    def write_event(self, event: HistoryEvent) -> None:
        """Write nothing: a frame has the last events."""

    def write_message(self, words: str) -> None:
        self._console.print(Text(str(printable(words))), soft_wrap=True)


Row: TypeAlias = "list[tuple[str, str]]"
"""Pieces of a row, each with the name of its style; empty for none."""

STYLES = {
    "good": "green",
    "busy": "yellow",
    "bad": "bold red",
    "quiet": "dim",
    "head": "bold",
}

MAX_EVENTS = 5
MAX_METRICS = 3
NARROWEST_BAR = 4
NARROWEST_END = 22  # so that bars keep their length while figures grow

_OF_STATE = {
    "running": "good",
    "finished": "good",
    "returned": "good",
    "done": "good",
    "failed": "bad",
    "stopped": "bad",
    "detached": "bad",
}


def frame(snapshot: JobSnapshot, width: int, height: int = 24) -> list[Row]:
    """Return the rows of a frame for a terminal, none wider than `width`; pure."""
    status = snapshot.status
    rows = [_head(snapshot, width)]
    if status.reason and not snapshot.ended:
        rows.append([("  " + status.reason, "busy")])
    rows += [[(f"  warning: {headline}", "bad")] for headline in status.headlines]
    events = _events(snapshot)
    room = max(height - len(rows) - len(events) - 2, 1)
    rows += _ranks(status.ranks, width, room)
    return [_cut(row, width) for row in [*rows, *events]]


def _head(snapshot: JobSnapshot, width: int) -> Row:
    """Return the status line: state, ranks, progress, times; more facts as room allows."""
    status = snapshot.status
    facts = [_size(status)]
    if (progress := status.progress) is not None:
        place = f"step {progress.step:,}/{progress.steps:,}"
        if not progress.steps:
            place = f"epoch {progress.epoch}/{progress.epochs}"
        facts.append(f"{place} ({progress.fraction:.0%})")
    else:
        facts.append(count(status.commits, "commit"))
    facts.append(duration(status.elapsed))
    if progress is not None and progress.remaining_s is not None:
        facts[-1] += f", {duration(progress.remaining_s)} left"
    facts += filter(None, [" ".join(pace(status)).strip()])
    facts += [
        f"{abbreviate(name, 16)} {number(points[-1][1])}"
        for name, points in list(snapshot.curves.items())[:MAX_METRICS]
        if points
    ]
    facts.append(count(status.resets, "reset"))
    name = abbreviate(status.name, 24)
    while len(" · ".join([f"{name} {status.state_in_words}", *facts])) > width and len(facts) > 3:
        facts.pop()  # a fact is whole, or is not there
    return [
        (f"{name} ", "head"),
        (status.state_in_words, _OF_STATE.get(status.state_in_words, "busy")),
        (" · " + " · ".join(facts), ""),
    ]


def _size(status: JobStatus) -> str:
    most = "" if status.max_np is None else f"/{status.max_np}"
    noun = "rank" if (status.max_np or status.size) == 1 else "ranks"
    return f"{status.size}{most} {noun}"


def _ranks(ranks: tuple[RankStatus, ...], width: int, room: int) -> list[Row]:
    shown = ranks if len(ranks) <= room else ranks[: max(room - 1, 0)]
    fastest = max((rank.samples_per_s or 0.0 for rank in ranks), default=0.0)
    names = [rank.name or rank.worker.rpartition("://")[2] for rank in shown]
    longest = min(max(map(len, names), default=0), max(width // 3, 8))
    ends = [" ".join(each.in_frame(rank) for each in FIGURES if each.in_frame) for rank in shown]
    most = max([NARROWEST_END, *map(len, ends)])
    rows = [
        _rank(rank, name, end.rstrip(), (longest, most, width), fastest)
        for rank, name, end in zip(shown, names, ends, strict=True)
    ]
    if len(shown) < len(ranks):
        rows.append([(f"  + {len(ranks) - len(shown)} more", "quiet")])
    return rows


def _rank(
    rank: RankStatus, name: str, end: str, widths: tuple[int, int, int], fastest: float
) -> Row:
    """Return a rank with a bar for its pace, relative to the fastest.

    The `widths` are those of names, of ends, and of the terminal.
    """
    longest, most, width = widths
    which = "   –" if rank.rank is None else f"{rank.rank:4d}"
    start = f"{which}  {abbreviate(name, longest):<{longest}}  "
    state = f"{rank.state:<9} "
    room = width - len(start) - len(state) - most - 2
    style = _OF_STATE.get(rank.state, "busy")
    bar: Row = []
    if fastest and room >= NARROWEST_BAR:  # an empty bar would look like no progress
        size = min(room, 40)
        share = (rank.samples_per_s or 0.0) / fastest
        full = round(size * min(share, 1.0))
        bar = [("█" * full, style), ("░" * (size - full), "quiet")]
    return [(start, ""), (state, style), *bar, (f" {end}", "")]


def _events(snapshot: JobSnapshot) -> list[Row]:
    found: list[Row] = []
    for event in reversed(snapshot.history):
        words = sentence(snapshot, event)
        if words and event.kind not in ("warning",):
            found.append([(f"  {words}", "bad" if event.kind in ("lost", "failed") else "quiet")])
        if len(found) == MAX_EVENTS:
            break
    return found[::-1]


def _cut(row: Row, width: int) -> Row:
    """Cut a row to a width, a text in its middle; control characters and breaks are replaced."""
    cut: Row = []
    left = width
    for text, style in row:
        clean = str(printable(text.replace("\n", " ").replace("\t", " ")))
        if len(clean) > left:  # a message ends with the line of code or the remedy
            kept = max(left - 1, 0)
            clean = clean[: kept - kept // 3] + "…" * (left > 0) + clean[len(clean) - kept // 3 :]
        if clean:
            cut.append((clean, style))
        left -= len(clean)
    return cut
