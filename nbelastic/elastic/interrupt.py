"""Raising an exception in a rank's thread: how an order to end reaches user code in Python.

The interpreter raises it when that thread next runs bytecode; code that sits in C is not reached.
It is raised in user code only, never

- during an import: a module interrupted while it initialises is broken for the rest of the process;
- while a thread is being started: until it runs, CPython keeps the new thread under the identifier
  of the one that starts it, the exception would end it before it says that it has begun, and the
  starter waits for that for ever;
- in the session and in the communicators, which hold locks, own threads, and obey by themselves.

So whoever has something to raise looks where the thread is, and if it is in such a place comes
again a little later. Look and deed are not one step, though the interpreter's lock is hardly ever
given away between them; so there is a second look after the deed.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .stack import innermost

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

__all__ = ["Interrupt"]

_PACKAGE = Path(__file__).parent.parent
_OURS = (str(_PACKAGE / "collectives"), str(_PACKAGE / "elastic" / "session.py"))
_START = threading.Thread.start.__code__


class Interrupt:
    """The way to interrupt one thread, the one that makes this object."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._reachable = False
        self._wanted: type[BaseException] | None = None

    @contextlib.contextmanager
    def reachable(self) -> Iterator[None]:
        """Let the thread be interrupted within a ``with`` block, and not after it."""
        with self._lock:
            self._reachable = True
        try:
            yield
        finally:
            with self._lock:
                self._reachable = False
                _set(self._thread, None)

    def request(self, kind: type[BaseException]) -> None:
        """Have `kind`, an exception type, raised as soon as that can be done."""
        with self._lock:
            self._wanted = kind
        self.nudge()

    def drop(self) -> None:
        """Withdraw the request: the thread obeys by itself, or need not any more."""
        with self._lock:
            self._wanted = None
            _set(self._thread, None)

    def nudge(self) -> None:
        """Try again what could not be done yet. Does nothing where nothing is requested."""
        with self._lock:
            kind = self._wanted
            if kind is None or not self._reachable:
                return
            time.sleep(0)  # whoever has just been given the interpreter's lock keeps it a while
            if _busy(self._thread):
                return
            _set(self._thread, kind)
            if _busy(self._thread):
                _set(self._thread, None)
            else:
                self._wanted = None


def _set(thread: int, kind: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(kind) if kind is not None else None
    )


def _busy(thread: int) -> bool:
    """Return whether a thread is where it must not be interrupted."""
    return innermost(thread, _is_kept) is not None


def _is_kept(code: CodeType) -> bool:
    return code is _START or code.co_filename.startswith(("<frozen importlib", *_OURS))
