"""A wait for a job in a notebook's main thread, and how it is to look."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .guard import GuardedWatch
from .render import Picture, text

if TYPE_CHECKING:
    from collections.abc import Callable

    from .stream import Mode
    from .terminal import Printing
    from .view import View

__all__ = ["Manner", "NotebookWatch", "SilentWatch"]

PATIENCE = 2.0
"""Seconds of waiting before a panel appears."""


@dataclass(frozen=True)
class Manner:
    """How a job is to be shown while a cell waits for it.

    Attributes
    ----------
    stream : str
        Whose output is written: ``rank0``, ``all`` or ``none``.
    quiet : bool
        No line at the end.
    panel : bool
        Whether there is a panel.
    """

    stream: Mode = "rank0"
    quiet: bool = False
    panel: bool = True


class NotebookWatch(GuardedWatch):
    """A wait for a job in a notebook's main thread. Made by :class:`NotebookDisplay`."""

    def __init__(
        self,
        job: Any,
        view: Callable[[], View],
        printing: Printing,
        manner: Manner,
        clock: Callable[[], float] = time.monotonic,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(job)
        self._find = view
        self._told = told
        self._printing = printing
        self._manner = manner
        self._clock = clock
        self._view: View | None = None
        self._began = 0.0
        self._resets = 0

    def _say(self, text: str) -> None:
        write(text.rstrip("\n") + "\n")

    def _begin(self) -> None:
        self._began = self._clock()
        self._resets = self._job.status.resets

    def _tick(self) -> None:
        write(self._printing.new(self._job))
        if self._view is not None:
            self._view.refresh()
        elif self._manner.panel and self._due():
            self._appear()

    def _due(self) -> bool:
        late = self._clock() - self._began >= PATIENCE
        return late or self._job.status.resets > self._resets

    def _appear(self) -> None:
        self._view = self._find()
        self._view.publish()
        self._told()

    def _end(self) -> None:
        write(self._printing.rest(self._job))
        if not self._job.done():  # an interrupt, or the wait has timed out: the job goes on
            if self._view is not None:
                self._view.follow()
            return
        if self._view is None and self._manner.panel:
            self._appear()
        if self._view is not None:
            self._view.finish()
            self._view.join()
        if not self._manner.quiet:
            write(text(Picture.of(self._job)) + "\n")


class SilentWatch:
    """Watches a job for a thread that is not the main one: in silence."""

    def __enter__(self) -> SilentWatch:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def tick(self) -> None:
        """Do nothing."""

    def say(self, text: str) -> None:
        """Do nothing."""


def write(words: str) -> None:
    """Write to the cell's output, at once."""
    if words:
        sys.stdout.write(words)
        sys.stdout.flush()
