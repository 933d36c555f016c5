"""Live panel: a job in ipywidgets, with a Stop button and fields for its limits.

Any thread may call :meth:`Panel.refresh` at any time. It reads the job at most four times a second,
and at once after an event. Each part is a widget, rendered by the pure functions in ``render``, and
is sent only if it has changed. Callbacks of the controls may run in another thread, so everything
is written under one lock, and the job is called outside it. The limits are fields, because a screen
reader cannot name the handles of an ipywidgets slider.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import ipywidgets

from nbelastic.errors import OptionError
from nbelastic.render import OUTPUT_TITLE, PARTS, STYLE, JobSnapshot, timeline_key
from nbelastic.render.curves import curves_key
from nbelastic.render.formatting import escape
from nbelastic.render.job_snapshot import ENDED

from .display_group import ErrorBoundary, afterlife

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

BETWEEN_UPDATES = 0.25
"""Minimum of seconds between two updates without an event."""

MOST_RANKS = 1_000_000

PATIENCE = 3.0
"""Seconds for which the fields keep the requested limits until the job reports them."""

SHOWN_REFUSAL = 15.0
"""Seconds for which the panel says why limits were refused."""

STALE = (
    '<p class="nbe-stale">No news for 15 s: the kernel is busy, was restarted or is gone. {}</p>'
)
"""Shown by its style, 15 s after the last update: a kernel that is gone cannot show it."""

_KEYS: dict[str, Callable[[JobSnapshot], tuple[object, ...]]] = {
    "timeline": timeline_key,
    "curves": curves_key,
}
"""Values on which the expensive parts depend: they are redrawn only when these change."""


class Panel:
    """A job as a widget."""

    def __init__(self, job: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._job: Any = job
        self._clock = clock
        self._boundary = ErrorBoundary(f"job {job.name!r}")
        self._lock = threading.RLock()
        self._seen: tuple[str, int] = ("", -1)
        self._updated = float("-inf")
        self._keys: dict[str, tuple[object, ...]] = {}
        self._wanted: tuple[tuple[int, int], float] | None = None
        self._limits: tuple[int, int] | None = None
        self._setting = 0
        self._stale = STALE.format(afterlife(job))
        self._refused = 0.0
        self._parts = {name: _html() for name in PARTS}
        self.stop = ipywidgets.Button(
            description="Stop", icon="stop", tooltip="End the job at its next commit"
        )
        self.least = _field("Min ranks", 1, "Fewer ranks than these do not train")
        self.most = _field(
            "Max ranks", 0, "No more ranks than these; 0: all that there is room for"
        )
        self._refusal = ipywidgets.HTML()
        controls = [self.stop, self.least, self.most, self._refusal]
        self._controls = ipywidgets.HBox(
            controls, layout={"flex_flow": "row wrap", "align_items": "center"}
        )
        frame = ipywidgets.HTML(STYLE, layout={"display": "none"})
        above = [self._parts[name] for name in ("head", "progress")]
        # A widget, because one that is open stays so when its text is replaced.
        self._printed = ipywidgets.Accordion([self._parts["output"]], titles=[OUTPUT_TITLE])
        below = [self._parts[name] for name in PARTS if name not in ("head", "progress")]
        below[below.index(self._parts["output"])] = self._printed
        self.widget = ipywidgets.VBox([frame, *above, self._controls, *below])
        for name in ("nbe-panel", f"nbe-live-{self.widget.model_id}"):
            self.widget.add_class(name)
        self.stop.on_click(self._stop_pressed)
        for limit in (self.least, self.most):
            limit.observe(self._limit_changed, names="value")
        self.refresh()

    @property
    def broken(self) -> bool:
        """Whether the panel has switched itself off after a fault."""
        return self._boundary.broken

    def refresh(self) -> bool:
        """Update the panel; return whether the job was read. Never raises.

        Does nothing while another thread updates it.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._boundary(self._refresh, False)
        finally:
            self._lock.release()

    def finish(self) -> None:
        """Show the final state, and remove the controls. Never raises."""
        with self._lock:
            self._boundary(self._finish, None)

    # -- rendering -------------------------------------------------------------------------

    def _refresh(self) -> bool:
        if self._job is None:
            return False
        status = self._job.status
        seen = (status.state, len(self._job.history))
        now = self._clock()
        if seen == self._seen and now - self._updated < BETWEEN_UPDATES:
            return False
        self._seen, self._updated = seen, now
        self._put(JobSnapshot.of(self._job, status))
        return True

    def _put(self, snapshot: JobSnapshot) -> None:
        for name, draw in PARTS.items():
            key = _KEYS[name](snapshot) if name in _KEYS else None
            if key is not None and self._keys.get(name) == key:
                continue
            drawn = draw(snapshot)
            if name == "head" and not snapshot.ended:
                drawn += self._stale
            shown = f'<div class="nbe">{drawn}</div>' if drawn else ""
            part = self._parts[name]
            if part.value != shown:
                part.value = shown
            display = None if drawn else "none"
            if name == "output":
                part = self._printed
            if part.layout.display != display:
                part.layout.display = display
            if key is not None:
                self._keys[name] = key
        if self._refusal.value and self._clock() - self._refused > SHOWN_REFUSAL:
            self._refusal.value = ""
        if snapshot.status.state in ENDED or snapshot.status.state == "stopping":
            self._disable()
        else:
            self._put_limits(snapshot)

    def _put_limits(self, snapshot: JobSnapshot) -> None:
        """Show the job's limits if they have changed, or if a request had no effect.

        The fields' values are not compared, because a thread that waits for the lock may be about
        to request them.
        """
        limits = (snapshot.status.min_np, snapshot.status.max_np or 0)
        if self._wanted is not None:
            wanted, since = self._wanted
            if limits != wanted and self._clock() - since < PATIENCE:
                return
            self._wanted = self._limits = None
        if limits == self._limits:
            return
        self._limits = limits
        self._setting = threading.get_ident()
        try:
            self.least.value, self.most.value = limits
        finally:
            self._setting = 0

    def _finish(self) -> None:
        if self._job is None:
            return
        self._put(JobSnapshot.of(self._job))
        self._disable()
        self.widget.children = tuple(c for c in self.widget.children if c is not self._controls)
        # ipywidgets keeps every widget for the life of the kernel; do not let it keep the job
        self.stop.on_click(self._stop_pressed, remove=True)
        self.least.unobserve_all()
        self.most.unobserve_all()
        self._job = None

    def _disable(self) -> None:
        for control in (self.stop, self.least, self.most):
            if not control.disabled:
                control.disabled = True

    # -- controls ----------------------------------------------------------------

    def _stop_pressed(self, _: object) -> None:
        self._ask(self._stop)

    def _stop(self) -> None:
        """Stop the job: at its next commit the first time, at once the second time."""
        with self._lock:
            job, again = self._job, self.stop.description != "Stop"
            if job is None or self.stop.disabled:
                return
            with self.stop.hold_sync():
                self.stop.description = "Ending …" if again else "Stop now"
                self.stop.tooltip = "End the job at once; its last commit stays the newest"
                self.stop.button_style = "" if again else "danger"
                self.stop.disabled = again
        if again:
            job.cancel()
        else:
            job.stop()

    def _limit_changed(self, _: object) -> None:
        if self._setting != threading.get_ident():
            self._ask(self._scale)

    def _ask(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:  # any: the panel, and the next press, must still work
            logger.warning("a control of the panel failed", exc_info=True)

    def _scale(self) -> None:
        """Request the limits that differ from the job's. A maximum cannot be removed with 0."""
        with self._lock:
            job = self._job
            if job is None:
                return
            status, wanted = job.status, (self.least.value, self.most.value)
            low = wanted[0] if wanted[0] != status.min_np else None
            high = wanted[1] if wanted[1] != (status.max_np or 0) else None
            self._wanted = (wanted, self._clock())
        refusal = ""
        try:
            if high == 0:
                raise OptionError("a job with a maximum keeps one: enter a number of ranks")
            if low is not None or high is not None:
                job.scale(min_np=low, max_np=high)
        except OptionError as error:
            refusal = str(error)
        with self._lock:
            words = refusal.replace("min_np=", "min ranks ").replace("max_np=", "max ranks ")
            self._refusal.value = f'<p class="nbe-refusal">{escape(words)}</p>' if words else ""
            self._refused = self._clock()
            if refusal:  # show the actual limits
                self._wanted = self._limits = None
                self._put_limits(JobSnapshot.of(job))


def _field(name: str, least: int, meaning: str) -> Any:
    return ipywidgets.BoundedIntText(
        value=least,
        min=least,
        max=MOST_RANKS,
        description=name,
        tooltip=meaning,
        continuous_update=False,
        style={"description_width": "initial"},
        layout={"width": "150px", "max_width": "100%"},
    )


def _html() -> Any:
    return ipywidgets.HTML(layout={"width": "100%", "margin": "5px 0"})
