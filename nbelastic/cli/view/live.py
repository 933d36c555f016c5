"""The live view: frames at the bottom of a terminal, with output scrolling above.

With rich, the extra ``nbelastic[cli]``. Frames go to stderr. Output of ranks goes there, too, where
stdout is the terminal, else to stdout.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from nbelastic.render import JobSnapshot, printable

from .display import WaitView
from .frame import STYLES, frame

if TYPE_CHECKING:
    from nbelastic.driver import HistoryEvent

    from .frame import Row

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
