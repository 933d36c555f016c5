"""All displays of one job, kept up to date to its end.

The view may be driven by two threads: that of an earlier display, and the main thread where it
waits for the job. Its lock makes every update whole and the end happen once. Jobs are looked at
under it, never waited for.
"""

from __future__ import annotations

import threading
import time
import uuid
from typing import TYPE_CHECKING, Any, Protocol

from .guard import Guard
from .render import Picture, page, text
from .render.picture import ENDED
from .render.words import duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from .panel import Panel

__all__ = ["IPythonScreen", "Screen", "View", "bundle"]

WIDGET = "application/vnd.jupyter.widget-view+json"

BETWEEN_PAGES = 5.0
"""Seconds between two updates of the static HTML while a job goes on, at least."""

LOOK = 0.1
"""Seconds between two looks of the thread at its job."""


class Screen(Protocol):
    """Where displays go."""

    def publish(self, data: dict[str, Any], display_id: str) -> None:
        """Make a display under the running cell."""

    def update(self, data: dict[str, Any], display_id: str) -> None:
        """Replace a display. Legal in any thread."""


class IPythonScreen:
    """IPython's own displays."""

    def publish(self, data: dict[str, Any], display_id: str) -> None:
        """Make a display under the running cell."""
        from IPython.display import publish_display_data

        publish: Any = publish_display_data  # it has no annotations
        publish(data, transient={"display_id": display_id})

    def update(self, data: dict[str, Any], display_id: str) -> None:
        """Replace a display, by its id."""
        from IPython.display import publish_display_data

        publish: Any = publish_display_data  # it has no annotations
        publish(data, transient={"display_id": display_id}, update=True)


def bundle(job: Any, panel: Panel | None = None) -> dict[str, Any]:
    """Return the representations of a job: widget, static HTML, one line of text.

    Parameters
    ----------
    job : Job
        What to show.
    panel : Panel, optional
        The widget; without it, and for a job that is over, there are the other two.
    """
    picture = Picture.of(job)
    note = ""
    if not picture.ended:
        note = f"As of {duration(picture.status.elapsed)} after the start: the job went on."
    data: dict[str, Any] = {"text/html": page(picture, note), "text/plain": text(picture)}
    if panel is not None and not panel.broken and not picture.ended:
        model = panel.widget.model_id
        data[WIDGET] = {"version_major": 2, "version_minor": 0, "model_id": model}
    return data


def _make_panel(job: Any) -> Panel | None:
    """Return a panel for a job, or None without ipywidgets."""
    try:
        from .panel import Panel
    except ImportError:
        return None
    return Panel(job)


class View:
    """All displays of one job: they show the same, and end together.

    Parameters
    ----------
    job : Job
        What is shown.
    screen : Screen
        Where.
    clock : callable
        The time in seconds.
    gone : callable
        Called once, after the last update.
    """

    def __init__(
        self,
        job: Any,
        screen: Screen,
        clock: Callable[[], float] = time.monotonic,
        gone: Callable[[], None] = lambda: None,
    ) -> None:
        self.guard = Guard(f"job {job.name!r}")
        self._job = job
        self._screen = screen
        self._clock = clock
        self._gone = gone
        self._lock = threading.Lock()
        self._ids: list[str] = []
        self._told: tuple[str, float] = ("", float("-inf"))
        self._panel: Panel | None = None
        self._over = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def publish(self) -> None:
        """Make a display under the running cell. Called in the main thread."""
        with self._lock:
            if self._panel is None and not self._job.done():
                self._panel = self.guard(lambda: _make_panel(self._job), None)
            display_id = uuid.uuid4().hex
            self.guard(lambda: self._publish(display_id), None)

    def refresh(self) -> None:
        """Bring the displays up to date."""
        with self._lock:
            if not self._over:
                self.guard(self._refresh, None)

    def finish(self) -> None:
        """Put the final state into every display; only the first call does anything."""
        with self._lock:
            if self._over:
                return
            self._over = True
            self.guard(self._finish, None)
        self._gone()

    def follow(self) -> None:
        """Have a thread keep the displays up to date to the end of the job."""
        with self._lock:
            if self._over or self._thread is not None:
                return
            name = f"nbelastic-panel-{self._job.name}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def close(self, timeout: float = 1.0) -> None:
        """End the thread, and wait for that no longer than `timeout` seconds."""
        self._stop.set()
        self.join(timeout)

    def join(self, timeout: float = 1.0) -> None:
        """Wait for the thread to end with its job, no longer than `timeout` seconds."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _publish(self, display_id: str) -> None:
        state = self._job.status.state
        data = bundle(self._job, self._panel)
        self._screen.publish(data, display_id)
        self._told = (state, self._clock())
        if state not in ENDED:
            self._ids.append(display_id)

    def _refresh(self) -> None:
        if self._panel is not None:
            self._panel.refresh()
        state, now = self._job.status.state, self._clock()
        if state != self._told[0] and now - self._told[1] >= BETWEEN_PAGES:
            self._told = (state, now)
            self._update()

    def _finish(self) -> None:
        if self._panel is not None:
            # the widget stays, for a page that was reloaded and gets no updates of displays
            self._panel.finish()
        self._update()

    def _update(self) -> None:
        data = bundle(self._job, self._panel)
        for display_id in self._ids:
            self._screen.update(data, display_id)

    def _run(self) -> None:
        while not self._stop.is_set() and not self.guard.broken:
            if self.guard(lambda: self._job.wait(LOOK), True):
                break
            self.refresh()
        if not self._stop.is_set():
            self.finish()
        else:
            self._gone()
