"""The live panel: a job in core ipywidgets, with a Stop button and a slider for its limits.

Whoever shows it calls :meth:`Panel.refresh` as often as they like, from whatever thread; it looks
again at most four times a second, and at once when something has happened. What the panel shows
comes from the pure functions in ``render``, a widget a part, and a part is sent only if it has
changed. The callbacks of the controls come in the kernel's thread or in another, so that everything
that is written here is written under one lock, and jobs are asked outside it.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import ipywidgets

from nbelastic.errors import OptionError

from .guard import Guard
from .render import PARTS, STYLE, Picture, timeline_key
from .render.curves import curves_key
from .render.picture import ENDED

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Panel"]

logger = logging.getLogger(__name__)

BETWEEN_UPDATES = 0.25
"""Seconds between two updates, at least, while nothing happens but steps."""

LEAST_UPPER = 8
"""The slider goes at least up to here."""

PATIENCE = 3.0
"""Seconds for which the slider shows what was asked for while the job has yet to say the same."""

_KEYS: dict[str, Callable[[Picture], tuple[object, ...]]] = {
    "timeline": timeline_key,
    "curves": curves_key,
}
"""What the expensive parts depend on: they are drawn again only when it changes."""


class Panel:
    """A job as a widget.

    Parameters
    ----------
    job : Job
        What to show.
    clock : callable
        The time in seconds.

    Attributes
    ----------
    widget : ipywidgets.VBox
        What to display.
    """

    def __init__(self, job: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._job: Any = job
        self._clock = clock
        self._guard = Guard(f"job {job.name!r}")
        self._lock = threading.RLock()
        self._seen: tuple[str, int] = ("", -1)
        self._updated = float("-inf")
        self._keys: dict[str, tuple[object, ...]] = {}
        self._wanted: tuple[tuple[int, int], float] | None = None
        self._setting = 0
        self._parts = {name: _html() for name in PARTS}
        self.stop = ipywidgets.Button(
            description="Stop", icon="stop", tooltip="End the job at its next commit"
        )
        self.slider = ipywidgets.IntRangeSlider(
            value=(1, LEAST_UPPER),
            min=1,
            max=LEAST_UPPER,
            description="Min/max ranks",
            continuous_update=False,
            style={"description_width": "initial"},
            layout={"width": "340px"},
        )
        self._controls = ipywidgets.HBox(
            [self.stop, self.slider], layout={"flex_flow": "row wrap", "align_items": "center"}
        )
        frame = ipywidgets.HTML(STYLE, layout={"display": "none"})
        above = [self._parts[name] for name in ("head", "progress")]
        below = [self._parts[name] for name in PARTS if name not in ("head", "progress")]
        self.widget = ipywidgets.VBox([frame, *above, self._controls, *below])
        self.widget.add_class("nbe-panel")
        self.stop.on_click(self._stop_pressed)
        self.slider.observe(self._slider_moved, names="value")
        self.refresh()

    @property
    def broken(self) -> bool:
        """Whether the panel has switched itself off after a fault."""
        return self._guard.broken

    def refresh(self) -> bool:
        """Show how the job stands; return whether something was looked at. Never raises.

        While another thread is at it, there is nothing to do.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._guard(self._refresh, False)
        finally:
            self._lock.release()

    def finish(self) -> None:
        """Show the final state, and take the controls away. Never raises."""
        with self._lock:
            self._guard(self._finish, None)

    # -- what it shows -------------------------------------------------------------------------

    def _refresh(self) -> bool:
        if self._job is None:
            return False
        seen = (self._job.status.state, len(self._job.history))
        now = self._clock()
        if seen == self._seen and now - self._updated < BETWEEN_UPDATES:
            return False
        self._seen, self._updated = seen, now
        self._put(Picture.of(self._job))
        return True

    def _put(self, picture: Picture) -> None:
        for name, draw in PARTS.items():
            key = _KEYS[name](picture) if name in _KEYS else None
            if key is not None and self._keys.get(name) == key:
                continue
            drawn = draw(picture)
            shown = f'<div class="nbe">{drawn}</div>' if drawn else ""
            part = self._parts[name]
            if part.value != shown:
                part.value = shown
            display = None if drawn else "none"
            if part.layout.display != display:
                part.layout.display = display
            if key is not None:
                self._keys[name] = key
        if picture.status.state in ENDED:
            self._disable()
        else:
            self._put_limits(picture)

    def _put_limits(self, picture: Picture) -> None:
        """Move the slider to the job's limits, unless its user has just asked for others."""
        status = picture.status
        # the drawn scale only ever grows: a handle must not move under the mouse
        upper = max(status.max_np or 0, status.size, status.min_np, LEAST_UPPER, self.slider.max)
        limits = (status.min_np, upper if status.max_np is None else status.max_np)
        if self._wanted is not None:
            wanted, since = self._wanted
            if limits != wanted and self._clock() - since < PATIENCE:
                return
            self._wanted = None
        if (self.slider.max, self.slider.value) == (upper, limits):
            return
        self._setting = threading.get_ident()
        try:
            with self.slider.hold_sync():
                self.slider.max = upper
                self.slider.value = limits
        finally:
            self._setting = 0

    def _finish(self) -> None:
        if self._job is None:
            return
        self._put(Picture.of(self._job))
        self._disable()
        self.widget.children = tuple(c for c in self.widget.children if c is not self._controls)
        # ipywidgets keeps every widget for the life of the kernel: let it not keep the job
        self.stop.on_click(self._stop_pressed, remove=True)
        self.slider.unobserve_all()
        self._job = None

    def _disable(self) -> None:
        for control in (self.stop, self.slider):
            if not control.disabled:
                control.disabled = True

    # -- what its user asks for ----------------------------------------------------------------

    def _stop_pressed(self, _: object) -> None:
        self._ask(self._stop)

    def _stop(self) -> None:
        """The first time at the next commit, the second time now."""
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

    def _slider_moved(self, change: Any) -> None:
        if self._setting != threading.get_ident():
            self._ask(lambda: self._scale(change["new"]))

    def _ask(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:  # the job did not take it: the panel, and the next press, must still work
            logger.warning("a control of the panel failed", exc_info=True)

    def _scale(self, wanted: tuple[int, int]) -> None:
        """Ask for the limits that differ. At its upper end "no limit" stays what it is."""
        with self._lock:
            job = self._job
            if job is None:
                return
            status, top = job.status, self.slider.max
            self._wanted = (wanted, self._clock())
        low = wanted[0] if wanted[0] != status.min_np else None
        unlimited = status.max_np is None and wanted[1] == top
        high = None if unlimited or wanted[1] == status.max_np else wanted[1]
        if low is None and high is None:
            return
        try:
            job.scale(min_np=low, max_np=high)
        except OptionError:  # the limits have changed meanwhile: show what they are
            with self._lock:
                self._wanted = None


def _html() -> Any:
    return ipywidgets.HTML(layout={"width": "100%", "margin": "5px 0"})
