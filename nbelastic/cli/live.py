"""The live view: frames at the bottom of a terminal, with output scrolling above."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from nbelastic.cli.display import WaitView
from nbelastic.driver import HistoryEvent
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
from nbelastic.status import RankStatus

BETWEEN_FRAMES_S = 0.25  # seconds between two frames


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
            super().tick(last=True)
        finally:
            self._live.__exit__(None, None, None)  # the cursor is back
        if self.job.done():
            self._console.print(self._frame())
            self.write_end()

    def tick(self, last: bool = False) -> None:
        super().tick(last)
        now = time.monotonic()
        if now >= self._next:
            self._next = now + BETWEEN_FRAMES_S
            self._live.update(self._frame(), refresh=True)

    def _frame(self) -> Group:
        width, height = self._console.size
        return Group(*frame(JobSnapshot.of(self.job), width, height))

    def write_line(self, rank: int | None, line: str) -> None:
        if sys.stdout is None or not sys.stdout.isatty():
            super().write_line(rank, line)
        else:
            self._console.print(Text.from_ansi(self.prefixed(rank, line)), soft_wrap=True)

    def write_event(self, event: HistoryEvent) -> None:
        """Write nothing: a frame has the last events."""

    def say(self, text: str) -> None:
        self._console.print(Text(str(printable(text))), soft_wrap=True)


MAX_EVENTS = 5
MAX_METRICS = 3
NARROWEST_BAR = 4
NARROWEST_END = 22  # so that bars keep their length while figures grow

BUSY, BAD, QUIET = "yellow", "bold red", "dim"

_STYLES = {
    "running": "green",
    "finished": "green",
    "returned": "green",
    "done": "green",
    "failed": BAD,
    "stopped": BAD,
    "detached": BAD,
}
"""Styles of states; the others are busy."""


def frame(snapshot: JobSnapshot, width: int, height: int = 24) -> list[Text]:
    """Return the rows of a frame for a terminal, none wider than `width`; pure."""
    status = snapshot.status
    rows = [_head(snapshot, width)]
    if status.reason and not snapshot.ended:
        rows.append(_message(status.reason, BUSY, width))
    rows += [_message(f"warning: {headline}", BAD, width) for headline in status.headlines]
    events = _events(snapshot, width)
    room = max(height - len(rows) - len(events) - 2, 1)
    rows += _ranks(status.ranks, width, room) + events
    for row in rows:
        row.truncate(width)
    return rows


def _row(*pieces: tuple[str, str]) -> Text:
    clean = [(str(printable(words)), style) for words, style in pieces]
    return Text.assemble(*clean, no_wrap=True, overflow="crop")


def _message(words: str, style: str, width: int) -> Text:
    return _row((f"  {abbreviate(words, width - 2)}", style))


def _head(snapshot: JobSnapshot, width: int) -> Text:
    """Return the status line: state, ranks, progress, times; more facts as room allows."""
    status = snapshot.status
    most = "" if status.max_np is None else f"/{status.max_np}"
    facts = [f"{status.size}{most} rank{'s' * ((status.max_np or status.size) != 1)}"]
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
    name, state = abbreviate(status.name, 24), status.state_in_words
    while len(" · ".join([f"{name} {state}", *facts])) > width and len(facts) > 3:
        facts.pop()  # a fact is whole, or is not there
    return _row(
        (f"{name} ", "bold"), (state, _STYLES.get(state, BUSY)), (" · " + " · ".join(facts), "")
    )


def _ranks(ranks: tuple[RankStatus, ...], width: int, room: int) -> list[Text]:
    shown = ranks if len(ranks) <= room else ranks[: max(room - 1, 0)]
    fastest = max((rank.samples_per_s or 0.0 for rank in ranks), default=0.0)
    names = [rank.name or rank.worker.rpartition("://")[2] for rank in shown]
    longest = min(max(map(len, names), default=0), max(width // 3, 8))
    ends = [" ".join(each.in_frame(rank) for each in FIGURES if each.in_frame) for rank in shown]
    most = max([NARROWEST_END, *map(len, ends)])
    rows = []
    for rank, name, end in zip(shown, names, ends, strict=True):
        which = "   –" if rank.rank is None else f"{rank.rank:4d}"
        start = f"{which}  {abbreviate(name, longest):<{longest}}  "
        state, style = f"{rank.state:<9} ", _STYLES.get(rank.state, BUSY)
        size = min(width - len(start) - len(state) - most - 2, 40)
        if not fastest or size < NARROWEST_BAR:  # an empty bar would look like no progress
            size = 0
        full = round(size * min((rank.samples_per_s or 0.0) / (fastest or 1.0), 1.0))
        bar = ("█" * full, style), ("░" * (size - full), QUIET)
        rows.append(_row((start, ""), (state, style), *bar, (f" {end.rstrip()}", "")))
    if len(shown) < len(ranks):
        rows.append(_row((f"  + {len(ranks) - len(shown)} more", QUIET)))
    return rows


def _events(snapshot: JobSnapshot, width: int) -> list[Text]:
    found: list[Text] = []
    for event in reversed(snapshot.history):
        words = sentence(snapshot, event)
        if words and event.kind != "warning":
            style = BAD if event.kind in ("lost", "failed") else QUIET
            found.append(_message(words, style, width))
        if len(found) == MAX_EVENTS:
            break
    return found[::-1]
