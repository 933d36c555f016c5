"""Interruption of a rank's Python code by an exception raised in its thread.

The interpreter raises it when that thread next runs bytecode; code that is in C is not reached. It
must not be raised at three places: during an import, while a thread is being started, and in the
session and the communicators, which hold locks and obey by themselves. So :class:`Interrupt` first
looks where the thread is, and if it is at such a place tries again later.
"""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .stack import innermost

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import CodeType

__all__ = ["Interrupt"]

_PACKAGE = Path(__file__).parent.parent
_OURS = (str(_PACKAGE / "collectives"), str(_PACKAGE / "elastic" / "session.py"))
_START = threading.Thread.start.__code__

# A module that is interrupted while it initialises is broken for the rest of the process. Until a
# new thread runs, CPython keeps it under the identifier of the thread that starts it: the exception
# would end the new thread before it has reported its start, and the other would wait for ever.


class Interrupt:
    """Interruption of the thread that makes this object."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._reachable = False
        self._wanted: type[BaseException] | None = None

    def reachable(self) -> AbstractContextManager[None]:
        """Let the thread be interrupted within a ``with`` block, and not after it."""
        return _Reachable(self)

    def _open(self) -> None:
        with self._lock:
            self._reachable = True

    def _shut(self) -> None:
        with self._lock:
            self._reachable = False
            _set(self._thread, None)

    def request(self, kind: type[BaseException]) -> None:
        """Raise an exception of this type in the thread, as soon as that is safe."""
        with self._lock:
            self._wanted = kind
        self.nudge()

    def drop(self) -> None:
        """Withdraw the request, because the thread has obeyed by itself."""
        with self._lock:
            self._wanted = None
            _set(self._thread, None)

    def nudge(self) -> None:
        """Try again to do what is requested, if anything is."""
        with self._lock:
            kind = self._wanted
            if kind is None or not self._reachable:
                return
            # Looking and raising are not atomic. A thread that has just got the interpreter's lock
            # keeps it for a while, so it hardly ever changes between them; look again afterwards.
            time.sleep(0)
            if _busy(self._thread):
                return
            _set(self._thread, kind)
            if _busy(self._thread):
                _set(self._thread, None)
            else:
                self._wanted = None


class _Reachable:
    """Context manager; no generator, because ``contextlib`` sets tracebacks of exceptions."""

    def __init__(self, interrupt: Interrupt) -> None:
        self._interrupt = interrupt

    def __enter__(self) -> None:
        self._interrupt._open()

    def __exit__(self, *_: object) -> None:
        self._interrupt._shut()


def _set(thread: int, kind: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(kind) if kind is not None else None
    )


def _busy(thread: int) -> bool:
    """Return whether a thread is where it must not be interrupted."""
    return innermost(thread, _is_kept) is not None


def _is_kept(code: CodeType) -> bool:
    return code is _START or code.co_filename.startswith(("<frozen importlib", *_OURS))
