"""Virtual time: the event loops and threads of many processes, run by one real thread.

A :class:`Hub` holds everything that is to happen, in the order of virtual time. Each simulated
process is an event loop of its own (asyncio's tasks, sleeps and events work on it), so it can be
stopped, continued, slowed and killed by itself. Its threads are greenlets, which block by switching
back to the hub.
"""

from __future__ import annotations

import asyncio
import heapq
import queue
import random
from asyncio import events
from collections import deque
from collections.abc import Callable
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet


class Stuck(AssertionError):
    """Nothing will ever happen again, and something is still waited for."""


class Hub:
    """All that is to happen."""

    def __init__(self, random: random.Random) -> None:
        self.random = random
        self.now = 0.0
        self.current: Fiber | None = None
        self.errors: list[str] = []
        self.trace: list[str] | None = None
        self.steps = 0
        self._greenlet = getcurrent()
        self._queue: list[tuple[float, int, asyncio.Handle]] = []
        self._number = 0

    def say(self, who: str, what: str) -> None:
        """Write a line into the trace. Guard calls with ``if hub.trace is not None``."""
        if self.trace is not None:
            self.trace.append(f"{self.now:10.4f}  {who:<14} {what}")

    def require(self, condition: object, message: str) -> None:
        """Note a broken invariant; the run ends with it, wherever it was found."""
        if not condition:
            self.say("BROKEN", message)
            self.errors.append(message)

    def push(self, when: float, handle: asyncio.Handle) -> None:
        self._number += 1
        heapq.heappush(self._queue, (when, self._number, handle))

    def run(self, done: Callable[[], bool], limit: float) -> bool:
        """Let things happen until ``done()`` or the time is up; return whether it is done."""
        queue = self._queue
        while not done():
            if self.errors:
                raise AssertionError(self.errors[0])
            if not queue:
                raise Stuck(f"nothing will happen any more, at {self.now:.3f}")
            when, number, handle = heapq.heappop(queue)
            if when > limit:
                heapq.heappush(queue, (when, number, handle))
                self.now = limit
                return False
            if handle._cancelled:
                continue
            self.now = max(self.now, when)
            process: Process = handle._loop  # type: ignore[attr-defined]
            process.run(handle)
            self.steps += 1
        return True

    def switch(self) -> None:
        """Go back to the hub; called by a fiber."""
        self._greenlet.switch()


class Process(asyncio.AbstractEventLoop):
    """A process: an event loop, the fibers that are its threads, and whether it runs at all."""

    def __init__(self, hub: Hub, name: str, host: str) -> None:
        self.hub, self.name, self.host = hub, name, host
        self.alive = True
        self.frozen = False
        self.fibers: set[Fiber] = set()
        self.owner: Any = None
        self.mourners: list[Callable[[], None]] = []
        self._backlog: deque[asyncio.Handle] = deque()
        self._tasks: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return f"<{self.name}>"

    # -- what faults do -----------------------------------------------------------------------

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        """Go on: first with all that has come in meanwhile, in its order."""
        self.frozen = False
        backlog, self._backlog = self._backlog, deque()
        for handle in backlog:
            self.hub.push(self.hub.now, handle)

    def kill(self) -> None:
        """End now, wherever it is. Nothing of it is ever run again, but for its own unwinding."""
        if not self.alive:
            return
        self.alive = False
        mourners, self.mourners = self.mourners, []
        for mourn in mourners:
            mourn()
        for fiber in list(self.fibers):
            fiber.unwind()
        for task in list(self._tasks):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            task.get_coro().close()  # type: ignore[union-attr]
        self._tasks.clear()
        self._backlog.clear()

    # -- running ------------------------------------------------------------------------------

    def run(self, handle: asyncio.Handle) -> None:
        if not self.alive:
            return
        if self.frozen:
            self._backlog.append(handle)
            return
        events._set_running_loop(self)
        try:
            handle._run()
        finally:
            events._set_running_loop(None)

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self.hub.push(self.hub.now, handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self.hub.push(self.hub.now + delay, handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.Handle:
        return self.call_later(max(when - self.hub.now, 0.0), callback, *args, context=context)

    def add_callback(self, callback: Any, *args: Any, **kwargs: Any) -> None:
        """Tornado's name for :meth:`call_soon`."""
        self.call_soon(lambda: callback(*args, **kwargs))

    def time(self) -> float:
        return self.hub.now

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, **kwargs)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return not self.alive

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if self.alive and error is not None:
            self.hub.errors.append(f"in {self.name}: {error!r} ({context.get('message')})")


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
