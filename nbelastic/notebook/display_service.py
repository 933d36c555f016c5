"""Display service: shows the jobs of this process, in a notebook or in a terminal.

The driver calls :data:`display` when a job is waited for or is the value of a cell. Of each
job it publishes a live widget, static HTML and one line of text.

Displays are made in the thread that asks for them, the kernel's main thread: in which cell another
thread's display lands differs between versions of ipykernel. While a cell waits for a job, the main
thread refreshes the panel. A job that is shown while no cell waits for it has a thread,
``nbelastic-panel-NAME``, which ends with the job.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from nbelastic.render import JobSnapshot, Streamer, text

from .display_group import DisplayGroup, bundle, publish
from .wait_display import LastLineWaitDisplay, NotebookWaitDisplay, TerminalWaitDisplay, write

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbelastic.render import Mode

    from .display_group import Publisher
    from .wait_display import OutputDisplay


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
        self._lock = threading.Lock()
        self._groups: dict[int, DisplayGroup] = {}
        self._quiet: WeakSet[Any] = WeakSet()
        self._streamers: WeakKeyDictionary[Any, Streamer] = WeakKeyDictionary()
        self._shown_in: WeakKeyDictionary[Any, object] = WeakKeyDictionary()

    # -- for the driver ------------------------------------------------------------------------

    def watching(self, job: Any) -> OutputDisplay | None:
        """Return the display of a job while the main thread waits for it.

        Other threads get none, because what they print may land in any cell.
        """
        if threading.current_thread() is not threading.main_thread():
            return None
        shell, quiet = self._shell(), job in self._quiet
        if not quiet:
            self._shown_in[job] = _cell(shell)
        if _noninteractive():
            stream = (lambda: sys.stdout) if shell is not None else (lambda: sys.stderr)
            return LastLineWaitDisplay(job, Streamer("none"), quiet, stream=stream)
        streamer = self._streamers.setdefault(job, Streamer())  # so that no line is written twice
        if shell is None:
            return TerminalWaitDisplay(job, streamer, quiet, self._clock)
        group = partial(self._group, job)
        return NotebookWaitDisplay(job, streamer, quiet, self._clock, group=group)

    def show(self, job: Any) -> None:
        """Show a job as the value of a cell, to its end.

        A cell that has just waited for the job has shown it already.
        """
        shell = self._shell()
        if shell is None:
            write(text(JobSnapshot.of(job)) + "\n")
        elif self._shown_in.get(job) == _cell(shell) and job.done():
            return
        elif _noninteractive():
            self._publish({"text/plain": text(JobSnapshot.of(job))}, uuid.uuid4().hex)
        elif job.done():
            self._publish(bundle(job), uuid.uuid4().hex)
        else:
            group = self._group(job)
            group.publish()
            group.follow()

    def say(self, text: str) -> None:
        """Show a line that concerns no job, except without a reader."""
        if threading.current_thread() is threading.main_thread() and not _noninteractive():
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
        self._streamers[job] = Streamer(stream)
        if quiet:
            self._quiet.add(job)

    def close(self, timeout: float = 1.0) -> None:
        """End every thread; the displays stay as they are."""
        with self._lock:
            groups = list(self._groups.values())
        for group in groups:
            group.close(timeout)

    # -- one of each per job -------------------------------------------------------------------

    def _group(self, job: Any) -> DisplayGroup:
        """Return the display group of a job; a new group for a job without an open group."""
        key = id(job)  # the group holds the job, so that no other can have its id meanwhile
        with self._lock:
            if key not in self._groups:
                on_end = partial(self._forget, key)
                self._groups[key] = DisplayGroup(job, self._publish, self._clock, on_end)
            return self._groups[key]

    def _forget(self, key: int) -> None:
        with self._lock:
            self._groups.pop(key, None)


def _noninteractive() -> bool:
    return os.environ.get("NBELASTIC_NONINTERACTIVE") == "1"


def _cell(shell: Any) -> object:
    """Return a value that differs between two executions of a cell."""
    return getattr(shell, "execution_count", None)


display = DisplayService()
"""The display of this process, which the driver imports by this name."""
