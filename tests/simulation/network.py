"""The network between processes: streams that keep their order, and calls that do not.

A message takes a while. A *cut* from one host to another holds up what is on its way, as TCP does,
until it is healed; what is on its way when a connection breaks is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from nbelastic.cluster.wire import unpack
from nbelastic.messages import Heartbeats, JournalStep, RankEvent

from .loop import Hub, Process

APART = 1e-9  # seconds between two messages of a stream: a difference that survives rounding


class Broken(OSError):
    """The connection is broken."""


class Network:
    """All connections: with a mean delay, and a chance that a message comes twice if it may."""

    def __init__(self, hub: Hub, slowness: float, again: float) -> None:
        self.hub, self.slowness, self.again = hub, slowness, again
        self.cuts: set[tuple[str, str]] = set()
        self._held: list[Callable[[], None]] = []

    def delay(self) -> float:
        chance = self.hub.random.random()
        stretched = 20.0 if chance > 0.97 else 2.0 * chance
        return self.slowness * (0.2 + stretched)

    def blocked(self, source: Process, target: Process) -> bool:
        return bool(self.cuts) and (source.host, target.host) in self.cuts

    def cut(self, source: str, target: str) -> None:
        self.cuts.add((source, target))

    def heal(self) -> None:
        """Undo all cuts; what was held up arrives."""
        self.cuts.clear()
        held, self._held = self._held, []
        for deliver in held:
            deliver()

    def hold(self, deliver: Callable[[], None]) -> None:
        self._held.append(deliver)

    def post(self, source: Process, target: Process, call: Callable[[], object]) -> None:
        """Have `call` run in `target`, some time."""
        target.call_later(self.delay(), self._arrive, source, target, call)

    def _arrive(self, source: Process, target: Process, call: Callable[[], object]) -> None:
        if self.blocked(source, target):
            self.hold(lambda: self.post(source, target, call))
        else:
            call()

    async def call(self, source, target, function, kwargs, line=None):
        """Call a coroutine function, or a function, in another process; return what it returns.

        What `line` lists is called when the connection breaks: then neither question nor answer
        arrive any more.
        """
        lines = [target.mourners] if line is None else [target.mourners, line]
        answer: asyncio.Future[Any] = source.create_future()
        torn: list[bool] = []

        def settle(*outcome: Any) -> None:
            if not answer.done():
                answer.set_result(outcome)

        def broken() -> None:
            torn.append(True)
            source.call_later(self.delay(), settle, None, Broken(f"{target.name} is gone"))

        async def work() -> None:
            result, failed = None, None
            try:
                result = function(**kwargs)
                result = await result if hasattr(result, "__await__") else result
            except Exception as error:  # goes back to the caller, as in Dask
                failed = error
            self.post(target, source, lambda: settle(result, failed))

        def ask() -> None:  # also where nobody waits for the answer any more
            if not torn:
                target.create_task(work())

        if not target.alive:
            broken()
        else:
            for each in lines:
                each.append(broken)
            self.post(source, target, ask)
        try:
            result, failed = await answer
        finally:
            for each in lines:
                if broken in each:
                    each.remove(broken)
        if failed is not None:
            raise failed
        return result


class Pipe:
    """One direction of a stream: messages arrive in their order, or not at all."""

    def __init__(self, network, source, target, receive) -> None:
        self.network, self.source, self.target = network, source, target
        self.closed = False
        self._receive = receive
        self._free = 0.0
        self._held: list[Any] = []

    def send(self, message: Any, *, again: bool = False) -> None:
        """Send; `again` says that it may arrive twice."""
        if self.closed or not self.source.alive:
            raise Broken("the stream is closed")
        hub = self.network.hub
        times = 1 + (again and hub.random.random() < self.network.again)
        for _ in range(times):
            self._free = max(self._free + APART, hub.now + self.network.delay())
            self.target.call_later(self._free - hub.now, self._arrive, message)

    def _arrive(self, message: Any) -> None:
        if self.closed:
            return
        if self._held or self.network.blocked(self.source, self.target):
            if not self._held:
                self.network.hold(self._release)
            self._held.append(message)
            return
        self._receive(message)

    def _release(self) -> None:
        if self.network.blocked(self.source, self.target):
            self.network.hold(self._release)
            return
        self.target.call_later(self.network.delay(), self._flush)

    def _flush(self) -> None:
        held, self._held = self._held, []
        for message in held:
            if not self.closed:
                self._receive(message)

    def close(self) -> None:
        """Break it: what is on its way is lost."""
        self.closed = True
        self._held.clear()


# -- calls, as Dask has them ----------------------------------------------------------------------

ONCE_MORE = RankEvent | Heartbeats | JournalStep
"""Messages to the scheduler that a faulty network may deliver twice."""


def may_come_twice(message: dict[str, Any]) -> bool:
    """Whether a faulty network may deliver a message of a stream twice."""
    if message["op"] in ("nbelastic-agent", "nbelastic-kernel"):
        return isinstance(unpack(message["message"]), ONCE_MORE)
    return message["op"] in ("nbelastic", "event")


def block_on(process: Process, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Have a coroutine run in the event loop of `process`, and block the calling fiber for it."""
    fiber = process.hub.current
    assert fiber is not None, "an event loop would block"
    outcome: list[Any] = []

    def finish(task: asyncio.Task[Any]) -> None:
        outcome.append(task)
        fiber.wake()

    process.call_soon(
        lambda: process.create_task(function(*args, **kwargs)).add_done_callback(finish)
    )
    while not outcome:
        fiber.park()
    return outcome[0].result()


class Remote:
    """Calls of the scheduler's handlers, from another process.

    Those that `line` lists are told when the connection breaks; while `cut` says that there is
    none, no call gets through.
    """

    def __init__(self, network, source, scheduler, line=None, cut=lambda: False) -> None:
        self._network, self._source, self._scheduler = network, source, scheduler
        self._line, self._cut = line, cut

    def __getattr__(self, name: str) -> Any:
        async def call(**kwargs: Any) -> Any:
            def handle(**kwargs: Any) -> Any:
                handler = self._scheduler.handlers.get(name)
                return None if handler is None else handler(**kwargs)  # Dask only logs a warning

            if self._cut():
                await asyncio.sleep(self._network.delay())
                raise Broken("there is no connection")
            target = self._scheduler.process
            return await self._network.call(self._source, target, handle, kwargs, self._line)

        return call
