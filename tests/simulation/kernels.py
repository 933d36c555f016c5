"""The kernels of a schedule: one that starts the job, and those that take it over."""

from __future__ import annotations

import asyncio
import pickle
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from nbelastic.cluster import JobClient, pack_function
from nbelastic.driver.fit import terms_of
from nbelastic.driver.options import Options
from nbelastic.driver.thread import Driver
from nbelastic.errors import ClusterLost, Detached, OptionError
from nbelastic.messages import AttachRefusal

from .client import SimClient
from .fibers import Fiber, Inbox

if TYPE_CHECKING:
    from .loop import Process
    from .world import World

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
