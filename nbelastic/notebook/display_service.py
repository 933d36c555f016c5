"""Display service: shows the jobs of this process, in a notebook or in a terminal.

Displays are made in the kernel's main thread: in which cell another thread's display lands differs
between versions of ipykernel. A job that is shown while no cell waits for it has a thread,
``nbelastic-panel-NAME``, which ends with the job. With ``NBELASTIC_NONINTERACTIVE=1`` one line at
the end of a job is all, for a log.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from nbelastic.render import JobSnapshot, Mode, Streamer, line, text

from .display_group import DisplayGroup, Publisher, bundle, publish

PANEL_DELAY = 2.0  # seconds of waiting before a panel appears
BETWEEN_LINES = 0.25  # minimum of seconds between two updates of the progress line
_CLEAR = "\r\x1b[K"


@dataclass(eq=False)
class _Shown:
    """How a job is shown."""

    streamer: Streamer = field(default_factory=Streamer)  # one, so that no line is written twice
    quiet: bool = False
    cell: object = None  # the number of the execution that has waited for it last
    group: DisplayGroup | None = None  # while displays are open


def kernel_shell() -> Any:
    """Return the shell if this process is an IPython kernel, else None."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return shell if getattr(shell, "kernel", None) is not None else None


class DisplayService:
    """Shows the jobs of this process, for the driver."""

    def __init__(
        self,
        publish: Publisher = publish,
        shell: Callable[[], Any] = kernel_shell,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._publish = publish
        self._shell = shell
        self._clock = clock
        self._shown: WeakKeyDictionary[Any, _Shown] = WeakKeyDictionary()

    # -- for the driver ------------------------------------------------------------------------

    def watching(self, job: Any) -> OutputDisplay | None:
        """Return the display of a job while the main thread waits for it."""
        # What another thread prints may land in any cell: it gets no display.
        if threading.current_thread() is not threading.main_thread():
            return None
        shell, shown = self._shell(), self._look_up(job)
        if not shown.quiet:
            shown.cell = getattr(shell, "execution_count", None)
        if shell is None:
            return TerminalWaitDisplay(job, shown.streamer, shown.quiet, self._clock)
        group = partial(self._group, job)
        return NotebookWaitDisplay(job, shown.streamer, shown.quiet, self._clock, group=group)

    def show(self, job: Any) -> None:
        """Show a job as the value of a cell, unless the cell has just waited for its end."""
        shell = self._shell()
        if shell is None:
            write(text(JobSnapshot.of(job)) + "\n")
        elif self._look_up(job).cell == shell.execution_count and job.done():
            return
        elif silent():
            self._publish({"text/plain": text(JobSnapshot.of(job))}, uuid.uuid4().hex)
        elif job.done():
            self._publish(bundle(job), uuid.uuid4().hex)
        else:
            group = self._group(job)
            group.publish()
            group.follow()

    def say(self, text: str) -> None:
        """Show a line that concerns no job, except without a reader."""
        if threading.current_thread() is threading.main_thread() and not silent():
            stream = sys.stderr if self._shell() is None else sys.stdout
            stream.write(text + "\n")
            stream.flush()

    def label(self, file: str) -> str | None:
        """Return IPython's name of the cell with this file name, or None."""
        shell = self._shell()
        name = None if shell is None else shell.compile.format_code_name(file)
        return None if name is None else " ".join(name)

    # -- for the magics ------------------------------------------------------------------------

    def set_options(self, job: Any, stream: Mode, *, quiet: bool) -> None:
        """Set the ranks whose output is written, and whether to write nothing else."""
        self._shown[job] = _Shown(Streamer(stream), quiet)

    # -- one of each per job -------------------------------------------------------------------

    def _look_up(self, job: Any) -> _Shown:
        return self._shown.setdefault(job, _Shown())

    def _group(self, job: Any) -> DisplayGroup:
        """Return the display group of a job; a new group for a job without an open group."""
        shown = self._look_up(job)
        if shown.group is None:
            on_end = partial(setattr, shown, "group", None)
            shown.group = DisplayGroup(job, self._publish, self._clock, on_end)
        return shown.group


# -- while a thread waits --------------------------------------------------------------------------


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
        self._silent = silent()
        self._streamer = Streamer("none") if self._silent else streamer
        self._quiet = quiet
        self._bare = quiet or self._silent  # nothing is shown besides the output
        self._clock = clock

    def __enter__(self) -> OutputDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self._print(self._streamer.new_text(self._job) + self._streamer.flush())
        self._close()
        if self._job.done() and not self._quiet:
            self._write(text(JobSnapshot.of(self._job)))

    def tick(self) -> None:
        """Write new output, and update what is shown besides."""
        self._print(self._streamer.new_text(self._job))
        self._update()

    def say(self, words: str) -> None:
        """Write one line to the user."""
        if not self._silent:
            self._write(words.rstrip("\n"))

    def _write(self, words: str) -> None:
        write(words + "\n")

    def _print(self, words: str) -> None:
        write(words)

    def _update(self) -> None:
        """Update what is shown besides the output."""

    def _close(self) -> None:
        """End what is shown besides the output."""


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
        elif not self._bare:
            late = self._clock() - self._began >= PANEL_DELAY
            if late or self._job.status.resets > self._resets:
                self._show()

    def _close(self) -> None:
        ended = self._job.done()
        if ended and self._group is None and not self._bare:
            self._show()
        if self._group is not None:
            if ended:
                self._group.finish()
                self._group.join()
            else:  # the wait was interrupted or has timed out
                self._group.follow()

    def _show(self) -> None:
        self._group = self._find_group()
        self._group.publish()


class TerminalWaitDisplay(OutputDisplay):
    """A progress line on stderr, rewritten in place, and the ranks' output on stdout."""

    _updated = float("-inf")
    _shown = ""
    _mid_line = False

    def _write(self, words: str) -> None:
        self._erase()
        sys.stderr.write(words + "\n")
        sys.stderr.flush()

    def _print(self, words: str) -> None:
        if words:
            self._erase()
            write(words)
            self._mid_line = not words.endswith("\n")
            self._updated = float("-inf")

    def _update(self) -> None:
        now = self._clock()
        waits = self._mid_line or now - self._updated < BETWEEN_LINES
        if self._bare or waits or not sys.stderr.isatty():
            return
        self._updated = now
        words, width = line(JobSnapshot.of(self._job)), shutil.get_terminal_size().columns - 1
        words = words if len(words) <= width else words[: max(width - 1, 0)] + "…"
        if words != self._shown:
            sys.stderr.write(_CLEAR + words)
            sys.stderr.flush()
            self._shown = words

    def _close(self) -> None:
        if self._mid_line:
            self._print("\n")
        self._erase()

    def _erase(self) -> None:
        if self._shown:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()
            self._shown = ""


def silent() -> bool:
    """Whether no one reads along: nothing is shown but the end of a job."""
    return os.environ.get("NBELASTIC_NONINTERACTIVE") == "1"


def write(words: str) -> None:
    """Write to the cell's output, at once."""
    if words:
        sys.stdout.write(words)
        sys.stdout.flush()


display = DisplayService()  # imported by the driver by this name
