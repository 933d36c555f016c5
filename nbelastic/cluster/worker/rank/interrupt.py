"""Interruption of a rank's function by a signal that raises where it stands.

The thread that reads orders sends the signal to the main thread, whose handler raises. That reaches
code that sleeps or waits, but none in C that never returns. It must not be raised in the session
and the communicators, which hold locks and obey by themselves: then it is tried again later.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from nbelastic import collectives
from nbelastic.elastic.ranks import session

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import FrameType

SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""One that neither users nor batch systems are likely to use."""

_OURS = (str(Path(collectives.__file__).parent), session.__file__)


class SignalInterrupt:
    """Interruption of the main thread, in which this is made."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._reachable = False
        self._wanted: type[BaseException] | None = None
        signal.signal(SIGNAL, self._handle)

    def reachable(self) -> AbstractContextManager[None]:
        """Let the thread be interrupted within a ``with`` block, and not after it."""
        return _Reachable(self)

    def request(self, kind: type[BaseException]) -> None:
        """Raise an exception of this type in the thread, as soon as that is safe."""
        self._wanted = kind
        self.nudge()

    def drop(self) -> None:
        """Withdraw the request, because the thread has obeyed by itself."""
        self._wanted = None

    def nudge(self) -> None:
        """Try again to do what is requested, if anything is."""
        if self._wanted is not None and self._reachable:
            signal.pthread_kill(self._thread, SIGNAL)

    def _handle(self, _: int, frame: FrameType | None) -> None:
        kind = self._wanted
        if kind is not None and self._reachable and not _is_kept(frame):
            self._wanted = None
            raise kind


class _Reachable:
    """Context manager; no generator, because ``contextlib`` sets tracebacks of exceptions."""

    def __init__(self, interrupt: SignalInterrupt) -> None:
        self._interrupt = interrupt

    def __enter__(self) -> None:
        self._interrupt._reachable = True

    def __exit__(self, *_: object) -> None:
        self._interrupt._reachable = False


def _is_kept(frame: FrameType | None) -> bool:
    """Return whether a call in progress must not be interrupted."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OURS):
            return True
        frame = frame.f_back
    return False
