"""A Dask cluster with a worker for each slot of the hosts of a source.

Runs in the command's process. The cluster's event loop starts and ends workers. A thread,
``nbelastic-hosts``, asks the source. That may take its time, so it is never asked in the event loop
or under a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import dask.config
from distributed import Scheduler, Security, SpecCluster, Status

from nbelastic.cluster import NO_PAGES, ElasticPlugin, configuration, publish
from nbelastic.driver.attachment import LOOPBACK_HTTP
from nbelastic.render import count

from .discovery import DiscoveryFailed, Source, delay
from .worker import SlotNanny, SshWorker, is_local

JOIN_WITHIN_S = 2.0  # for the thread to end; a source may take longer, and is left alone
LOOPBACK = "127.0.0.1"


class HostCluster(SpecCluster):
    """A cluster with a worker for each ``host:slot`` of a source."""

    # A host that is gone is retired first: its ranks leave at the next commit, then workers end.

    def __init__(
        self,
        source: Source,
        *,
        interval: float = 1.0,  # seconds between two looks
        ssh: Mapping[str, Any] | None = None,  # arguments of asyncssh's connect()
        python: str = sys.executable,  # on other hosts
        tell: Callable[[str], None] = lambda _: None,  # the thread and the event loop call it
        loopback: bool = False,  # all hosts are this machine for good: no other can connect
    ) -> None:
        self._source = source
        self._interval = interval
        self._tell = tell
        self._leaving: set[str] = set()
        self._problem = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="nbelastic-hosts", daemon=True)
        self._hosts = source()
        security: Any = Security.temporary()
        bind: dict[str, Any] = {"security": security, "protocol": "tls://"}
        if loopback:
            bind["host"] = LOOPBACK
        self._here = {"silence_logs": logging.WARNING, **bind}
        self._there = {"connect": ssh or {}, "python": python, "tell": tell}
        self._there["configuration"] = configuration(security)
        options = {
            "port": 0,
            "dashboard_address": LOOPBACK_HTTP,
            "dashboard": False,
            "plugins": (ElasticPlugin(),),
            **bind,
        }
        with dask.config.set(NO_PAGES):
            super().__init__(
                workers={},
                scheduler={"cls": Scheduler, "options": options},
                silence_logs=logging.ERROR,
                security=security,
            )
        self._withdraw = publish(self.scheduler_address, security)
        self._update_workers()
        self._thread.start()

    def close(self, timeout: float | None = None) -> Awaitable[None] | None:
        self._over.set()
        self._withdraw()
        if self._thread.is_alive():
            self._thread.join(JOIN_WITHIN_S)
        closing: Awaitable[None] | None = super().close(timeout)
        return closing

    # -- the thread ------------------------------------------------------------------------------

    def _follow(self) -> None:
        failures = 0
        while not self._over.wait(delay(self._interval, failures)):
            try:
                self._hosts = self._source()
            except (DiscoveryFailed, OSError) as error:
                failures += 1
                if failures == 1:
                    self._tell(f"host discovery failed, the hosts stay as they are: {error}")
            else:
                if failures:
                    self._tell("host discovery works again")
                failures = 0
            if not self._over.is_set():
                self._update_workers()

    def _update_workers(self) -> None:
        """Make the event loop bring the workers in line with the hosts."""
        for host in self._hosts:
            is_local(host)  # asks the system, which may take its time, and remembers the answer
        loop: Any = self.loop
        bringing = asyncio.run_coroutine_threadsafe(self._bring_in_line(), loop.asyncio_loop)
        bringing.add_done_callback(self._report)

    def _report(self, brought: Future[None]) -> None:
        if not brought.cancelled() and (error := brought.exception()) is not None:
            self._tell(f"the workers could not be brought in line with the hosts: {error!r}")

    # -- the event loop --------------------------------------------------------------------------

    async def _bring_in_line(self) -> None:
        if self.status != Status.running:
            return
        wanted = [f"{host}:{slot}" for host, slots in self._hosts.items() for slot in range(slots)]
        gone = sorted(self.worker_spec.keys() - self._leaving - set(wanted))
        come = [name for name in wanted if name not in self.worker_spec]  # nor is leaving
        for host, slots in _slots_of(gone).items():
            self._tell(f"host {host} is gone ({count(slots, 'slot')}): its ranks leave")
        for host, slots in _slots_of(come).items():
            if self.worker_spec and host not in _slots_of(self._leaving):  # not at the start
                self._tell(f"host {host} has come ({count(slots, 'slot')})")
        if gone:
            self._leaving.update(gone)
            retiring = asyncio.ensure_future(self._retire(gone))
            self._futures.add(retiring)
            retiring.add_done_callback(self._futures.discard)
        for name in come:
            self.worker_spec[name] = self._spec(name.rpartition(":")[0])
        expected = self.worker_spec.keys() - self._leaving
        for name, worker in list(self.workers.items()):
            if name in expected and worker.status in (Status.closed, Status.failed):
                self.workers.pop(name, None)
                with contextlib.suppress(Exception):  # it has failed; what it left is closed
                    await worker.close()
        if expected - self.workers.keys():
            await self._correct()

    async def _retire(self, names: list[str]) -> None:
        """Ask ranks to leave at their next commit; then end their workers."""
        try:
            scheduler: Any = self.scheduler_comm
            await scheduler.retire_workers(names=names)
        except Exception as error:  # the workers end all the same
            self._tell(f"{', '.join(names)} could not be retired: {error}")
        for name in names:
            self.worker_spec.pop(name, None)
        await self._correct()
        self._leaving.difference_update(names)

    async def _correct(self) -> None:
        problem = ""
        try:
            await self._correct_state()
        except Exception as error:  # a nanny's; it is started again at the next look
            problem = f"a worker could not be started: {error}; trying again"
        if problem not in ("", self._problem):
            self._tell(problem)
        self._problem = problem

    def _spec(self, host: str) -> dict[str, Any]:
        slots = self._hosts.get(host, 1)
        if is_local(host):
            return {"cls": SlotNanny, "options": {"slots": slots, **self._here}}
        return {"cls": SshWorker, "options": {"host": host, "slots": slots, **self._there}}


def _slots_of(names: Iterable[str]) -> Counter[str]:
    """Return the slots by host of names of workers."""
    return Counter(name.rpartition(":")[0] for name in names)
