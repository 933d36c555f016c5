"""Where a display hooks in: the driver shows nothing itself.

A display is set once, by the package or a test; without one, jobs are silent. Whatever it raises is
logged, once, and never reaches the job.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from .job import Job

__all__ = ["Display", "Watch", "label", "say", "set_display", "show", "started", "watching"]

logger = logging.getLogger(__name__)


class Watch(Protocol):
    """Watches one job on behalf of a caller that waits for it."""

    def tick(self) -> None:
        """Bring what is shown up to date. Called in the waiting thread, ten times a second."""

    def say(self, text: str) -> None:
        """Show one line to the user."""


class Display(Protocol):
    """Shows jobs."""

    def started(self, job: Job) -> None:
        """Take note of a job of this kernel."""

    def watching(self, job: Job) -> AbstractContextManager[Watch]:
        """Return what to hold while a thread waits for a job."""

    def show(self, job: Job) -> None:
        """Show a job that is the value of a cell."""

    def say(self, text: str) -> None:
        """Show one line that belongs to no job. Called in the thread that waits."""

    def label(self, file: str) -> str | None:
        """Return what the user calls a file of source code, such as ``Cell In[5]``, or None."""


_display: Display | str | None = None
_complained = False


def set_display(display: Display | str | None) -> None:
    """Set what shows jobs in this process.

    Parameters
    ----------
    display : Display, str or None
        The display; the name of a module that is one, imported when it is first used; or None for
        nothing.
    """
    global _display  # noqa: PLW0603 - one display per process
    _display = display


def _current() -> Display | None:
    if isinstance(_display, str):
        set_display(cast("Display", importlib.import_module(_display)))
    return cast("Display | None", _display)


def started(job: Job) -> None:
    """Tell the display of a new job."""
    if _display is not None:
        _guard(lambda: _call(lambda display: display.started(job)))


def show(job: Job) -> bool:
    """Show a job; return whether there was a display that could."""
    return _display is not None and _guard(lambda: _call(lambda display: display.show(job)))


def say(text: str) -> None:
    """Show one line that belongs to no job."""
    if _display is not None:
        _guard(lambda: _call(lambda display: display.say(text)))


def label(file: str) -> str | None:
    """Return what the user calls a file of source code; None where there is no better name."""
    found: list[str | None] = [None]
    _guard(lambda: _call(lambda display: found.append(display.label(file))))
    return found[-1]


def _call(function: Callable[[Display], object]) -> None:
    display = _current()
    if display is not None:
        function(display)


class _Guarded:
    """A watch whose faults stay its own."""

    def __init__(self, watch: Watch) -> None:
        self._watch: Watch | None = watch

    def tick(self) -> None:
        watch = self._watch
        if watch is not None and not _guard(watch.tick):
            self._watch = None

    def say(self, text: str) -> None:
        watch = self._watch
        if watch is not None:
            _guard(lambda: watch.say(text))


class _Blind:
    def tick(self) -> None:
        """Do nothing."""

    def say(self, text: str) -> None:
        """Do nothing."""


@contextlib.contextmanager
def watching(job: Job) -> Iterator[Watch]:
    """Hold the display's watch over a job."""
    stack = contextlib.ExitStack()
    watch: Watch = _Blind()

    def enter(display: Display) -> None:
        nonlocal watch
        watch = _Guarded(stack.enter_context(display.watching(job)))

    _guard(lambda: _call(enter))
    try:
        yield watch
    finally:
        _guard(stack.close)


def _guard(call: Callable[[], object]) -> bool:
    """Call; return whether it went well."""
    global _complained  # noqa: PLW0603 - once per process
    try:
        call()
    except Exception:  # whatever a display raises: the job matters more
        if not _complained:
            logger.warning("the display of jobs failed; jobs go on", exc_info=True)
            _complained = True
        return False
    return True
