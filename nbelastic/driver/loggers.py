"""Send metrics to an experiment logger, by a function of the user's.

The ranks report, and the kernel logs, so the steps of a run only grow, whichever rank is lost. A
row that is reported may be taken back by a fault. It is sent once every rank holds a commit after
it, and :data:`SETTLE_S` later, when all have sent their part of its mean.

One thread for each logger, ``nbelastic-logger-NAME``, reads the kernel's metrics, which keep every
row. A logger that is slow is behind, and one that raises is tried again; neither holds up the
training. At the job's end it has :data:`LAST_S` to take what is left.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from nbelastic.errors import OptionError, summary_of
from nbelastic.messages import Record

from .thread import Driver

logger = logging.getLogger(__name__)

INTERVAL_S = 0.5
SETTLE_S = 2.0  # after a commit, in which the reports before it arrive, with heartbeats
LAST_S = 60.0
TRIES = 20  # how often in a row a logger may raise; then it gets nothing any more

Send: TypeAlias = "Callable[[int | float, dict[str, float]], object]"
"""``send(step, values)`` logs the metrics of one step."""

Key: TypeAlias = "tuple[int, int]"
"""Place of a row: the commit before it, and its number since then."""


def check_logger(send: Any) -> Any:
    """Return a logger's function, or raise an OptionError."""
    if callable(send) and not isinstance(send, type):
        return send
    raise OptionError(
        f"log_to={type(send).__name__}: must be a function that is called with a step and a dict "
        "of metrics, such as lambda step, values: run.log(values, step=int(step)) for wandb"
    )


class MetricsLogger:
    """Sends the rows of a job to one logger, in a thread."""

    def __init__(self, driver: Driver, send: Send) -> None:
        self._send: Send = check_logger(send)
        self._driver = driver
        self._sent, self._rows = (-1, -1), 0
        self._final, self._known, self._since = -1, -1, time.monotonic()
        self._failures = 0
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"nbelastic-logger-{driver.name}", daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """Wait until all is sent after the job's end, at most a minute."""
        self._over.set()
        self._thread.join(LAST_S)
        if self._thread.is_alive():
            self._complain(f"has not taken all metrics within {LAST_S:g} s of the job's end")

    def _run(self) -> None:
        over = False
        while not over and self._failures < TRIES:
            over = self._over.wait(INTERVAL_S) or self._driver.future.done()
            if self._driver.detached:  # what it sent now, the other kernel would send again
                return
            try:
                settled = self._settled(over)
                for key, step, values in self._driver.log.metrics.committed(self._sent, settled):
                    self._send(self._rows if step is None else step, dict(values))
                    self._failures = 0
                    self._sent, self._rows = key, self._rows + 1
            except Exception as error:  # of the logger, which may be anything
                self._failures += 1
                if self._failures == 1:
                    self._complain(f"failed: {summary_of(error)}; it is tried again")
                over = False
                time.sleep(INTERVAL_S)
        if self._failures >= TRIES:
            self._complain(f"failed {TRIES} times in a row, and gets no more metrics")

    def _settled(self, over: bool) -> float:
        """Return up to which commit rows are final."""
        view = self._driver.view()
        if over:
            return math.inf if view.state == "finished" else view.commits
        now = time.monotonic()
        if now >= self._since + SETTLE_S:  # the commits that were known then are final
            self._final, self._known, self._since = self._known, view.commits, now
        return self._final

    def _complain(self, what: str) -> None:
        name = getattr(self._send, "__qualname__", type(self._send).__name__)
        remark = f"the logger {name} {what}\njob.metrics has all"
        self._driver.log.note(Record("warning", detail=remark))
