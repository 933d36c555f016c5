"""A job in a plain terminal: one line of progress on stderr, and what the ranks print on stdout."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from .guard import GuardedWatch
from .render import Picture, line, text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["LastLine", "Printing", "Speaker", "TerminalWatch"]

BETWEEN_LINES = 0.25
"""Seconds between two looks at the job, at least."""

_CLEAR = "\r\x1b[K"


class Speaker(Protocol):
    """What turns the output of ranks into the text to show; a ``Streamer`` is one."""

    def feed(self, outputs: Sequence[Any]) -> str:
        """Return the text to write now."""

    def flush(self) -> str:
        """Return the rest."""


class Printing:
    """Turns what the ranks of one job print into the text to write, each piece once.

    It does not hold the job, so that it can be kept beside it.

    Parameters
    ----------
    speaker : Speaker
        What the text looks like.
    """

    def __init__(self, speaker: Speaker) -> None:
        self._speaker = speaker
        self._cursor = 0

    def new(self, job: Any) -> str:
        """Return what is to be written now."""
        self._cursor, outputs = job.output(self._cursor)
        return self._speaker.feed(outputs)

    def rest(self, job: Any) -> str:
        """Return all that has not been written yet."""
        return self.new(job) + self._speaker.flush()


class LastLine(GuardedWatch):
    """Watches a job and says nothing but one line at its end.

    Parameters
    ----------
    job : Job
        What to watch.
    stream : callable
        Where the line goes: returns the stream at the time of writing.
    quiet : bool
        Not even that.
    told : callable
        Called when the line is written.
    """

    def __init__(
        self,
        job: Any,
        stream: Callable[[], TextIO],
        quiet: bool = False,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(job)
        self._told = told
        self._stream = stream
        self._quiet = quiet

    def _end(self) -> None:
        if self._job.done() and not self._quiet:
            self._stream().write(text(Picture.of(self._job)) + "\n")
            self._stream().flush()
            self._told()


class TerminalWatch(GuardedWatch):
    """Watches a job in a terminal.

    Where stderr is a terminal, one line is rewritten in place; where it is a file, only the last
    line is written.

    Parameters
    ----------
    job : Job
        What to watch.
    printing : Printing
        What the ranks print.
    quiet : bool
        Neither a line of progress nor one at the end.
    clock : callable
        The time in seconds.
    """

    def __init__(
        self,
        job: Any,
        printing: Printing,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(job)
        self._printing = printing
        self._quiet = quiet
        self._clock = clock
        self._looked = float("-inf")
        self._standing = ""
        self._midway = False

    def _tick(self) -> None:
        self._print(self._printing.new(self._job))
        now = self._clock()
        if self._quiet or self._midway or not sys.stderr.isatty():
            return
        if now - self._looked >= BETWEEN_LINES:
            self._looked = now
            self._stand(line(Picture.of(self._job)))

    def _stand(self, words: str) -> None:
        """Put `words` where the line of progress stands, cut to the terminal's width."""
        width = shutil.get_terminal_size().columns - 1
        words = words if len(words) <= width else words[: max(width - 1, 0)] + "…"
        if words != self._standing:
            sys.stderr.write(_CLEAR + words)
            sys.stderr.flush()
            self._standing = words

    def _wipe(self) -> None:
        if self._standing:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()
            self._standing = ""

    def _print(self, words: str) -> None:
        if words:
            self._wipe()
            sys.stdout.write(words)
            sys.stdout.flush()
            self._midway = not words.endswith("\n")
            self._looked = float("-inf")

    def _say(self, words: str) -> None:
        self._wipe()
        sys.stderr.write(words.rstrip("\n") + "\n")
        sys.stderr.flush()

    def _end(self) -> None:
        self._print(self._printing.rest(self._job))
        if self._midway:
            self._print("\n")
        self._wipe()
        if self._job.done() and not self._quiet:
            self._say(text(Picture.of(self._job)))
