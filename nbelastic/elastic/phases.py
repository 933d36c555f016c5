"""Where the time of a change of membership goes, as one rank sees it."""

from __future__ import annotations

import threading
import time

__all__ = ["Phases"]


class Phases:
    """Moments of the change that is under way, if one is; any thread may note them.

    In the order in which they come: ``noticed`` (an operation has failed, or the word has come
    that the generation is over or about to change), ``aborted`` (the rank's thread is out of the
    user's code), ``restored`` (the state is that of the last commit), ``ready`` (said so),
    ``planned`` (the next plan has come), ``connected``, ``synchronised`` (the state is that of all
    members), ``stepped`` (the first commit or check after it).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moments: dict[str, float] = {}

    @property
    def under_way(self) -> bool:
        """Whether a change has been noticed."""
        return bool(self._moments)

    def begin(self) -> None:
        """Note that a change has been noticed, unless one is under way."""
        with self._lock:
            self._moments.setdefault("noticed", time.monotonic())

    def note(self, phase: str) -> None:
        """Note that a phase is over; where changes run together, the last counts."""
        if self._moments:
            with self._lock:
                self._moments.pop(phase, None)
                self._moments[phase] = time.monotonic()

    def end(self) -> str:
        """Note the last phase; return in words after how many milliseconds each was over."""
        self.note("stepped")
        with self._lock:
            moments, self._moments = self._moments, {}
        begin = moments["noticed"]
        return ", ".join(f"{phase} {1e3 * (t - begin):.1f}" for phase, t in moments.items()) + " ms"
