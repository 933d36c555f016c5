"""Thread that reads a checkpoint, because a file system may never answer."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Reader:
    """Calls of functions that read, each in a thread of its own, with a time limit."""

    def __init__(self, patience: float, on_progress: Callable[[], None]) -> None:
        self._patience = patience  # seconds without progress after which a call fails
        self._on_progress = on_progress  # called by the thread that waits
        self._steps = 0
        self._given_up = False

    def on_progress(self) -> None:
        """Record progress. The called function must call this."""
        self._steps += 1  # in the reading thread, which ends here if nothing waits for it
        if self._given_up:
            raise TimeoutError

    def call(self, function: Callable[[], T]) -> T:
        """Return a function's result, or raise its exception; without progress, TimeoutError.

        In that case the thread ends when its file system answers.
        """
        outcome: list[Any] = []
        done = threading.Event()

        def run() -> None:
            try:
                outcome[:] = [function(), None]
            except BaseException as error:  # the waiting thread raises it again
                outcome[:] = [None, error]
            finally:
                done.set()

        thread = threading.Thread(target=run, name="nbelastic-checkpoint-reader", daemon=True)
        thread.start()
        try:
            self._wait(done)
        except BaseException:
            self._given_up = True
            raise
        thread.join()
        self._on_progress()
        result, error = outcome
        if error is not None:
            raise error
        found: T = result
        return found

    def _wait(self, done: threading.Event) -> None:
        seen, since = self._steps, time.monotonic()
        while not done.wait(min(0.1, self._patience / 4)):
            if self._steps != seen:
                seen, since = self._steps, time.monotonic()
                self._on_progress()
            elif time.monotonic() - since > self._patience:
                raise TimeoutError(f"nothing was read for {self._patience:g} s")
