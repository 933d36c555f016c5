"""Display group: all displays of a job, updated together until the job's end.

Two threads may update a group: that of an earlier display, and the main thread when it waits for
the job. Its lock makes every update whole and the end happen once. Under the lock the job's state
is read, but not waited for.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from nbelastic.driver import driver_of
from nbelastic.render import STYLE, JobSnapshot, page, text
from nbelastic.render.formatting import duration, escape
from nbelastic.render.job_snapshot import ENDED

if TYPE_CHECKING:
    from collections.abc import Callable

    from .panel import Panel

AFTER = "-after"
"""End of the display id of the line under a widget, which shows while the widget is not there."""

WIDGET = "application/vnd.jupyter.widget-view+json"

BETWEEN_PAGES = 5.0
"""Minimum of seconds between two updates of the static HTML while a job runs."""

# JupyterLab draws an error in the place of a widget whose kernel is gone, and no other part of its
# bundle. Until it knows that, or has the live widget after a reload, it says "Loading".
_AFTERLIFE = """<style>
:root:has(.nbe-live-{0}) :is(.nbe-after-{0},.jp-OutputArea-child:has(.nbe-after-{0})),
:root:not(:has(.nbe-live-{0})) .jp-NotebookPanel
.jp-OutputArea-child:has(+.jp-OutputArea-child .nbe-after-{0}){{display:none}}
.nbe-after-{0}{{overflow-wrap:anywhere}}
.jp-NotebookPanel .jp-OutputArea-child:not(:has(.jupyter-widgets))
+.jp-OutputArea-child .nbe-after-{0}{{animation:nbe-after-{0} 5s}}
@keyframes nbe-after-{0}{{0%,99%{{visibility:hidden}}}}
</style><div class="nbe nbe-card nbe-after-{0}">{1}</div>"""

POLL_INTERVAL = 0.1
"""Seconds between two updates by the thread."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ErrorBoundary:
    """Keeps a display's exceptions from the job: the first is logged, and the display is off."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.broken = False

    def __call__(self, function: Callable[[], T], default: T) -> T:
        """Return ``function()``; `default` if it raises, now or before."""
        if self.broken:
            return default
        try:
            return function()
        except Exception:  # any: the display ends here, and the job goes on
            self.broken = True
            logger.warning(
                "the display of %s failed and is switched off", self._what, exc_info=True
            )
            return default


class Publisher(Protocol):
    """Makes a display under the running cell, or replaces the one of an id: in any thread."""

    def __call__(self, data: dict[str, Any], display_id: str, *, update: bool = False) -> None: ...


def publish(data: dict[str, Any], display_id: str, *, update: bool = False) -> None:
    """Make or replace a display of IPython's."""
    from IPython.display import publish_display_data

    call: Any = publish_display_data  # it has no annotations
    call(data, transient={"display_id": display_id}, update=update)


def bundle(job: Any, panel: Panel | None = None) -> dict[str, Any]:
    """Return the representations of a job: static HTML, one line of text, and its widget, if any.

    A notebook does not save the state of widgets. Where a widget is offered but cannot be drawn,
    JupyterLab and nbconvert show nothing instead of the HTML. So a job that has ended has none.
    """
    snapshot = JobSnapshot.of(job)
    note = ""
    if not snapshot.ended:
        note = f"As of {duration(snapshot.status.elapsed)} after the start: the job went on."
        if importlib.util.find_spec("ipywidgets") is None:
            note += " A live panel with a Stop button needs ipywidgets: pip install ipywidgets."
    data: dict[str, Any] = {"text/html": page(snapshot, note), "text/plain": text(snapshot)}
    if panel is not None and not panel.broken and not snapshot.ended:
        model = panel.widget.model_id
        data[WIDGET] = {"version_major": 2, "version_minor": 0, "model_id": model}
    return data


def afterlife(job: Any) -> str:
    """Return what becomes of a job without its kernel, as HTML."""
    if not driver_of(job).outlives_kernel:
        return "The job ends with its kernel, because its cluster does."
    call = escape(f'nbelastic.attach("{job.name}", cluster=client)')
    return f"Without its kernel the job trains on: <code>{call}</code> shows it."


def _make_panel(job: Any) -> Panel | None:
    """Return a panel for a job, or None without ipywidgets."""
    try:
        from .panel import Panel
    except ImportError:
        return None
    return Panel(job)


class DisplayGroup:
    """All displays of one job."""

    def __init__(
        self,
        job: Any,
        publish: Publisher,
        clock: Callable[[], float] = time.monotonic,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.boundary = ErrorBoundary(f"job {job.name!r}")
        self._job = job
        self._send = publish
        self._clock = clock
        self._on_end = on_end
        self._lock = threading.Lock()
        self._ids: list[str] = []
        self._published: tuple[str, float] = ("", float("-inf"))
        self._panel: Panel | None = None
        self._over = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def publish(self) -> None:
        """Make a display under the running cell. Called in the main thread."""
        with self._lock:
            if self._panel is None and not self._job.done():
                self._panel = self.boundary(lambda: _make_panel(self._job), None)
            display_id = uuid.uuid4().hex
            self.boundary(lambda: self._publish(display_id), None)

    def refresh(self) -> None:
        """Update the displays."""
        with self._lock:
            if not self._over:
                self.boundary(self._refresh, None)

    def finish(self) -> None:
        """Show the final state in every display. Idempotent."""
        with self._lock:
            if self._over:
                return
            self._over = True
            self.boundary(self._finish, None)
        self._on_end()

    def follow(self) -> None:
        """Start a thread that updates the displays until the job ends."""
        with self._lock:
            if self._over or self._thread is not None:
                return
            name = f"nbelastic-panel-{self._job.name}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def close(self, timeout: float = 1.0) -> None:
        """End the thread, and wait for it for `timeout` seconds at most."""
        self._stop.set()
        self.join(timeout)

    def join(self, timeout: float = 1.0) -> None:
        """Wait until the thread has ended with its job, for `timeout` seconds at most."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _publish(self, display_id: str) -> None:
        state = self._job.status.state
        data = bundle(self._job, self._panel)
        self._send(data, display_id)
        if WIDGET in data:
            line = _AFTERLIFE.format(data[WIDGET]["model_id"], afterlife(self._job))
            self._send({"text/html": STYLE + line}, display_id + AFTER)
        self._published = (state, self._clock())
        if state not in ENDED:
            self._ids.append(display_id)

    def _refresh(self) -> None:
        if self._panel is not None:
            self._panel.refresh()
        state, now = self._job.status.state, self._clock()
        if state != self._published[0] and now - self._published[1] >= BETWEEN_PAGES:
            self._published = (state, now)
            self._update()

    def _finish(self) -> None:
        if self._panel is not None:
            # The widget stays, for a reloaded page, which gets no updates of displays.
            self._panel.finish()
        self._update()

    def _update(self) -> None:
        data = bundle(self._job, self._panel)
        for display_id in self._ids:
            self._send(data, display_id, update=True)
            if self._over and self._panel is not None:
                self._send({"text/html": ""}, display_id + AFTER, update=True)

    def _run(self) -> None:
        while not self._stop.is_set() and not self.boundary.broken:
            if self.boundary(lambda: self._job.wait(POLL_INTERVAL), True):
                break
            self.refresh()
        if not self._stop.is_set():
            self.finish()
        else:
            self._on_end()
