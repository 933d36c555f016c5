"""Calls between processes, as Dask has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

    from .dask import SimScheduler
    from .loop import Process
    from .network import Network

__all__ = ["ONCE_MORE", "Remote", "block_on"]

ONCE_MORE = {"nbelastic", "nbelastic-report", "nbelastic-beats", "nbelastic-step", "event"}
"""Messages that a faulty network may deliver twice."""


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
    """Calls of the scheduler's handlers, from another process."""

    def __init__(self, network: Network, source: Process, scheduler: SimScheduler) -> None:
        self._network, self._source, self._scheduler = network, source, scheduler

    def __getattr__(self, name: str) -> Any:
        async def call(**kwargs: Any) -> Any:
            def handle(**kwargs: Any) -> Any:
                return self._scheduler.handlers[name](**kwargs)

            return await self._network.call(self._source, self._scheduler.process, handle, kwargs)

        return call
