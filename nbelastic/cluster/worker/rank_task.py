"""The Dask task of a rank: it lasts as long as the rank's process.

Runs in a worker, in a thread that has left the worker's pool. So Dask sees the worker as busy, and
the pool's own threads are free for other tasks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from distributed import get_worker, secede
from distributed.utils import sync

from nbelastic.cluster.wire import PLUGIN

if TYPE_CHECKING:
    from nbelastic.elastic.ranks.runtime import RankSpec

    from .agent import Agent


def run_rank(spec: RankSpec, slot: str, address: str) -> None:
    """Make the worker's agent run a rank, and wait for its end.

    The `address` is the scheduler's of the worker. A task that Dask sends again, to another worker
    at that address, finds another id there than its `slot` and does nothing.
    """
    worker = get_worker()
    agent = cast("Agent | None", worker.plugins.get(PLUGIN))
    if agent is not None and worker.id == slot:
        secede()
        sync(worker.loop, agent.run, spec, address)
