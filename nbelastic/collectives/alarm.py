"""What ends a communicator's life: a reason, and a bell for everyone who waits.

An alarm is raised once, from any thread, and stays raised. It is made of nothing but a list, which
the interpreter appends to in one step, and of ``queue.SimpleQueue``, whose ``put`` never blocks.
Two properties follow on which the rest of this package rests:

- :meth:`Alarm.raise_` returns at once whatever other threads are doing, so an event loop may call
  it. There is no lock that a thread could hold, or could have left held when an exception was
  thrown into it from outside.
- Nobody misses it. A listener first hangs up its bell and then looks at the reason; who raises
  first sets the reason and then rings the bells. One of the two sees the other.

What must happen whoever listens (leave a meeting, break a segment) is told to the alarm beforehand.
Communicators that belong together share one alarm: what ends one of them ends all.
"""

from __future__ import annotations

import contextlib
from queue import SimpleQueue
from typing import TYPE_CHECKING

from nbelastic.errors import CollectiveError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Alarm", "Bell"]

# What rings says why: True for what the listener waits for, False for the alarm.
Bell = SimpleQueue


class Alarm:
    """Why a communicator is broken, once it is.

    Attributes
    ----------
    gentle : bool
        Whether it was closed in good order, with nothing under way.
    """

    def __init__(self) -> None:
        self.gentle = False
        self._reasons: list[str] = []
        self._bells: list[Bell[bool]] = []
        self._acts: list[Callable[[str, bool], object]] = []

    @property
    def reason(self) -> str | None:
        """What it was raised for; the first reason stays."""
        return self._reasons[0] if self._reasons else None

    def raise_(self, reason: str, *, gentle: bool = False) -> None:
        """Break the communicator and wake everyone who listens."""
        if self._reasons:
            return
        self.gentle = gentle
        self._reasons.append(reason)
        for bell in list(self._bells):
            bell.put(False)
        for act in list(self._acts):
            act(reason, gentle)

    def then(self, act: Callable[[str, bool], object]) -> None:
        """Have ``act(reason, gentle)`` done when it is raised; at once if it has been.

        It is done by the thread that raises the alarm, perhaps twice, and must not block.
        """
        self._acts.append(act)
        if self._reasons:
            act(self._reasons[0], self.gentle)

    def check(self) -> None:
        """Raise if the communicator is broken."""
        if self._reasons:
            raise CollectiveError(self._reasons[0])

    @contextlib.contextmanager
    def bell(self) -> Iterator[Bell[bool]]:
        """Hang up a bell for the length of a ``with`` block.

        If the alarm is raised already it has rung by the time the block begins.
        """
        bell: Bell[bool] = SimpleQueue()
        self._bells.append(bell)
        try:
            if self._reasons:
                bell.put(False)
            yield bell
        finally:
            self._bells.remove(bell)
