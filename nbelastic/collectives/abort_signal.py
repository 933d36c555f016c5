"""Abort signal of a communicator: one reason, delivered to every waiting thread.

A signal is given once, from any thread, and stays. It consists of a list, to which the interpreter
appends in one step, and of ``queue.SimpleQueue``, whose ``put`` never blocks. So there is no lock
that a thread could hold, or leave held when an exception is raised in it from outside, and an event
loop may call :meth:`AbortSignal.abort`.

The parts of a communicator share one signal: what ends one of them ends all.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from nbelastic.errors import CollectiveError, NbelasticError, NotTheRank

# A waiting thread reads True for the event that it waits for, False for an abort.
Wakeup = SimpleQueue


class AbortSignal:
    """The reason why a communicator is broken, once it is.

    Operations raise an error of a `kind`. It is `orderly` if it was closed with no operation under
    way, `forked` in a fork of its process, unless it `outlives_forks`.
    """

    def __init__(self, *, outlives_forks: bool = False) -> None:
        self.orderly = self.forked = False
        self.kind: type[NbelasticError] = CollectiveError
        self._reasons: list[str] = []
        self._wakeups: list[Wakeup[bool]] = []
        self._callbacks: list[Callable[[str, bool], object]] = []
        if not outlives_forks:
            _all.add(self)

    @property
    def reason(self) -> str | None:
        """The first reason that was given, or None."""
        return self._reasons[0] if self._reasons else None

    def abort(
        self, reason: str, *, orderly: bool = False, kind: type[CollectiveError] = CollectiveError
    ) -> None:
        """Break the communicator and wake all waiting threads. Returns at once."""
        if self._reasons:  # two threads may both pass: the first reason counts
            return
        self.orderly, self.kind = orderly, kind  # before the reason, which `check` reads first
        # The reason first, then the wakeups; a listener adds its wakeup first, then reads the
        # reason. So one of the two sees the other, and no abort is missed.
        self._reasons.append(reason)
        for wakeup in list(self._wakeups):
            wakeup.put(False)
        for callback in list(self._callbacks):  # after the wakeups: waiting threads come first
            callback(reason, orderly)

    def on_abort(self, callback: Callable[[str, bool], object]) -> None:
        """Call ``callback(reason, orderly)`` on an abort; at once after an abort.

        The aborting thread calls it, possibly twice. It must not block.
        """
        self._callbacks.append(callback)
        if self._reasons:  # added before this look, else an abort between would be missed
            callback(self._reasons[0], self.orderly)

    def check(self) -> None:
        """Raise if the communicator is broken."""
        if self._reasons:
            raise self.kind(self._reasons[0])

    @contextlib.contextmanager
    def listen(self) -> Iterator[Wakeup[bool]]:
        """Return a queue that receives False on an abort, for the length of a ``with`` block.

        After an abort it holds False from the beginning of the block.
        """
        wakeup: Wakeup[bool] = SimpleQueue()
        self._wakeups.append(wakeup)
        try:
            if self._reasons:
                wakeup.put(False)
            yield wakeup
        finally:
            self._wakeups.remove(wakeup)


_all: weakref.WeakSet[AbortSignal] = weakref.WeakSet()


def _abort_all_in_fork() -> None:
    """Abort every communicator in a fork, without waking or calling anything.

    A fork has none of the threads that its parent's communicators need, and shares their
    connections. So every operation raises NotTheRank there, and closing does nothing.
    """
    for each in _all:
        each.forked, each.orderly, each.kind = True, True, NotTheRank
        each._wakeups, each._callbacks = [], []  # callbacks would act on the parent's sockets
        each._reasons = [
            f"this process was forked from a rank (process {os.getppid()}), to which the "
            "communicator belongs; call collective operations in the rank's own process"
        ]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abort_all_in_fork)
