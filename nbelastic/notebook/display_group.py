"""Display group: all displays of a job, updated together until the job's end.

Two threads may update a group: that of an earlier display, and the main thread when it waits for
the job. Its lock makes every update whole and the end happen once. Under the lock the job's state
is read, but not waited for.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from nbelastic.render import STYLE, JobSnapshot, page, text
from nbelastic.render.formatting import duration
from nbelastic.render.text import ENDED

if TYPE_CHECKING:
    from .panel import Panel

AFTER = "-after"  # end of the display id of the line that shows where a widget is not there
WIDGET = "application/vnd.jupyter.widget-view+json"
BETWEEN_PAGES = 5.0  # minimum of seconds between two updates of the static HTML while a job runs

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

POLL_INTERVAL = 0.1  # seconds between two updates by the thread

logger = logging.getLogger(__name__)


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
    """All displays of one job. The first exception is logged, and the displays are off."""

    def __init__(
        self,
        job: Any,
        publish: Publisher,
        clock: Callable[[], float] = time.monotonic,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._job = job
        self._send = publish
        self._clock = clock
        self._on_end = on_end
        self._lock = threading.Lock()
        self._ids: list[str] = []
        self._published: tuple[str, float] = ("", float("-inf"))
        self._panel: Panel | None = None
        self._broken = self._over = False
        self._thread: threading.Thread | None = None

    def publish(self) -> None:
        """Make a display under the running cell. Called in the main thread."""
        with self._guarded() as works:
            if not works:
                return
            if self._panel is None and not self._job.done():
                with contextlib.suppress(ImportError):  # without ipywidgets
                    from .panel import Panel

                    self._panel = Panel(self._job)
            display_id, state = uuid.uuid4().hex, self._job.status.state
            data = bundle(self._job, self._panel)
            self._send(data, display_id)
            if self._panel is not None and WIDGET in data:
                line = _AFTERLIFE.format(data[WIDGET]["model_id"], self._panel.afterlife)
                self._send({"text/html": STYLE + line}, display_id + AFTER)
            self._published = (state, self._clock())
            if state not in ENDED:
                self._ids.append(display_id)

    def refresh(self) -> None:
        """Update the displays."""
        with self._guarded() as works:
            if not works or self._over:
                return
            if self._panel is not None:
                self._panel.refresh()
            state, now = self._job.status.state, self._clock()
            stale = self._panel is None or state != self._published[0]
            if stale and now - self._published[1] >= BETWEEN_PAGES:
                self._published = (state, now)
                self._update()

    def finish(self) -> None:
        """Show the final state in every display. Idempotent."""
        with self._guarded() as works:
            if self._over:
                return
            self._over = True
            if works:
                if self._panel is not None:
                    # The widget stays, for a reloaded page, which gets no updates of displays.
                    self._panel.finish()
                self._update()
        self._on_end()

    def follow(self) -> None:
        """Start a thread that updates the displays until the job ends."""
        with self._lock:
            if self._over or self._thread is not None:
                return
            name = f"nbelastic-panel-{self._job.name}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Wait until the thread has ended with its job, for a second at most."""
        if self._thread is not None:
            self._thread.join(1.0)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[bool]:
        """Hold the lock, and keep exceptions from the job; the value is whether none has come."""
        with self._lock:
            try:
                yield not self._broken
            except Exception:  # any: the displays end here, and the job goes on
                self._broken = True
                logger.warning(
                    "the display of job %r failed and is switched off",
                    self._job.name,
                    exc_info=True,
                )

    def _update(self) -> None:
        data = bundle(self._job, self._panel)
        for display_id in self._ids:
            self._send(data, display_id, update=True)
            if self._over and self._panel is not None:
                self._send({"text/html": ""}, display_id + AFTER, update=True)

    def _run(self) -> None:
        while not (self._broken or self._job.wait(POLL_INTERVAL)):
            self.refresh()
        self.finish()
