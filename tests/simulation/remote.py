"""Calls between processes, as Dask has them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbelastic.cluster.wire import unpack
from nbelastic.messages import Heartbeats, JournalStep, RankEvent

from .network import Broken, Network

if TYPE_CHECKING:
    from .dask import SimScheduler
    from .loop import Process

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

    def __init__(
        self,
        network: Network,
        source: Process,
        scheduler: SimScheduler,
        line: list[Callable[[], None]] | None = None,
        cut: Callable[[], bool] = lambda: False,
    ) -> None:
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
