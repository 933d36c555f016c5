"""The kernels of a schedule and their Dask clients: one starts the job, others take it over."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from nbelastic.cluster import JobClient, pack_function
from nbelastic.driver.fit import terms_of
from nbelastic.driver.options import Options
from nbelastic.driver.thread import Driver
from nbelastic.errors import ClusterLost, Detached, OptionError
from nbelastic.messages import AttachRefusal

from .loop import Fiber, Inbox, Process
from .network import Pipe, Remote, block_on, may_come_twice

if TYPE_CHECKING:
    from .world import World

PATIENCE = 10.0  # seconds for which a client tries to connect again


class SimFuture:
    """A client's future of a task."""

    def __init__(self, client: Any, key: str) -> None:
        self.client, self.key, self._released = client, key, False

    def release(self) -> None:
        self.client.futures.pop(self.key, None)
        if not self._released and self.client.status != "closed":
            self.client.send({"op": "client-releases-keys", "keys": [self.key]})
        self._released = True


class SimClient:
    """A kernel's client.

    As Dask's, it notices a broken stream, keeps what it is to send, and connects again under the
    same id for some time; then it closes. The scheduler has parted with it meanwhile, or hears
    of the break only after that, and then parts with the new connection as well.
    """

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
        # Of a task's end, "key-in-memory", the job learns from its agent.

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


# -- kernels ---------------------------------------------------------------------------------------

UNREACHABLE = (OSError, asyncio.TimeoutError, TimeoutError, ClusterLost)
"""What Dask and the job_client raise where the scheduler does not answer."""


BOUND = 15.0  # half of the seconds within which a driver ends that has lost its cluster


class Kernels:
    """Who drives the job: the client and the driver of the newest kernel, and former ones."""

    def __init__(self, world: World, options: Options) -> None:
        self.world, self.options = world, options
        self.client = SimClient(world, "kernel")
        self.driver = self._make_driver(options)
        self.former: list[tuple[SimClient, Driver]] = []
        self.gone = False  # there is no job that a kernel could have
        self._number = 0
        self._epoch = 1

    def _make_driver(self, options: Options) -> Driver:
        hub = self.world.hub
        return Driver(
            "job",
            options,
            lambda: None,
            inbox=Inbox(hub),
            clock=lambda: hub.now,
            chance=hub.random.random,
        )

    @property
    def driving(self) -> bool:
        """Whether the kernel that drives the job is there, and has not lost it for good."""
        return self.client.process.alive and self.client.status != "closed"

    def has_ended(self) -> bool:
        """Whether the job is over, and its kernel knows."""
        if self.gone:
            return True
        future = self.driver.future  # of the newest driver, or of one that is being replaced
        detached = future.done() and isinstance(future.exception(), Detached)
        closed = self.client.status == "closed" and self.world.scheduler.process.alive
        return self.client.process.alive and not closed and future.done() and not detached

    # -- the first kernel ---------------------------------------------------------------------

    def start(self) -> None:
        Fiber(self.client.process, "driver", self._drive)

    def _drive(self) -> None:
        client, driver = self.client, self.driver
        job_client = JobClient(client, "job", driver.receive)  # type: ignore[arg-type]
        try:
            job_client.open(terms_of(pack_function(self.world.function, (), {})[0], self.options))
        except (*UNREACHABLE, OptionError) as error:  # its user sees that, and begins anew
            known = not isinstance(error, OptionError) or "already" in str(error)
            self.world.hub.require(known, f"not opened: {error!r}")
            job_client.close()
            job_client.give_up()
            self.world.later(2.0, lambda: self.kill(client))
            return
        driver.job_client = job_client
        driver.run()

    # -- further kernels ----------------------------------------------------------------------

    def kill(self, client: SimClient, again: float = 1.0) -> None:
        """End a kernel's process; another one comes after so many seconds."""
        if client.process.alive:
            client.process.kill()
            self.gave_up(client, again)

    def gave_up(self, client: SimClient, again: float = 2.0) -> None:
        """A kernel is gone, or has given its scheduler up: its user starts another one."""
        if client is self.client:
            self.world.later(again, self.attach)
            if client.process.alive:
                process, future = client.process, self.driver.future
                process.call_later(
                    BOUND, process.call_later, BOUND, self._require_end, process, future
                )

    def _require_end(self, process: Process, future: Future[Any]) -> None:
        """A driver that has lost its cluster says so."""
        self.world.hub.require(future.done(), f"the driver of {process.name} waits for a cluster")

    def attach(self) -> None:
        """Have another kernel take the job over."""
        if not self.world.scheduler.process.alive:
            self.gone = not self.client.process.alive
            return
        self._number += 1
        client = SimClient(self.world, f"kernel{self._number}")
        Fiber(client.process, "attach", lambda: self._attach(client))

    def _attach(self, client: SimClient) -> None:
        wanted = self.driving  # then another kernel may be about to open it, or to close it
        driver = self._make_driver(Options())
        job_client = JobClient(client, "job", driver.receive)  # type: ignore[arg-type]
        try:
            packed = job_client.attach()
        except UNREACHABLE:  # its user tries again
            job_client.give_up()
            self.world.later(1.0, self.attach)
            return
        if isinstance(packed, AttachRefusal):
            machine = self.world.machine
            roster = None if machine is None else machine.roster
            none = wanted or roster is None or roster.starts == 0 or roster.ended
            unknown = packed.problem in ("unknown", "ended") and none
            self.world.hub.require(unknown, f"not attached: {packed}")
            self.gone = not self.driving
            return
        driver.options = pickle.loads(packed.options)
        if packed.epoch > self._epoch:  # else another has attached since, and was told sooner
            self.former.append((self.client, self.driver))
            self.client, self.driver, self._epoch = client, driver, packed.epoch
        else:
            self.former.append((client, driver))
        driver.adopt(packed)
        driver.job_client = job_client
        driver.run()
