"""Live panel: a job in ipywidgets, with a Stop button and fields for its limits.

The display group updates it, under its lock. Each part is a widget, rendered by the pure functions
in ``render``, and is sent only if it has changed. Callbacks of the controls run in the kernel's
thread, and ipywidgets shows their errors. The limits are fields, because a screen reader cannot
name the handles of an ipywidgets slider.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ipywidgets

from nbelastic.driver import driver_of
from nbelastic.errors import OptionError
from nbelastic.render import OUTPUT_TITLE, PARTS, STYLE, JobSnapshot
from nbelastic.render.formatting import escape
from nbelastic.status import JobStatus

BETWEEN_DRAWINGS = 1.0  # seconds at least between drawings: a new one closes an open tooltip
DRAWINGS = frozenset({"timeline", "curves"})

MOST_RANKS = 1_000_000
SHOWN_REFUSAL = 15.0  # seconds for which the panel says why limits were refused

STALE = (
    '<p class="nbe-stale">No news for 15 s: the kernel is busy, was restarted or is gone. {}</p>'
)
"""Shown by its style, 15 s after the last update: a kernel that is gone cannot show it."""


def afterlife(job: Any) -> str:
    """Return what becomes of a job without its kernel, as HTML."""
    if driver_of(job).job_client.is_local:
        return "The job ends with its kernel, because its cluster does."
    call = escape(f'nbelastic.attach("{job.name}", cluster=client)')
    return f"Without its kernel the job trains on: <code>{call}</code> shows it."


class Panel:
    """A job as a widget."""

    def __init__(self, job: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._job: Any = job
        self._clock = clock
        self._seen: tuple[str, int] = ("", -1)
        self._drawn = float("-inf")
        self._limits: tuple[int, int] | None = None  # as the job has last reported them
        self._stale = STALE.format(afterlife(job))
        self._refused = 0.0
        layout = {"width": "100%", "margin": "5px 0"}
        self._parts = {name: ipywidgets.HTML(layout=layout) for name in PARTS}
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
        # A widget, because one that is open stays so when its text is replaced.
        printed = ipywidgets.Accordion([self._parts["output"]], titles=[OUTPUT_TITLE])
        self._boxes = {**self._parts, "output": printed}
        head, progress, *below = self._boxes.values()
        self.widget = ipywidgets.VBox([frame, head, progress, self._controls, *below])
        self.widget.add_class("nbe-panel")
        self.stop.on_click(self._stop_pressed)
        for limit in (self.least, self.most):
            limit.observe(self._limit_changed, names="value")
        self.refresh()

    def refresh(self) -> None:
        """Update the panel."""
        snapshot, now = JobSnapshot.of(self._job), self._clock()
        seen = (snapshot.status.state, len(snapshot.history))
        draws = seen != self._seen or now - self._drawn >= BETWEEN_DRAWINGS
        if draws:
            self._seen, self._drawn = seen, now
        self._put(snapshot, draws=draws)

    def finish(self) -> None:
        """Show the final state, and remove the controls."""
        self._put(JobSnapshot.of(self._job), draws=True)
        self.widget.children = tuple(c for c in self.widget.children if c is not self._controls)
        # ipywidgets keeps every widget for the life of the kernel; do not let it keep the job
        self.stop.on_click(self._stop_pressed, remove=True)
        self.least.unobserve_all()
        self.most.unobserve_all()
        self._job = None

    # -- rendering -------------------------------------------------------------------------

    def _put(self, snapshot: JobSnapshot, *, draws: bool) -> None:
        for name, draw in PARTS.items():
            if name in DRAWINGS and not draws:
                continue
            drawn = draw(snapshot)
            if name == "head" and not snapshot.ended:
                drawn += self._stale
            # Traits that keep their value are not sent.
            self._parts[name].value = f'<div class="nbe">{drawn}</div>' if drawn else ""
            self._boxes[name].layout.display = None if drawn else "none"
        if self._clock() - self._refused > SHOWN_REFUSAL:
            self._refusal.value = ""
        if snapshot.ended or snapshot.status.state == "stopping":
            self.least.disabled = self.most.disabled = True
            self.stop.disabled |= snapshot.ended  # what takes long to stop can be stopped now
        else:
            self._put_limits(snapshot.status)

    def _put_limits(self, status: JobStatus) -> None:
        """Show the job's limits if they have changed since the last report."""
        # The fields are not compared: their values may be on the way to the job.
        limits = (status.min_np, status.max_np or 0)
        if limits != self._limits:
            self._limits = limits
            self.least.value, self.most.value = limits

    # -- controls ----------------------------------------------------------------

    def _stop_pressed(self, _: object) -> None:
        """Stop the job: at its next commit the first time, at once the second time."""
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

    def _limit_changed(self, change: Any) -> None:
        """Request a limit other than the job's. A maximum cannot be removed with 0."""
        job, is_least = self._job, change["owner"] is self.least
        if job is None or self._limits is None or change["new"] == self._limits[not is_least]:
            return
        refusal = ""
        try:
            if change["new"] == 0:
                raise OptionError("a job with a maximum keeps one: enter a number of ranks")
            job.scale(**{"min_np" if is_least else "max_np": change["new"]})
        except OptionError as error:
            words = str(error).replace("min_np=", "min ranks ").replace("max_np=", "max ranks ")
            refusal = f'<p class="nbe-refusal">{escape(words)}</p>'
            self._limits = None  # show the actual limits
            self._put_limits(job.status)
        self._refusal.value, self._refused = refusal, self._clock()


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
