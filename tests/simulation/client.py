"""A kernel's Dask client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .loop import Process
from .network import Pipe
from .remote import Remote, block_on, may_come_twice

if TYPE_CHECKING:
    from .fibers import Fiber
    from .world import World

PATIENCE = 10.0  # seconds for which a client tries to connect again


class SimFuture:
    """A client's future of a task."""

    def __init__(self, client: Any, key: str) -> None:
        self.client, self.key, self.status = client, key, "pending"
        self._released = False
        self._waiting: list[Fiber] = []

    def settle(self, status: str) -> None:
        self.status = status
        for fiber in self._waiting:
            fiber.wake()

    def release(self) -> None:
        self.client.futures.pop(self.key, None)
        if not self._released and self.client.status != "closed":
            self.client.send({"op": "client-releases-keys", "keys": [self.key]})
        self._released, self.status = True, "cancelled"

    def exception(self, timeout: float | None = None) -> None:
        fiber = self.client.process.hub.current
        if self.status == "pending":
            self._waiting.append(fiber)
            if not fiber.park(timeout):
                raise TimeoutError


class SimClient:
    """A kernel's client.

    As Dask's, it notices a broken stream, keeps what it is to send, and connects again under the
    same id for some time; then it closes. The scheduler has parted with it meanwhile, or hears
    of the break only after that, and then parts with the new connection as well.
    """

    cluster = None  # that it has started itself

    def __init__(self, world: World, name: str) -> None:
        self.id, self.status = f"Client-{name}", "running"
        self.world, self.network = world, world.network
        self.process = self.loop = Process(world.hub, name, "K")
        self._line: list[Callable[[], None]] = []
        self.scheduler = Remote(
            world.network,
            self.process,
            world.scheduler,
            self._line,
            lambda: self._torn or self.status == "connecting",
        )
        self.futures: dict[str, SimFuture] = {}
        self._event_handlers: dict[str, Any] = {}
        self._pending: list[dict[str, Any]] = []
        self._torn = False
        self._open()
        world.scheduler.add_client(self)
        self.process.mourners.append(self._vanish)
        world.scheduler.process.mourners.append(lambda: self.tear(1e6, None))

    def _open(self) -> None:
        """Make the two directions of a stream."""
        network, scheduler = self.network, self.world.scheduler
        self._torn = False
        self.inbound = Pipe(network, scheduler.process, self.process, self._receive)
        self._outbound = Pipe(
            network,
            self.process,
            scheduler.process,
            lambda message: scheduler.from_client(self.id, message),
        )

    # -- connections that break ---------------------------------------------------------------

    def _vanish(self) -> None:
        """The kernel is gone."""
        scheduler = self.world.scheduler
        self.network.post(self.process, scheduler.process, lambda: scheduler.remove_client(self.id))

    def tear(self, seconds: float, late: float | None = 0.0) -> None:
        """Break the connection; it can be made again after so many seconds.

        The scheduler notices after `late` seconds, or never.
        """
        if self._torn or self.status == "closed" or not self.process.alive:
            return
        self._torn = True
        self.inbound.close()
        self._outbound.close()
        line, self._line[:] = list(self._line), []
        for broken in line:
            broken()
        back = self.process.hub.now + seconds
        self.process.call_later(self.network.delay(), self._lost, back)
        if late is not None:
            scheduler = self.world.scheduler
            scheduler.loop.call_later(self.network.delay() + late, self._part, scheduler)

    def _part(self, scheduler: Any) -> None:
        """The scheduler parts with a client, whichever connection it has by now."""
        present = scheduler.knows(self.inbound)
        scheduler.remove_client(self.id)
        if present:
            self.tear(0.0, None)

    def _lost(self, back: float) -> None:
        if self.world.hub.trace is not None:
            self.world.hub.say(self.process.name, "has lost its scheduler")
        self.status = "connecting"
        for future in self.futures.values():
            future.settle("cancelled")
        self.futures.clear()
        wait = back - self.process.hub.now
        if wait > PATIENCE:
            self.process.call_later(PATIENCE, self._give_up)
        else:
            self.process.call_later(max(wait, 0.0) + self.network.delay(), self._connect)

    def _connect(self) -> None:
        scheduler = self.world.scheduler
        if not scheduler.process.alive:
            self._give_up()
            return
        self._open()
        inbound = self.inbound
        self.network.post(self.process, scheduler.process, lambda: self._register(inbound))
        self.process.call_later(PATIENCE, self._despair, inbound)

    def _register(self, inbound: Pipe) -> None:
        if self._present(inbound) and self.process.alive:
            scheduler = self.world.scheduler
            scheduler.add_client(self)
            self.network.post(scheduler.process, self.process, lambda: self._go_on(inbound))

    def _present(self, inbound: Pipe) -> bool:
        """Return whether a stream is the one that is to be had now."""
        return inbound is self.inbound and not self._torn and self.status != "closed"

    def _go_on(self, inbound: Pipe) -> None:
        if not self._present(inbound):
            return
        self.world.hub.say(self.process.name, "is connected again")
        self.status = "running"
        pending, self._pending = self._pending, []
        for message in pending:
            self.send(message)

    def _despair(self, inbound: Pipe) -> None:
        if self._present(inbound) and self.status == "connecting":
            self._give_up()

    def _give_up(self) -> None:
        self.world.hub.say(self.process.name, "gives its scheduler up")
        self.status = "closed"
        self.world.kernels.gave_up(self)

    # -- what Dask's does ---------------------------------------------------------------------

    def _receive(self, message: dict[str, Any]) -> None:
        if message["op"] == "event":
            handler = self._event_handlers.get(message["topic"])
            if handler is not None:
                handler(message["event"])
        elif message["op"] == "key-in-memory" and message["key"] in self.futures:
            self.futures[message["key"]].settle("finished")

    def send(self, message: dict[str, Any]) -> None:
        if self.status == "connecting":
            self._pending.append(message)
        elif self.status != "running":
            raise RuntimeError(f"the client is {self.status}")  # Dask's ClosedClientError
        elif not self._torn:  # else it is lost: nobody has noticed yet
            self._outbound.send(message, again=may_come_twice(message))

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
