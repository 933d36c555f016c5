"""What ``cluster=`` may be, and how to come to a client from it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import dask
from distributed import Client, LocalCluster, Status

from nbelastic.cluster import check_scheduler
from nbelastic.errors import ClusterLost, OptionError

from . import display

if TYPE_CHECKING:
    from collections.abc import Callable

    from .options import Options

__all__ = ["attach_client"]


def attach_client(cluster: Any, options: Options) -> tuple[Client, Callable[[], None]]:
    """Return a connected client and a function that closes whatever was opened for it.

    Parameters
    ----------
    cluster : Client, Cluster, str or None
        As :func:`nbelastic.fit` takes it.
    options : Options
        For the size of an embedded cluster.
    """
    if cluster is None:
        return _embedded(options)
    if isinstance(cluster, Client):
        if cluster.asynchronous:
            raise OptionError("cluster: this client is asynchronous; pass a synchronous one")
        if cluster.status != "running":
            raise ClusterLost(f"cluster: the client is {cluster.status}, not running")
        return cluster, _nothing
    if isinstance(cluster, str) or hasattr(cluster, "scheduler_address"):
        return _connected(cluster)
    raise OptionError(
        f"cluster={cluster!r}: must be a Dask Client, a cluster, a scheduler's address, or None"
    )


def _connected(cluster: Any) -> tuple[Client, Callable[[], None]]:
    shown = repr(cluster)
    if not isinstance(cluster, str) and cluster.status in (Status.closed, Status.closing):
        raise ClusterLost(f"cluster={shown}: it has been closed")
    address = cluster if isinstance(cluster, str) else cluster.scheduler_address
    if isinstance(address, str):
        check_scheduler(address, getattr(cluster, "security", None), display.say)
    try:
        client = Client(cluster, set_as_default=False)
    except OSError as error:
        raise ClusterLost(f"cluster={shown}: no scheduler answers there ({error})") from error
    return client, client.close


def _embedded(options: Options) -> tuple[Client, Callable[[], None]]:
    workers = options.max_np or options.np or options.min_np or os.cpu_count() or 1
    # Nobody else has tasks there: its profiler (see cluster/profiler.py) need not begin at all.
    with dask.config.set({"distributed.worker.profile.enabled": False}):
        cluster = LocalCluster(n_workers=workers, dashboard_address=":0")
    client = Client(cluster, set_as_default=False)

    def close() -> None:
        client.close()
        cluster.close()

    return client, close


def _nothing() -> None:
    """Leave the client alone: it belongs to its user."""
