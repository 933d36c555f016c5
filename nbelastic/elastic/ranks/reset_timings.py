"""Duration of each phase of a reset, measured by a rank."""

from __future__ import annotations

import threading
import time


class ResetTimings:
    """Moments of the reset in progress, if any; any thread may mark them.

    In their order: ``noticed`` (an operation has failed, or a message has come that the generation
    is over or about to change), ``aborted`` (the rank's thread has left the user's code),
    ``restored`` (the state is that of the last commit), ``ready`` (reported), ``planned`` (the next
    plan has come), ``connected``, ``synchronised`` (the state is that of all members), ``stepped``
    (the first commit or check after it).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moments: dict[str, float] = {}

    @property
    def in_progress(self) -> bool:
        """Whether a change has been noticed."""
        return bool(self._moments)

    def begin(self) -> None:
        """Mark that a change has been noticed, unless a reset is in progress."""
        with self._lock:
            self._moments.setdefault("noticed", time.monotonic())

    def mark(self, phase: str) -> None:
        """Mark the end of a phase; where resets run together, the last one counts."""
        if self._moments:
            with self._lock:
                self._moments.pop(phase, None)
                self._moments[phase] = time.monotonic()

    def end(self) -> dict[str, float]:
        """Mark the end of the reset; return after how many milliseconds each phase was over."""
        self.mark("stepped")
        with self._lock:
            moments, self._moments = self._moments, {}
        begin = moments["noticed"]
        return {phase: round(1e3 * (t - begin), 1) for phase, t in moments.items()}
