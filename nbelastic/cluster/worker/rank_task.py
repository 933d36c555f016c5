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
    """Have the worker's agent run a rank, and wait for its end.

    Parameters
    ----------
    spec : RankSpec
        The rank, without the address of its interface.
    slot : str
        Id of the worker that it was meant for. A task that Dask sends again, to a worker that has
        taken over the address, finds another id there and does nothing.
    address : str
        The worker's address, as the scheduler has it.
    """
    worker = get_worker()
    agent = cast("Agent | None", worker.plugins.get(PLUGIN))
    if agent is not None and worker.id == slot:
        secede()
        sync(worker.loop, agent.run, spec, address)
