"""Threads of simulated processes: greenlets, which block by switching back to the hub."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from greenlet import GreenletExit, getcurrent, greenlet

if TYPE_CHECKING:
    from .loop import Hub, Process


class Fiber:
    """A thread of a process."""

    def __init__(self, process: Process, name: str, function: Callable[[], object]) -> None:
        self.process, self.name = process, name
        self.hub = process.hub
        self.done = False
        self._function = function
        self._greenlet = greenlet(self._main, parent=self.hub._greenlet)
        self._parked = False
        self._ticket = 0
        self._timed_out = False
        self._error: type[BaseException] | BaseException | None = None
        process.fibers.add(self)
        process.call_soon(self._resume)

    def _main(self) -> None:
        try:
            self._function()
        except GreenletExit:
            pass
        except BaseException as error:  # a thread of the tested code has failed
            if self.process.alive:
                self.hub.errors.append(f"thread {self.name}: {error!r}")
        finally:
            self.done = True
            self.process.fibers.discard(self)

    def _resume(self) -> None:
        if self.done:
            return
        before, self.hub.current = self.hub.current, self
        try:
            self._greenlet.switch()
        finally:
            self.hub.current = before

    def park(self, timeout: float | None = None) -> bool:
        """Block until woken; return False if the time was up first."""
        if not self.process.alive:
            raise GreenletExit
        assert self.hub.current is self
        self._ticket += 1
        self._parked, self._timed_out = True, False
        timer = None
        if timeout is not None:
            timer = self.process.call_later(timeout, self._time_out, self._ticket)
        self.hub.switch()
        if timer is not None:
            timer.cancel()
        if not self.process.alive:
            raise GreenletExit
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return not self._timed_out

    def sleep(self, seconds: float) -> None:
        self.park(seconds)

    def wake(self, delay: float = 0.0) -> None:
        if self._parked:
            self._parked = False
            self.process.call_later(delay, self._resume)

    def throw(self, error: type[BaseException] | BaseException) -> None:
        """Wake it with an exception."""
        if self._parked:
            self._error = error
            self.wake()

    def unthrow(self) -> None:
        self._error = None

    def _time_out(self, ticket: int) -> None:
        if self._parked and ticket == self._ticket:
            self._parked, self._timed_out = False, True
            self._resume()

    def unwind(self) -> None:
        """Have its ``finally`` blocks run; its process is dead, so nothing comes of them."""
        if self.done or self._greenlet is getcurrent():
            return
        before, self.hub.current = self.hub.current, self
        try:
            if self._greenlet:
                self._greenlet.throw(GreenletExit)
        finally:
            self.hub.current = before
            self.done = True
            self.process.fibers.discard(self)


class Condition:
    """A ``threading.Condition`` of fibers. Nobody is interrupted while it holds the lock."""

    def __init__(self, hub: Hub, hesitation: float = 0.0) -> None:
        self._hub, self._hesitation = hub, hesitation
        self._waiting: list[Fiber] = []
        self._held = False

    def __enter__(self) -> Condition:
        fiber = self._hub.current
        if fiber is not None and self._hesitation and self._hub.random.random() < self._hesitation:
            fiber.sleep(self._hub.random.random() * 0.002)
        assert not self._held, "a lock is held while its owner is suspended"
        self._held = True
        return self

    def __exit__(self, *_: object) -> None:
        self._held = False

    def wait(self, timeout: float | None = None) -> bool:
        fiber = self._hub.current
        assert fiber is not None, "an event loop would block"
        self._waiting.append(fiber)
        self._held = False
        try:
            return fiber.park(timeout)
        finally:
            self._held = True
            if fiber in self._waiting:
                self._waiting.remove(fiber)

    def notify_all(self) -> None:
        for fiber in self._waiting:
            fiber.wake()


class Inbox:
    """A ``queue.SimpleQueue`` that one fiber reads."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._items: deque[Any] = deque()
        self._reader: Fiber | None = None

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._reader is not None:
            self._reader.wake()

    def get(self, *, timeout: float) -> Any:
        fiber = self._hub.current
        if not self._items:
            self._reader = fiber
            try:  # even the shortest wait takes time
                fiber.park(max(timeout, 1e-6))
            finally:
                self._reader = None
        if not self._items:
            raise queue.Empty
        return self._items.popleft()
