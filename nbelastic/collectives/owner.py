"""Owner of a group: a thread to make the group, and to end it after an abort.

Gloo and NCCL block in calls where a rank must not: in making a group, and in ending it. So each
group has an owner thread:

- *forming*: it makes the group, while the rank's thread waits for the outcome, or for an abort;
- *in use*: it sleeps;
- *ending*: it takes the group down. The next generation is formed meanwhile.
"""

from __future__ import annotations

import abc
import atexit
import ctypes
import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbelastic.collectives.abort_signal import AbortSignal, Wakeup

# A thread that returns from C++ after the interpreter has gone would abort the process.
EXIT_LIMIT_S = 2.0


class GroupOwner(abc.ABC):
    """Owner of a group, ended by the abort signal at the latest."""

    def __init__(self, name: str, abort_signal: AbortSignal) -> None:
        self._name = name
        self._abort_signal = abort_signal
        self._leaving: Wakeup[bool] = SimpleQueue()
        leaving = self._leaving
        # The abort signal keeps this function, which therefore refers to no group.
        self._leave: Callable[..., None] = lambda *_: leaving.put(True)
        self._thread: threading.Thread | None = None

    def _start(self, limit_s: float | None = None) -> bool:
        """Wait until the owner's thread has made the group, or failed, or for an abort.

        Return whether that was within the limit.
        """
        with self._abort_signal.listen() as wakeup:
            living.add(self)  # before the thread runs: an exit has to find it
            # A daemon, because a call stuck in C++ must not keep the process from exiting.
            self._thread = threading.Thread(
                target=self._run, args=(wakeup,), name=self._name, daemon=True
            )
            self._thread.start()
            self._abort_signal.on_abort(self._leave)  # an abort before this calls it at once
            try:
                wakeup.get(timeout=limit_s)
            except Empty:
                return False
        return True

    def _run(self, formed: Wakeup[bool]) -> None:
        try:
            self._form()
        except Exception as error:  # an abort among them
            self._fail_to_form(error)
        formed.put(True)  # after a failure, too: the rank's thread then reads it
        self._leaving.get()
        self._take_down()
        living.discard(self)  # only now: until here an exit waits for it

    @abc.abstractmethod
    def _form(self) -> None:
        """Make the group, in the owner's thread."""

    @abc.abstractmethod
    def _fail_to_form(self, error: Exception) -> None:
        """Take the error of making the group, in the owner's thread."""

    @abc.abstractmethod
    def _take_down(self) -> None:
        """End the group, in the owner's thread."""

    def abort(self, reason: str) -> None:
        """End the group. Any thread may call it."""
        self._abort_signal.abort(reason)

    def join(self, limit_s: float) -> None:
        """Wait until the group has ended, for the limit at most."""
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(limit_s)


living: set[GroupOwner] = set()  # the owners whose groups have not ended


@atexit.register
def _end_all() -> None:
    owners = list(living)
    for owner in owners:
        owner.abort("the process is exiting")
    deadline = time.monotonic() + EXIT_LIMIT_S  # for all owners together
    for owner in owners:
        owner.join(max(0.0, deadline - time.monotonic()))


def _leak_all_in_fork() -> None:
    """Keep the groups for ever in a fork: their destructors wait for the parent's threads."""
    for owner in living:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))
    living.clear()  # the exit of a fork would wait for threads that it lacks


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leak_all_in_fork)
