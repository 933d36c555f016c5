"""Interface to the display of jobs.

The notebook's display is the default. It is named here and imported with the first job; a command
or a test sets another one. Without one, nothing is shown. Errors of a display are logged, once, and
never reach the job.
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

logger = logging.getLogger(__name__)


class WaitDisplay(Protocol):
    """Display of one job while a caller waits for it."""

    def tick(self) -> None:
        """Update the display. The waiting thread calls it ten times a second."""

    def say(self, text: str) -> None:
        """Show one line to the user."""


class Display(Protocol):
    """Display of all jobs of this process."""

    def started(self, job: Job) -> None:
        """Note a new job of this kernel."""

    def watching(self, job: Job) -> AbstractContextManager[WaitDisplay] | None:
        """Return a display of a job for a thread that waits for it, or None to show nothing."""

    def show(self, job: Job) -> None:
        """Show a job that is the value of a cell."""

    def say(self, text: str) -> None:
        """Show one line that belongs to no job. The waiting thread calls it."""

    def label(self, file: str) -> str | None:
        """Return the user's name of a source file, such as ``Cell In[5]``, or None."""


_display: Display | str | None = "nbelastic.notebook.display_service"
_complained = False


def set_display(display: Display | str | None) -> None:
    """Set the display of jobs in this process; None for no display.

    A name is that of a module with the functions of a display, imported at first use.
    """
    global _display  # noqa: PLW0603 - one display per process
    _display = display


def _current() -> Display | None:
    if isinstance(_display, str):
        set_display(cast("Display", importlib.import_module(_display)))
    return cast("Display | None", _display)


def started(job: Job) -> None:
    """Report a new job to the display."""
    if _display is not None:
        _guard(lambda: _call(lambda display: display.started(job)))


def show(job: Job) -> bool:
    """Show a job; return whether a display has shown it."""
    return _display is not None and _guard(lambda: _call(lambda display: display.show(job)))


def say(text: str) -> None:
    """Show one line that belongs to no job."""
    if _display is not None:
        _guard(lambda: _call(lambda display: display.say(text)))


def label(file: str) -> str | None:
    """Return the user's name of a source file, or None."""
    found: list[str | None] = [None]
    _guard(lambda: _call(lambda display: found.append(display.label(file))))
    return found[-1]


def _call(function: Callable[[Display], object]) -> None:
    display = _current()
    if display is not None:
        function(display)


class _GuardedWaitDisplay:
    """Wait display, or none, with its errors caught; it is not updated after the first one."""

    def __init__(self, watch: WaitDisplay | None = None) -> None:
        self._watch = watch

    def tick(self) -> None:
        watch = self._watch
        if watch is not None and not _guard(watch.tick):
            self._watch = None

    def say(self, text: str) -> None:
        watch = self._watch
        if watch is not None:
            _guard(lambda: watch.say(text))


@contextlib.contextmanager
def watching(job: Job) -> Iterator[WaitDisplay]:
    """Open the display of a job for a waiting thread."""
    stack = contextlib.ExitStack()
    watch = _GuardedWaitDisplay()

    def enter(display: Display) -> None:
        nonlocal watch
        manager = display.watching(job)
        if manager is not None:
            watch = _GuardedWaitDisplay(stack.enter_context(manager))

    _guard(lambda: _call(enter))
    try:
        yield watch
    finally:
        _guard(stack.close)


def _guard(call: Callable[[], object]) -> bool:
    """Call a function of the display; return whether it raised no error."""
    global _complained  # noqa: PLW0603 - once per process
    try:
        call()
    except Exception:  # an error of a display must not reach the job
        if not _complained:
            logger.warning("the display of jobs failed; jobs go on", exc_info=True)
            _complained = True
        return False
    return True
