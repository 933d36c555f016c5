"""A kernel's Dask client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from .loop import Process
from .network import Pipe
from .remote import ONCE_MORE, Remote, block_on

if TYPE_CHECKING:
    from .fibers import Fiber
    from .world import World

__all__ = ["SimClient"]


class SimFuture:
    """A client's future of a task."""

    def __init__(self, client: Any, key: str) -> None:
        self.client, self.key, self.status = client, key, "pending"
        self._waiting: list[Fiber] = []

    def settle(self, status: str) -> None:
        self.status = status
        for fiber in self._waiting:
            fiber.wake()

    def release(self) -> None:
        self.client.futures.pop(self.key, None)
        if self.status != "cancelled":
            self.status = "cancelled"
            self.client.send({"op": "client-releases-keys", "keys": [self.key]})

    def exception(self, timeout: float | None = None) -> None:
        fiber = self.client.process.hub.current
        if self.status == "pending":
            self._waiting.append(fiber)
            if not fiber.park(timeout):
                raise TimeoutError


class SimClient:
    """A kernel's client."""

    def __init__(self, world: World, name: str) -> None:
        self.id, self.status = f"Client-{name}", "running"
        self.process = self.loop = Process(world.hub, name, "K")
        scheduler = world.scheduler
        self.scheduler = Remote(world.network, self.process, scheduler)
        self.inbound = Pipe(world.network, scheduler.process, self.process, self._receive)
        self._outbound = Pipe(
            world.network,
            self.process,
            scheduler.process,
            lambda message: scheduler.from_client(self.id, message),
        )
        self.futures: dict[str, SimFuture] = {}
        self._event_handlers: dict[str, Any] = {}
        scheduler.add_client(self)
        self.process.mourners.append(
            lambda: world.network.post(
                self.process, scheduler.process, lambda: scheduler.remove_client(self.id)
            )
        )

    def _receive(self, message: dict[str, Any]) -> None:
        if message["op"] == "event":
            handler = self._event_handlers.get(message["topic"])
            if handler is not None:
                handler(message["event"])
        elif message["op"] == "key-in-memory" and message["key"] in self.futures:
            self.futures[message["key"]].settle("finished")

    def send(self, message: dict[str, Any]) -> None:
        self._outbound.send(message, again=message["op"] in ONCE_MORE)

    _send_to_scheduler = send

    def sync(self, function: Any, *args: Any, callback_timeout: Any = None, **kwargs: Any) -> Any:
        async def call() -> Any:
            return await asyncio.wait_for(function(*args, **kwargs), callback_timeout)

        return block_on(self.process, call)

    def register_plugin(self, plugin: Any) -> None:
        self.sync(self.scheduler.register_plugin, plugin=plugin)

    def subscribe_topic(self, topic: str, handler: Any) -> None:
        self._event_handlers[topic] = handler

    def unsubscribe_topic(self, topic: str) -> None:
        self._event_handlers.pop(topic, None)

    def submit(self, function: Any, *args: Any, key: str, workers: Any, **_: Any) -> SimFuture:
        future = self.futures[key] = SimFuture(self, key)
        self.send(
            {
                "op": "submit",
                "key": key,
                "address": workers[0],
                "call": lambda: function(*args),
            }
        )
        return future
