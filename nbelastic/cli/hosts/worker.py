"""Workers for the slots of a host: nannies, started here or over ssh."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import json
import shlex
import socket
from collections.abc import Callable, Mapping
from typing import Any

import dask.config
import psutil
from dask.system import CPU_COUNT
from distributed import Nanny, Status
from distributed.deploy.ssh import Process
from distributed.system import MEMORY_LIMIT

from nbelastic.cluster import NO_PAGES
from nbelastic.driver.attachment import LOOPBACK_HTTP

from .discovery import delay

START_WITHIN_S = 60.0  # seconds for a host to accept the connection, and for its worker to start
CLOSE_WITHIN_S = 5.0  # seconds for a connection to close
DEATH_TIMEOUT = "60s"  # time after which a worker that cannot reach its scheduler ends
KEEPALIVE_S = 10  # of silence before a host is asked; after three, it is gone
CONFIG = "DASK_INTERNAL_INHERIT_CONFIG"
# From stdin, because in a command every user of the host could read the configuration.
READ_CONFIG = f'IFS= read -r {CONFIG} && export {CONFIG} && exec "$@"'
RETRY_S = 0.5  # half of the delay before a worker is started again for the first time


@functools.cache
def is_local(host: str) -> bool:
    """Return whether a host is this machine: by its name, or by an address of its network."""
    if host in ("localhost", socket.gethostname(), socket.getfqdn()):
        return True
    try:
        addresses = {str(each[4][0]) for each in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    own = {
        str(ipaddress.ip_address(each.address.partition("%")[0]))
        for found in psutil.net_if_addrs().values()
        for each in found
        if each.family in (socket.AF_INET, socket.AF_INET6)
    }
    return bool(addresses & own)


class SlotNanny(Nanny):
    """A nanny whose worker has its share of the cores and memory of a host with so many slots."""

    def __init__(self, *args: Any, slots: int = 1, **options: Any) -> None:
        options.setdefault("nthreads", max(CPU_COUNT // slots, 1))
        options.setdefault("memory_limit", MEMORY_LIMIT // slots)
        options.setdefault("dashboard_address", LOOPBACK_HTTP)
        options.setdefault("config", NO_PAGES)
        super().__init__(*args, dashboard=False, **options)


class SshWorker(Process):
    """A worker that is started over ssh, and ends with the connection.

    Starting takes seconds, and a host may not answer at all. So :meth:`start` returns at once, and
    a task of the event loop connects and reads the worker's log. If the worker ends by itself, the
    task starts it again, after a delay that doubles while it does not start.
    """

    def __init__(
        self,
        scheduler: str,
        *,
        host: str,  # ``NAME`` or ``USER@NAME``
        slots: int,  # of the host
        connect: Mapping[str, Any],  # arguments of asyncssh's connect(), besides its host's
        python: str,  # there
        configuration: Mapping[str, Any],  # Dask's, there
        tell: Callable[[str], None],  # shows a line to the user
        name: str,
    ) -> None:
        super().__init__()
        self.name = name
        self._tell = tell
        user, _, host = host.rpartition("@")
        waits = {"login_timeout": START_WITHIN_S, "keepalive_interval": KEEPALIVE_S}
        self._connect = {"host": host, **({"username": user} if user else {}), **waits, **connect}
        options = {"name": name, "slots": slots, "death_timeout": DEATH_TIMEOUT}
        spec = {"cls": f"{SlotNanny.__module__}.{SlotNanny.__name__}", "opts": options}
        words = ["sh", "-c", READ_CONFIG, "sh", python, "-m", "distributed.cli.dask_spec"]
        self._command = shlex.join([*words, scheduler, "--spec", json.dumps(spec)])
        self._configuration = dask.config.serialize(configuration)
        self._task: asyncio.Task[None] | None = None
        self._last = ""  # line of the worker's log

    async def start(self) -> None:
        self.status = Status.running
        self._task = asyncio.create_task(self._run(), name=f"nbelastic-ssh-{self.name}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._disconnect()
        await super().close()

    async def _disconnect(self) -> None:
        if self.proc is not None:
            with contextlib.suppress(Exception):  # whatever ssh raises: the connection is closed
                self.proc.kill()
        if self.connection is not None:
            self.connection.close()
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self.connection.wait_closed(), CLOSE_WITHIN_S)
        self.proc = self.connection = None

    async def _run(self) -> None:
        failures = 0
        while True:
            problem, started = await self._run_once()
            failures = 1 if started else failures + 1
            seconds = delay(RETRY_S, failures)
            if failures.bit_count() == 1:  # the 1st, 2nd, 4th, 8th time
                self._tell(f"{self.name}: {problem}; trying again in {seconds:g} s")
            await asyncio.sleep(seconds)

    async def _run_once(self) -> tuple[str, bool]:
        """Run the worker to its end; return the reason, and whether it had started."""
        started = False
        self._last = ""
        try:
            await asyncio.wait_for(self._start_worker(), START_WITHIN_S)
            started = True
            while await self._line():  # because a full pipe would block the worker
                pass
            problem = self._last_words("its worker has ended")
        except (asyncio.TimeoutError, TimeoutError):
            problem = self._last_words(f"no worker has started within {START_WITHIN_S:g} s")
        except Exception as error:  # asyncssh's, the system's, or a worker that cannot start
            problem = str(error) or type(error).__name__
        await self._disconnect()
        return problem, started

    async def _start_worker(self) -> None:
        import asyncssh

        self.connection = await asyncssh.connect(**self._connect)
        self.proc = await self.connection.create_process(
            self._command,
            encoding="utf-8",
            errors="replace",
            stdout=asyncssh.DEVNULL,  # what is not read would stop the log, too, and the worker
        )
        self.proc.stdin.write(f"{self._configuration}\n")
        while line := await self._line():
            if "worker at" in line:
                return
        raise RuntimeError(self._last_words("its worker could not be started"))

    async def _line(self) -> str:
        """Return the next line of the worker's log; empty at its end."""
        log: Any = self.proc
        line: str = await log.stderr.readline()
        self._last = line.strip() or self._last
        return line

    def _last_words(self, problem: str) -> str:
        return f"{problem}: {self._last}" if self._last else problem
