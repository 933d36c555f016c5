"""Raising an exception in another thread: how an order to end reaches a rank in Python code.

The interpreter raises it when that thread next runs bytecode; code that sits in C is not reached.
Not during an import: a module that is interrupted while it initialises is broken for the rest of
the process. Look and deed cannot be one step, so there is a second look after the deed.
"""

from __future__ import annotations

import ctypes
import sys

__all__ = ["raise_in_thread", "withdraw"]


def raise_in_thread(thread: int, kind: type[BaseException]) -> bool:
    """Have `kind` raised in a thread, unless it is importing; return whether that was done.

    Parameters
    ----------
    thread : int
        The thread's identifier.
    kind : type
        The exception; it is raised without arguments.
    """
    if _is_importing(thread):
        return False
    _set(thread, kind)
    if _is_importing(thread):
        withdraw(thread)
        return False
    return True


def withdraw(thread: int) -> None:
    """Take back an exception that has not been raised yet."""
    _set(thread, None)


def _set(thread: int, kind: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(kind) if kind is not None else None
    )


def _is_importing(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
