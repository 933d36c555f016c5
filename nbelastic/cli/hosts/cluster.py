"""A Dask cluster with a worker for each slot of the hosts of a source.

Runs in the command's process. The cluster's event loop starts and ends workers. A thread,
``nbelastic-hosts``, asks the source. That may take its time, so it is never asked in the event loop
or under a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import dask.config
from distributed import Scheduler, Security, SpecCluster, Status

from nbelastic.cluster import NO_PAGES, ElasticPlugin, configuration, publish
from nbelastic.driver.attachment import LOOPBACK_HTTP
from nbelastic.errors import summary_of
from nbelastic.render import count

from .discovery import DiscoveryFailed, Hosts, Source, checked, delay
from .worker import SlotNanny, SshOptions, SshWorker, is_local

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
        ssh: SshOptions | None = None,
        tell: Callable[[str], None] = lambda _: None,  # the thread and the event loop call it
        loopback: bool = False,  # all hosts are this machine for good: no other can connect
    ) -> None:
        self._source = source
        self._interval = interval
        self._ssh = ssh or SshOptions()
        self._tell = tell
        self._bind: dict[str, Any] = {"host": LOOPBACK} if loopback else {}
        self._hosts: Hosts = {}
        self._leaving: set[str] = set()
        self._problem = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="nbelastic-hosts", daemon=True)
        first = _asked(source)
        security: Any = Security.temporary()
        self._configuration = configuration(security)  # of workers on other hosts
        self._bind |= {"security": security, "protocol": "tls://"}
        options = {
            "dashboard_address": LOOPBACK_HTTP,
            "dashboard": False,
            "plugins": (ElasticPlugin(),),
            **self._bind,
        }
        scheduler = {"cls": Scheduler, "options": {"port": 0, **options}}
        with dask.config.set(NO_PAGES):
            super().__init__(
                workers={}, scheduler=scheduler, silence_logs=logging.ERROR, security=security
            )
        self._withdraw = publish(self.scheduler_address, security)
        self._take(first)
        self._thread.start()

    def close(self, timeout: float | None = None) -> Awaitable[None] | None:
        self._over.set()
        self._withdraw()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(JOIN_WITHIN_S)
        closing: Awaitable[None] | None = super().close(timeout)
        return closing

    # -- the thread ------------------------------------------------------------------------------

    def _follow(self) -> None:
        failures = 0
        while not self._over.wait(delay(self._interval, failures)):
            try:
                hosts = _asked(self._source)
            except DiscoveryFailed as error:
                failures += 1
                if failures == 1:
                    self._tell(f"host discovery failed, the hosts stay as they are: {error}")
                hosts = self._hosts
            else:
                if failures:
                    self._tell("host discovery works again")
                failures = 0
            if not self._over.is_set():
                self._take(hosts)

    def _take(self, hosts: Hosts) -> None:
        """Make the event loop bring the workers in line with the hosts."""
        self._hosts = dict(hosts)
        for host in hosts:
            is_local(host)  # asks the system, which may take its time, and remembers the answer
        loop: Any = self.loop
        future = asyncio.run_coroutine_threadsafe(self._bring_in_line(hosts), loop.asyncio_loop)
        future.add_done_callback(self._report)

    def _report(self, future: Future[None]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self._tell(f"the workers could not be brought in line with the hosts: {error!r}")

    # -- the event loop --------------------------------------------------------------------------

    async def _bring_in_line(self, hosts: Hosts) -> None:
        if self.status != Status.running:
            return
        wanted = [f"{host}:{slot}" for host in hosts for slot in range(hosts[host])]
        present = self.worker_spec.keys() - self._leaving
        gone = sorted(present.difference(wanted))
        come = [name for name in wanted if name not in present]
        self._announce(gone, come)
        if gone:
            self._leaving.update(gone)
            retiring = asyncio.ensure_future(self._retire(gone))
            self._futures.add(retiring)
            retiring.add_done_callback(self._futures.discard)
        come = [name for name in come if name not in self._leaving]
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

    def _announce(self, gone: list[str], come: list[str]) -> None:
        for host, slots in Counter(name.rpartition(":")[0] for name in gone).items():
            self._tell(f"host {host} is gone ({count(slots, 'slot')}): its ranks leave")
        if self.worker_spec or gone:  # not at the start
            for host, slots in Counter(name.rpartition(":")[0] for name in come).items():
                if not any(name.startswith(f"{host}:") for name in self._leaving):
                    self._tell(f"host {host} has come ({count(slots, 'slot')})")

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
            options = {"slots": slots, "silence_logs": logging.WARNING, **self._bind}
            return {"cls": SlotNanny, "options": options}
        options = {"host": host, "slots": slots, "options": self._ssh, "tell": self._tell}
        options["configuration"] = self._configuration
        return {"cls": SshWorker, "options": options}


def _asked(source: Source) -> Hosts:
    """Return the answer of a source; any error of a user's source is a failed discovery."""
    try:
        return checked(source())
    except DiscoveryFailed:
        raise
    except Exception as error:
        raise DiscoveryFailed(summary_of(error)) from error
