"""What has to be waited for in order, one after the other: threads that sit and wait.

For sends and receives Gloo has neither callbacks nor a way to ask whether they are done: somebody
has to sit and wait. Messages of one direction between the same two ranks complete in order, so one
thread per direction, a lane, serves them all. The same goes for messages through shared memory, and
for work that a rank leaves to somebody else. A lane's thread is there while it has
messages: it ends by itself when there are none left, and begins anew with the next. The lane's lock
guards which of the two it is; it is held for a few instructions only.

When the group is severed, the message a lane sits over fails, and so do those behind it: the
keeper of the group joins the lanes before it lets go.
"""

from __future__ import annotations

import threading
from collections import deque
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from nbelastic.collectives.flights import OperationFailed, first_sentence

if TYPE_CHECKING:
    from nbelastic.collectives.alarm import Alarm

__all__ = ["Lane", "MessageFlight", "Waitable"]


class Waitable(Protocol):
    """What a lane sits over."""

    def wait(self, timeout: timedelta, /) -> object:
        """Wait for its end; raise ``RuntimeError`` if it is a bad one."""


class MessageFlight:
    """A message under way. The lane that sits over it lands it."""

    def __init__(self) -> None:
        self._landed = False
        self._error: str | None = None
        self._bells: list[SimpleQueue[bool]] = []

    def land(self, error: str | None) -> None:
        """Note the end, and wake who waits for it."""
        self._error = error
        self._landed = True
        for bell in list(self._bells):
            bell.put(True)

    def done(self) -> bool:
        """Return whether it has ended, well or not."""
        return self._landed

    def failure(self) -> str | None:
        """Return what went wrong, if it has ended badly."""
        return self._error

    def wait(self, alarm: Alarm) -> bool:
        """Wait for its end, or for `alarm`; return whether it has succeeded."""
        if not self._landed:
            with alarm.bell() as bell:
                self._bells.append(bell)
                if not self._landed and not bell.get():
                    return False
        if self._error is not None:
            raise OperationFailed(self._error)
        return True

    def strip(self) -> None:
        """Do nothing: the lane has what there is."""


class Lane:
    """The messages of one direction between this rank and another.

    Parameters
    ----------
    name : str
        For the thread.
    timeout_s : float
        How long a message may take, once those before it have ended.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout = timedelta(seconds=timeout_s)
        self._lock = threading.Lock()
        self._queue: deque[tuple[Waitable, MessageFlight]] = deque()
        self._thread: threading.Thread | None = None
        self._last: MessageFlight | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return self._last is None or self._last.done()

    def put(self, work: Waitable) -> MessageFlight:
        """Sit over a message that has just been begun."""
        self._last = flight = MessageFlight()
        with self._lock:
            self._queue.append((work, flight))
            if self._thread is None:
                self._thread = threading.Thread(target=self._sit, name=self._name, daemon=True)
                self._thread.start()
        return flight

    def join(self) -> None:
        """Wait until nothing is under way."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _sit(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    return
                work, flight = self._queue.popleft()
            try:
                work.wait(self._timeout)  # Gloo's own limit is that of forming
            except RuntimeError as error:
                flight.land(first_sentence(error))
            except Exception as error:  # a mistake of ours: whoever waits must hear of it
                flight.land(repr(error))
            else:
                flight.land(None)
            del work, flight
