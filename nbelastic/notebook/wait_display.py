"""Displays while a thread waits for a job: in a notebook, in a terminal, in a log.

The driver enters one for the length of the wait, calls it about ten times a second, and catches
its exceptions (:mod:`nbelastic.driver.display`).
"""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from nbelastic.render import JobSnapshot, line, text

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from nbelastic.render import Mode, Streamer

    from .display_group import DisplayGroup

PANEL_DELAY = 2.0
"""Seconds of waiting before a panel appears."""

BETWEEN_LINES = 0.25
"""Minimum of seconds between two updates of the progress line."""

_CLEAR = "\r\x1b[K"


@dataclass(frozen=True)
class DisplayOptions:
    """How to show a job while a cell waits for it."""

    stream: Mode = "rank0"  # ranks whose output is written
    quiet: bool = False  # without the line at the end
    panel: bool = True


class NotebookWaitDisplay:
    """A panel and the ranks' output under the cell that waits."""

    def __init__(
        self,
        job: Any,
        group: Callable[[], DisplayGroup],
        streamer: Streamer,
        options: DisplayOptions,
        clock: Callable[[], float] = time.monotonic,
        on_shown: Callable[[], None] = lambda: None,
    ) -> None:
        self._job = job
        self._find_group = group
        self._streamer = streamer
        self._options = options
        self._clock = clock
        self._on_shown = on_shown
        self._group: DisplayGroup | None = None
        self._began = 0.0
        self._resets = 0

    def __enter__(self) -> Self:
        self._began = self._clock()
        self._resets = self._job.status.resets
        return self

    def __exit__(self, *_: object) -> None:
        write(self._streamer.remaining_text(self._job))
        if not self._job.done():  # the wait was interrupted or has timed out
            if self._group is not None:
                self._group.follow()
            return
        if self._group is None and self._options.panel:
            self._show()
        if self._group is not None:
            self._group.finish()
            self._group.join()
        if not self._options.quiet:
            write(text(JobSnapshot.of(self._job)) + "\n")

    def tick(self) -> None:
        """Update the panel and write new output."""
        write(self._streamer.new_text(self._job))
        if self._group is not None:
            self._group.refresh()
        elif self._options.panel:
            late = self._clock() - self._began >= PANEL_DELAY
            if late or self._job.status.resets > self._resets:
                self._show()

    def say(self, words: str) -> None:
        """Write one line to the user."""
        write(words.rstrip("\n") + "\n")

    def _show(self) -> None:
        self._group = self._find_group()
        self._group.publish()
        self._on_shown()


class TerminalWaitDisplay:
    """A progress line on stderr, and the ranks' output on stdout.

    On a terminal the line is rewritten in place; in a file there is only the last one.
    """

    def __init__(
        self,
        job: Any,
        streamer: Streamer,
        quiet: bool = False,  # neither line, only output
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._streamer = streamer
        self._quiet = quiet
        self._clock = clock
        self._updated = float("-inf")
        self._shown = ""
        self._mid_line = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._print(self._streamer.remaining_text(self._job))
        if self._mid_line:
            self._print("\n")
        self._erase()
        if self._job.done() and not self._quiet:
            self.say(text(JobSnapshot.of(self._job)))

    def tick(self) -> None:
        """Update the progress line and print new output."""
        self._print(self._streamer.new_text(self._job))
        now = self._clock()
        if self._quiet or self._mid_line or not sys.stderr.isatty():
            return
        if now - self._updated >= BETWEEN_LINES:
            self._updated = now
            self._draw(line(JobSnapshot.of(self._job)))

    def say(self, words: str) -> None:
        """Print one line to the user."""
        self._erase()
        sys.stderr.write(words.rstrip("\n") + "\n")
        sys.stderr.flush()

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

    def _print(self, words: str) -> None:
        if words:
            self._erase()
            sys.stdout.write(words)
            sys.stdout.flush()
            self._mid_line = not words.endswith("\n")
            self._updated = float("-inf")


class LastLineWaitDisplay:
    """One line at the end of the job, and nothing before."""

    def __init__(
        self,
        job: Any,
        stream: Callable[[], TextIO],  # asked when the line is written
        quiet: bool = False,
        on_shown: Callable[[], None] = lambda: None,
    ) -> None:
        self._job = job
        self._stream = stream
        self._quiet = quiet
        self._on_shown = on_shown

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._job.done() and not self._quiet:
            self._stream().write(text(JobSnapshot.of(self._job)) + "\n")
            self._stream().flush()
            self._on_shown()

    def tick(self) -> None:
        """Do nothing."""

    def say(self, words: str) -> None:
        """Do nothing."""


def write(words: str) -> None:
    """Write to the cell's output, at once."""
    if words:
        sys.stdout.write(words)
        sys.stdout.flush()
