"""Dask's profiler, which rests while a rank trains.

A hundred times a second a worker looks which line of which function its tasks are at
(``distributed.worker.profile.interval``). Of tasks that take long that is little to know, and dear:
each time it wants the interpreter, and where all processors compute, one of them, with another
rank's data in its cache. See https://distributed.dask.org/en/stable/diagnosing-performance.html.

Whoever has chosen a longer interval has thought about it, and keeps the profile of their ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed.core import Status

if TYPE_CHECKING:
    from distributed import Worker

__all__ = ["Profiler"]

DEFAULT_MS = 10.0


class Profiler:
    """That of a worker. To be used in its event loop.

    Parameters
    ----------
    worker : distributed.Worker
        Whose. It may have none.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._rests: Any = None

    def rest(self) -> None:
        """Look at nothing until :meth:`go_on`."""
        callback = self._worker.periodic_callbacks.get("profile")
        if callback is None or not callback.is_running() or callback.callback_time > DEFAULT_MS:
            return
        callback.stop()
        self._rests = callback

    def go_on(self) -> None:
        """Look again, if it was this object that had it stop, unless the worker is closing."""
        callback, self._rests = self._rests, None
        if callback is not None and self._worker.status in (Status.running, Status.paused):
            callback.start()
