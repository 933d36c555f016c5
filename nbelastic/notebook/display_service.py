"""Display service: shows the jobs of this process, in a notebook or in a terminal.

Displays are made in the kernel's main thread: in which cell another thread's display lands differs
between versions of ipykernel. All displays of a job are a group, which is updated together by the
thread ``nbelastic-panel-NAME``; it ends with the job. With ``NBELASTIC_NONINTERACTIVE=1`` one line
at the end of a job is all, for a log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias
from weakref import WeakKeyDictionary

from nbelastic.render import JobSnapshot, Mode, Streamer, duration, line, page, text

if TYPE_CHECKING:
    from .panel import Panel

logger = logging.getLogger(__name__)

PANEL_DELAY = 2.0  # seconds of waiting before a panel appears
BETWEEN_LINES = 0.25  # minimum of seconds between two updates of the progress line
BETWEEN_PAGES = 5.0  # minimum of seconds between two updates of the static HTML while a job runs
POLL_INTERVAL = 0.25  # seconds between two updates by the thread
_CLEAR = "\r\x1b[K"
WIDGET = "application/vnd.jupyter.widget-view+json"

Publisher: TypeAlias = Callable[..., None]  # as `publish`, for any thread


def publish(data: dict[str, Any], display_id: str, *, update: bool = False) -> None:
    """Make or replace a display of IPython's."""
    from IPython.display import publish_display_data

    call: Any = publish_display_data  # it has no annotations
    call(data, transient={"display_id": display_id}, update=update)


def bundle(job: Any, panel: Panel | None = None) -> dict[str, Any]:
    """Return the representations of a job: HTML, a line of text, and its widget."""
    # A notebook saves no state of widgets: where an offered widget cannot be drawn, JupyterLab and
    # nbconvert show nothing in its place. So a job that has ended has none.
    snapshot = JobSnapshot.of(job)
    note = ""
    if not snapshot.ended:
        note = f"As of {duration(snapshot.status.elapsed)} after the start: the job went on."
        if panel is None:
            note += " A live panel with a Stop button needs ipywidgets: pip install ipywidgets."
    data: dict[str, Any] = {"text/html": page(snapshot, note), "text/plain": text(snapshot)}
    if panel is not None and not snapshot.ended:
        model = panel.widget.model_id
        data[WIDGET] = {"version_major": 2, "version_minor": 0, "model_id": model}
    return data


