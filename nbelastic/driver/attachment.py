"""Dask client for the value of ``cluster=``."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable
from typing import Any

import dask
from dask.system import CPU_COUNT
from distributed import Client, LocalCluster, Security, Status
from distributed.system import MEMORY_LIMIT

from nbelastic.cluster import (
    NO_PAGES,
    ElasticPlugin,
    check_answers,
    check_scheduler,
    lost_while,
    publish,
    security_of,
)
from nbelastic.errors import ClusterLost, OptionError, summary_of

from . import display
from .options import Options, shown

# Where HTTP servers of own clusters listen, and not on all interfaces as by Dask's default: they
# show call stacks and logs without asking for proof.
LOOPBACK_HTTP = "127.0.0.1:0"


def attach_client(
    cluster: Any, options: Options | None = None
) -> tuple[Client, Callable[[], None]]:
    """Return a client for the value of ``cluster=``, and a function to close it if opened here.

    For None a cluster is started by `options`; without these it is refused.
    """
    if cluster is None and options is not None:
        return _embedded(options)
    if getattr(cluster, "asynchronous", False) is True:
        kind = "client" if isinstance(cluster, Client) else "cluster"
        raise OptionError(f"cluster: this {kind} is asynchronous; pass a synchronous one")
    if isinstance(cluster, Client):
        if cluster.status != "running":
            raise ClusterLost(f"cluster: the client is {cluster.status}, not running")
        with lost_while(cluster, "asking whether it answers"):
            check_answers(cluster, display.say)
        return cluster, lambda: None  # the client belongs to the user
    is_cluster = hasattr(cluster, "scheduler_address") and not isinstance(cluster, type)
    if is_cluster or isinstance(cluster, str):
        return _connected(cluster)
    raise OptionError(
        f"cluster={shown(cluster)}: must be a Dask Client, a cluster, or a scheduler's address"
    )


def _connected(cluster: Any) -> tuple[Client, Callable[[], None]]:
    place = shown(cluster)
    if not isinstance(cluster, str) and cluster.status in (Status.closed, Status.closing):
        raise ClusterLost(f"cluster={place}: it has been closed")
    address = cluster if isinstance(cluster, str) else cluster.scheduler_address
    security = None if isinstance(cluster, str) else getattr(cluster, "security", None)
    terms: dict[str, Any] = {}
    if isinstance(address, str):
        if security is None and (security := security_of(address)) is not None:
            terms["security"] = security
        check_scheduler(address, security, display.say)
    try:
        client = Client(cluster, set_as_default=False, **terms)
    except Exception as error:  # a protocol may not be installed, and raise anything
        raise ClusterLost(
            f"cluster={place}: no scheduler answers there ({summary_of(error)})"
        ) from error
    return client, client.close


def _embedded(options: Options) -> tuple[Client, Callable[[], None]]:
    workers = options.max_np or options.np or options.min_np or os.cpu_count() or 1
    # This cluster runs one job only, so Dask's profiler need not start.
    # The plugin is there from the start, so that an interrupt of the cell ends no worker.
    with dask.config.set({"distributed.worker.profile.enabled": False, **NO_PAGES}):
        security: Any = Security.temporary()
        cluster = LocalCluster(
            n_workers=0,
            threads_per_worker=math.ceil(CPU_COUNT / workers),
            memory_limit=MEMORY_LIMIT // workers,
            dashboard_address=LOOPBACK_HTTP,
            security=security,
            scheduler_kwargs={"plugins": (ElasticPlugin(),), "dashboard": False},
        )
        # LocalCluster's own argument for this would also turn on the workers' dashboards.
        cluster.new_spec["options"]["dashboard_address"] = LOOPBACK_HTTP
        try:
            cluster.scale(workers)
            cluster.sync(_wait_for_workers, cluster)
            client = Client(cluster, set_as_default=False)
        except BaseException:  # even after an interrupt no cluster is left
            cluster.close()
            raise
    withdraw = publish(cluster.scheduler_address, security)

    def close() -> None:
        withdraw()
        client.close()
        cluster.close()

    return client, close


async def _wait_for_workers(cluster: LocalCluster) -> None:
    async def start() -> None:
        await cluster

    await asyncio.shield(start())  # a cluster that is cancelled while it starts cannot be closed
