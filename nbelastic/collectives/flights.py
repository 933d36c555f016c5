"""Operations under way in Gloo: waiting for them so that an abort is heard.

A wait has two halves. For a moment, longer than most small operations take, the rank's thread waits
inside Gloo: nothing is faster, and only one thread needs the interpreter. If that was too short, it
asks Gloo for a callback and waits for a bell that both the callback and an abort ring.

The rank's thread must not be the one that drops the last reference to anything of Gloo's: that may
wait for operations that are stuck. Hence the *hands*, a lock that it holds wherever it has a
reference on its stack, and for a moment only; the keeper of the group takes it before it lets go.
What a handle holds, the keeper takes from it with :meth:`CollectiveFlight.strip`.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work

    from nbelastic.collectives.alarm import Alarm

__all__ = ["CollectiveFlight", "Flight", "LandedFlight", "OperationFailed", "first_sentence"]

_MOMENT = timedelta(milliseconds=2)


class OperationFailed(Exception):
    """What Gloo says of an operation that failed."""


class Flight(Protocol):
    """An operation under way."""

    def done(self) -> bool:
        """Return whether it has ended, well or not."""

    def failure(self) -> str | None:
        """Return what went wrong, if it has ended badly."""

    def wait(self, alarm: Alarm) -> bool:
        """Wait for its end, or for `alarm`; return whether it has succeeded.

        Raises
        ------
        OperationFailed
            It has failed.
        """

    def strip(self) -> object:
        """Take Gloo's side away. The caller has the hands."""


class LandedFlight:
    """An operation that needs nobody: there is nothing to move."""

    def done(self) -> bool:
        """Return True."""
        return True

    def failure(self) -> str | None:
        """Return None."""
        return None

    def wait(self, alarm: Alarm) -> bool:  # noqa: ARG002 - nothing to be woken from
        """Return True."""
        return True

    def strip(self) -> None:
        """Do nothing."""


class CollectiveFlight:
    """A collective under way.

    Parameters
    ----------
    work : Work
        Gloo's side of it.
    hands : threading.Lock
        See the module's docstring.
    """

    def __init__(self, work: Work, hands: threading.Lock) -> None:
        self._work: Work | None = work
        self._hands = hands

    def done(self) -> bool:
        """Return whether it has ended, well or not."""
        with self._hands:
            return self._work is None or self._work.is_completed()

    def failure(self) -> str | None:
        """Return what went wrong, if it has ended badly."""
        try:
            if self.done():
                self._finish()
        except OperationFailed as error:
            return str(error)
        return None

    def wait(self, alarm: Alarm) -> bool:
        """Wait for its end, or for `alarm`; return whether it has succeeded."""
        if self._wait_inside():
            return True
        with alarm.bell() as bell:
            with self._hands:
                if self._work is not None:
                    self._work.get_future().add_done_callback(lambda _: bell.put(True))
            if not bell.get():
                return False
        return self._finish()

    def strip(self) -> Work | None:
        """Take Gloo's side away. The caller has the hands."""
        work, self._work = self._work, None
        return work

    def _wait_inside(self) -> bool:
        """Wait for a moment; return whether it has succeeded in it."""
        with self._hands:
            if self._work is None:
                return False
            try:
                self._work.wait(_MOMENT)
                return True
            except RuntimeError:
                if not self._work.is_completed():
                    return False
        return self._finish()

    def _finish(self) -> bool:
        """Take the outcome of an operation that has ended."""
        with self._hands:
            if self._work is None:
                return False
            try:
                self._work.wait()
                return True
            except RuntimeError as error:
                raise OperationFailed(first_sentence(error)) from None


def first_sentence(error: BaseException) -> str:
    """Return what Gloo says without where in its source, and without its advice."""
    text = str(error).strip()
    if text.startswith("["):
        text = text.partition("] ")[2] or text
    return text.partition(". ")[0].partition("\n")[0]
