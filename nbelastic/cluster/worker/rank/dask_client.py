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
from typing import TYPE_CHECKING, Any

import dask.config
import distributed
from distributed import Client

from nbelastic.cluster.dask_compat import key_of, value_of

if TYPE_CHECKING:
    from .channel import RankSetup


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
        for name in ("get_client", "secede", "rejoin", "worker_client"):
            original = getattr(distributed, name)
            for module_name, module in list(sys.modules.items()):
                theirs = module_name.partition(".")[0] in ("dask", "distributed")
                if theirs and vars(module).get(name) is original:
                    setattr(module, name, getattr(self, name))

    def close(self) -> None:
        """Close the client, if any."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def fetch_partition(self, text: str) -> Any:
        """Return the partition of a Dask collection by its key in JSON. Any thread."""
        return value_of(self.get_client(), key_of(text))

    # -- in place of Dask's ------------------------------------------------------------------------

    def get_client(
        self, address: str | None = None, timeout: Any = None, resolve_address: bool = True
    ) -> Client:
        """Return the client of this rank; that of another cluster if its `address` is given."""
        setup, timeout = self._setup, timeout or "30s"
        if address not in (None, setup.scheduler):
            return distributed.Client(address, timeout=timeout)
        with self._lock:
            if self._client is None:
                self._client = distributed.Client(
                    setup.scheduler,
                    timeout=timeout,
                    security=setup.security,
                    name="nbelastic-rank",
                    direct_to_workers=True,  # as a task's client: values don't pass the scheduler
                )
            return self._client

    def secede(self) -> None:
        """Do nothing: a rank is in no pool of threads."""

    rejoin = secede

    @contextlib.contextmanager
    def worker_client(self, timeout: Any = None, separate_thread: bool = True) -> Iterator[Client]:
        """Return the client of this rank for a ``with`` block."""
        yield self.get_client(timeout=timeout)
