"""Displays while a thread waits for a job: in a notebook, in a terminal, in a log.

The driver enters one for the length of the wait, calls it about ten times a second, and catches
its exceptions (:mod:`nbelastic.driver.display`).
"""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from nbelastic.render import JobSnapshot, line, text

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from nbelastic.render import Streamer

    from .display_group import DisplayGroup

PANEL_DELAY = 2.0
"""Seconds of waiting before a panel appears."""

BETWEEN_LINES = 0.25
"""Minimum of seconds between two updates of the progress line."""

_CLEAR = "\r\x1b[K"


class OutputDisplay:
    """The ranks' output while a thread waits, and one line when the job has ended."""

    def __init__(
        self,
        job: Any,
        streamer: Streamer,
        quiet: bool = False,  # output alone
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._streamer = streamer
        self._quiet = quiet
        self._clock = clock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._print(self._streamer.remaining_text(self._job))
        self._close()
        if self._job.done() and not self._quiet:
            self._end(text(JobSnapshot.of(self._job)))

    def tick(self) -> None:
        """Write new output, and update what is shown besides."""
        self._print(self._streamer.new_text(self._job))
        self._update()

    def say(self, words: str) -> None:
        """Write one line to the user."""
        write(words.rstrip("\n") + "\n")

    def _print(self, words: str) -> None:
        write(words)

    def _update(self) -> None:
        """Update what is shown besides the output."""

    def _close(self) -> None:
        """End what is shown besides the output."""

    def _end(self, words: str) -> None:
        self.say(words)


class NotebookWaitDisplay(OutputDisplay):
    """A panel and the ranks' output under the cell that waits."""

    def __init__(self, *args: Any, group: Callable[[], DisplayGroup]) -> None:
        super().__init__(*args)
        self._find_group = group
        self._group: DisplayGroup | None = None
        self._began = self._clock()
        self._resets = self._job.status.resets

    def _update(self) -> None:
        if self._group is not None:
            self._group.refresh()
        elif not self._quiet:
            late = self._clock() - self._began >= PANEL_DELAY
            if late or self._job.status.resets > self._resets:
                self._show()

    def _close(self) -> None:
        if not self._job.done():  # the wait was interrupted or has timed out
            if self._group is not None:
                self._group.follow()
            return
        if self._group is None and not self._quiet:
            self._show()
        if self._group is not None:
            self._group.finish()
            self._group.join()

    def _show(self) -> None:
        self._group = self._find_group()
        self._group.publish()


class TerminalWaitDisplay(OutputDisplay):
    """A progress line on stderr, and the ranks' output on stdout.

    On a terminal the line is rewritten in place; in a file there is only the last one.
    """

    _updated = float("-inf")
    _shown = ""
    _mid_line = False

    def say(self, words: str) -> None:
        self._erase()
        sys.stderr.write(words.rstrip("\n") + "\n")
        sys.stderr.flush()

    def _print(self, words: str) -> None:
        if words:
            self._erase()
            write(words)
            self._mid_line = not words.endswith("\n")
            self._updated = float("-inf")

    def _update(self) -> None:
        now = self._clock()
        if self._quiet or self._mid_line or not sys.stderr.isatty():
            return
        if now - self._updated >= BETWEEN_LINES:
            self._updated = now
            self._draw(line(JobSnapshot.of(self._job)))

    def _close(self) -> None:
        if self._mid_line:
            self._print("\n")
        self._erase()

    def _draw(self, words: str) -> None:
        """Draw the progress line, cut to the terminal's width."""
        width = shutil.get_terminal_size().columns - 1
        words = words if len(words) <= width else words[: max(width - 1, 0)] + "…"
        if words != self._shown:
            sys.stderr.write(_CLEAR + words)
            sys.stderr.flush()
            self._shown = words

    def _erase(self) -> None:
        if self._shown:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()
            self._shown = ""


class LastLineWaitDisplay(OutputDisplay):
    """One line at the end of the job, and nothing before."""

    def __init__(self, *args: Any, stream: Callable[[], TextIO]) -> None:
        super().__init__(*args)
        self._stream = stream  # asked when the line is written

    def say(self, words: str) -> None:
        """Do nothing."""

    def _end(self, words: str) -> None:
        self._stream().write(words + "\n")
        self._stream().flush()


def write(words: str) -> None:
    """Write to the cell's output, at once."""
    if words:
        sys.stdout.write(words)
        sys.stdout.flush()
