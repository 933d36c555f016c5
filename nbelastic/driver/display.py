"""Interface to the display of jobs.

The notebook's display is the default. It is named here and imported with the first job; a command
or a test sets another one. Without one, nothing is shown. Errors of a display are logged, once, and
never reach the job.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from .job import Job

logger = logging.getLogger(__name__)

T = TypeVar("T")


class WaitDisplay(Protocol):
    """Display of a job while a caller waits for its end."""

    def tick(self) -> None:
        """Update the display. The waiting thread calls it ten times a second."""

    def say(self, text: str) -> None:
        """Show one line to the user."""


class Display(Protocol):
    """Display of all jobs of this process."""

    def watching(self, job: Job) -> AbstractContextManager[WaitDisplay] | None:
        """Return the display of a job for a waiting thread, or None to show nothing."""

    def show(self, job: Job) -> None:
        """Show a job that is the value of a cell."""

    def say(self, text: str) -> None:
        """Show a line that concerns no job. The waiting thread calls this."""

    def label(self, file: str) -> str | None:
        """Return the user's name of a source file, such as ``Cell In[5]``, or None."""


_display: Display | str | None = "nbelastic.notebook.display_service"
_complained = False


def set_display(display: Display | str | None) -> None:
    """Set the display of jobs in this process; None for no display.

    A name is that of a module with a ``display``, imported at first use.
    """
    global _display  # noqa: PLW0603 - one display per process
    _display = display


def show(job: Job) -> bool:
    """Show a job; return whether a display has shown it."""

    def shown(display: Display) -> bool:
        display.show(job)
        return True

    return _ask(shown, False)


def say(text: str) -> None:
    """Show a line that concerns no job."""
    _ask(lambda display: display.say(text), None)


def label(file: str) -> str | None:
    """Return the user's name of a source file, or None."""
    return _ask(lambda display: display.label(file), None)


class _GuardedWaitDisplay:
    """Wait display, or none, with its errors caught; the first error switches the display off."""

    def __init__(self, watch: WaitDisplay | None) -> None:
        self._watch = watch

    def tick(self) -> None:
        self._call(lambda watch: watch.tick())

    def say(self, text: str) -> None:
        self._call(lambda watch: watch.say(text))

    def _call(self, function: Callable[[WaitDisplay], None]) -> None:
        watch = self._watch

        def called() -> WaitDisplay | None:
            if watch is not None:
                function(watch)
            return watch

        self._watch = _guard(called, None)


@contextlib.contextmanager
def watching(job: Job) -> Iterator[WaitDisplay]:
    """Open the display of a job for a waiting thread."""
    stack = contextlib.ExitStack()

    def enter(display: Display) -> WaitDisplay | None:
        manager = display.watching(job)
        return None if manager is None else stack.enter_context(manager)

    try:
        yield _GuardedWaitDisplay(_ask(enter, None))
    finally:
        _guard(stack.close, None)


def _ask(function: Callable[[Display], T], default: T) -> T:
    """Return ``function(display)``; `default` without a display, or on an error."""

    def call() -> T:
        if isinstance(_display, str):
            set_display(cast("Display", importlib.import_module(_display).display))
        return default if _display is None else function(cast("Display", _display))

    return _guard(call, default)


def _guard(call: Callable[[], T], default: T) -> T:
    """Return the result of a call of the display; `default` on an error."""
    global _complained  # noqa: PLW0603 - once per process
    try:
        return call()
    except Exception:  # an error of a display must not reach the job
        if not _complained:
            logger.warning("the display of jobs failed; jobs go on", exc_info=True)
            _complained = True
        return default