class DisplayGroup:
    """All displays of one job. A thread updates them until the job ends, and with the end."""

    def __init__(
        self,
        job: Any,
        publish: Publisher,
        clock: Callable[[], float] = time.monotonic,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self._job = job
        self._send = publish
        self._clock = clock
        self._on_end = on_end
        self._lock = threading.Lock()  # of the displays; a new one gets the end, or shows it
        self._ids: list[str] = []
        self._published: tuple[str, float] = ("", float("-inf"))
        self._panel: Panel | None = None
        with contextlib.suppress(ImportError):  # without ipywidgets
            from .panel import Panel

            self._panel = Panel(job, clock)
        name = f"nbelastic-panel-{job.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def publish(self) -> None:
        """Make a display under the running cell. Called in the main thread."""
        if self._thread.ident is None:
            self._thread.start()
        with self._lock:
            self._ids.append(display_id := uuid.uuid4().hex)
            self._published = (self._job.status.state, self._clock())
            self._send(bundle(self._job, self._panel), display_id)

    def refresh(self) -> None:
        """Update the displays."""
        with self._lock:
            if self._panel is not None:
                self._panel.refresh()
            state, now = self._job.status.state, self._clock()
            stale = self._panel is None or state != self._published[0]
            if stale and now - self._published[1] >= BETWEEN_PAGES:
                self._published = (state, now)
                self._update()

    def join(self) -> None:
        """Wait until the displays show the end of the job, for a second at most."""
        self._thread.join(1.0)

    def _run(self) -> None:
        try:
            while not self._job.wait(POLL_INTERVAL):
                self.refresh()
            with self._lock:
                if self._panel is not None:
                    # The widget stays, for a reloaded page, which gets no updates of displays.
                    self._panel.finish()
                self._update()
        except Exception:  # any: the displays end here, and the job goes on
            logger.warning("the display of job %r failed", self._job.name, exc_info=True)
        finally:
            self._on_end()

    def _update(self) -> None:
        data = bundle(self._job, self._panel)
        for display_id in self._ids:
            self._send(data, display_id, update=True)


@dataclass(eq=False)
class Shown:
    """How a job is shown."""

    streamer: Streamer = field(default_factory=Streamer)  # one, so that no line is written twice
    quiet: bool = False  # output alone
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
        self._shown: WeakKeyDictionary[Any, Shown] = WeakKeyDictionary()

    # -- for the driver ------------------------------------------------------------------------

    def watching(self, job: Any) -> OutputDisplay | None:
        """Return the display of a job while the main thread waits for it."""
        # What another thread prints may land in any cell: it gets no display.
        if threading.current_thread() is not threading.main_thread():
            return None
        shell, shown = self._shell(), self._look_up(job)
        if not shown.quiet:
            shown.cell = getattr(shell, "execution_count", None)
        open_panel = None if shell is None else partial(self._open, job)
        return OutputDisplay(job, shown, self._clock, open_panel)

    def show(self, job: Any) -> None:
        """Show a job as the value of a cell, unless the cell has just waited for its end."""
        shell = self._shell()
        if shell is None:
            write(text(JobSnapshot.of(job)) + "\n")
        elif self._look_up(job).cell == shell.execution_count and job.done():
            return
        elif silent():
            self._publish({"text/plain": text(JobSnapshot.of(job))}, uuid.uuid4().hex)
        else:
            self._open(job)

    def say(self, text: str) -> None:
        """Show a line that concerns no job, except without a reader."""
        if threading.current_thread() is threading.main_thread() and not silent():
            write(text + "\n", sys.stderr if self._shell() is None else sys.stdout)

    def label(self, file: str) -> str | None:
        """Return IPython's name of the cell with this file name, or None."""
        shell = self._shell()
        name = None if shell is None else shell.compile.format_code_name(file)
        return None if name is None else " ".join(name)

    # -- for the magics ------------------------------------------------------------------------

    def set_options(self, job: Any, stream: Mode, *, quiet: bool) -> None:
        """Set the ranks whose output is written, and whether to write nothing else."""
        self._shown[job] = Shown(Streamer(stream), quiet)

    # -- one of each per job -------------------------------------------------------------------

    def _look_up(self, job: Any) -> Shown:
        return self._shown.setdefault(job, Shown())

    def _open(self, job: Any) -> Callable[[], object]:
        """Make a display of a job; return a function that waits until displays show its end."""
        shown = self._look_up(job)
        group = shown.group
        if not job.done():
            if group is None:
                on_end = partial(setattr, shown, "group", None)
                group = shown.group = DisplayGroup(job, self._publish, self._clock, on_end)
            group.publish()
        else:
            self._publish(bundle(job), uuid.uuid4().hex)
        return (lambda: None) if group is None else group.join


# -- while a thread waits --------------------------------------------------------------------------


class OutputDisplay:
    """The ranks' output while a thread waits, and one line when the job has ended.

    Meanwhile a notebook has a panel under the cell, a terminal a line that is rewritten in place.
    """

    def __init__(
        self,
        job: Any,
        shown: Shown,
        clock: Callable[[], float] = time.monotonic,
        open_panel: Callable[[], Callable[[], object]] | None = None,  # None in a terminal
    ) -> None:
        self._job = job
        self._silent, self._quiet = silent(), shown.quiet
        self._streamer = Streamer("none") if self._silent else shown.streamer
        self._bare = self._quiet or self._silent  # nothing is shown besides the output
        self._clock = clock
        self._open_panel = open_panel
        self._join: Callable[[], object] | None = None  # of a panel under the cell
        self._began, self._resets = clock(), job.status.resets
        self._updated, self._line, self._mid_line = float("-inf"), "", False

    def __enter__(self) -> OutputDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self._print(self._streamer.new_text(self._job) + self._streamer.flush())
        self._erase()
        if not self._job.done():  # the wait was interrupted or has timed out
            return
        if self._join is None and self._open_panel is not None and not self._bare:
            self._join = self._open_panel()
        if self._join is not None:
            self._join()
        if not self._quiet:
            self._write(text(JobSnapshot.of(self._job)))

    def tick(self) -> None:
        """Write new output, and update what is shown besides."""
        self._print(self._streamer.new_text(self._job))
        now = self._clock()
        if self._bare or self._join is not None:
            return
        if self._open_panel is None:
            self._draw_line(now)
        elif now - self._began >= PANEL_DELAY or self._job.status.resets > self._resets:
            self._join = self._open_panel()

    def say(self, words: str) -> None:
        """Write one line to the user."""
        if not self._silent:
            self._write(words.rstrip("\n"))

    def _write(self, words: str) -> None:
        self._erase()
        write(words + "\n", sys.stderr if self._open_panel is None else sys.stdout)

    def _print(self, words: str) -> None:
        if words:
            self._erase()
            write(words)
            self._mid_line = not words.endswith("\n")

    def _draw_line(self, now: float) -> None:
        if self._mid_line or now - self._updated < BETWEEN_LINES or not sys.stderr.isatty():
            return
        self._updated = now
        words, width = line(JobSnapshot.of(self._job)), shutil.get_terminal_size().columns - 1
        words = words if len(words) <= width else words[: max(width - 1, 0)] + "…"
        if words != self._line:
            write(_CLEAR + words, sys.stderr)
            self._line = words

    def _erase(self) -> None:
        if self._line:
            write(_CLEAR, sys.stderr)
            self._line = ""


def silent() -> bool:
    """Whether no one reads along: nothing is shown but the end of a job."""
    return os.environ.get("NBELASTIC_NONINTERACTIVE") == "1"


def write(words: str, stream: TextIO | None = None) -> None:
    """Write to a stream at once, by default to the cell's output."""
    stream = sys.stdout if stream is None else stream
    stream.write(words)
    stream.flush()


display = DisplayService()  # imported by the driver by this name
