"""Give code in a rank Dask's functions for tasks.

A rank's process has no worker in it. So what a task gets from its worker, a rank gets from a client
of its own, which is made when it is first asked for.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import dask.config
import distributed
from distributed import Client

from nbelastic.cluster.dask_compat import key_of, value_of

if TYPE_CHECKING:
    from .channel import RankSetup

NO_WORKER = (
    "a rank is a process of its own, and has no access to its worker; get_client() returns "
    "a client of its cluster"
)


class RankClient:
    """The client of a rank."""

    def __init__(self, setup: RankSetup) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        self._client: Client | None = None

    def install(self) -> None:
        """Make Dask's functions for tasks use this client, wherever they are imported."""
        if self._setup.dask_config:
            with contextlib.suppress(Exception):  # a class that this process lacks
                dask.config.update(dask.config.config, pickle.loads(self._setup.dask_config))
        names = ("get_client", "get_worker", "secede", "rejoin", "worker_client")
        ours = {getattr(distributed, name): getattr(self, name) for name in names}
        for module_name, module in list(sys.modules.items()):
            if module_name.partition(".")[0] not in ("dask", "distributed"):
                continue
            for name in names:
                original = vars(module).get(name)
                with contextlib.suppress(TypeError):  # not hashable
                    if original in ours:
                        setattr(module, name, ours[original])

    def close(self) -> None:
        """Close the client, if any."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def fetch_partition(self, text: str) -> Any:
        """Return the partition of a Dask collection by its key, which is given as JSON. Any thread.

        LookupError: the scheduler has forgotten it. What computing it again raises is raised here.
        """
        return value_of(self.get_client(), key_of(text))

    # -- in place of Dask's ------------------------------------------------------------------------

    def get_client(
        self, address: str | None = None, timeout: Any = None, resolve_address: bool = True
    ) -> Client:
        """Return the client of this rank; that of another cluster if its `address` is given."""
        setup = self._setup
        if address is not None and address != setup.scheduler:
            return distributed.Client(address, timeout=timeout or "30s")
        with self._lock:
            if self._client is None:
                self._client = distributed.Client(
                    setup.scheduler,
                    timeout=timeout or "30s",
                    security=setup.security,
                    name="nbelastic-rank",
                    direct_to_workers=True,  # as a task's client: values don't pass the scheduler
                )
            return self._client

    def get_worker(self) -> NoReturn:
        """Refuse."""
        raise ValueError(NO_WORKER)

    def secede(self) -> None:
        """Do nothing: a rank is in no pool of threads."""

    def rejoin(self) -> None:
        """Do nothing: a rank is in no pool of threads."""

    @contextlib.contextmanager
    def worker_client(self, timeout: Any = None, separate_thread: bool = True) -> Iterator[Client]:
        """Return the client of this rank for a ``with`` block."""
        yield self.get_client(timeout=timeout)
