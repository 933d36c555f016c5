"""Hook into retirement and adaptive scaling of a cluster.

Runs in the scheduler, in its event loop. Dask removes a retired worker within milliseconds although
a task still runs on it, and sizes an adaptive cluster by expected durations, which say nothing
about training. There are no hooks for either, so two methods of the scheduler are wrapped: as
handlers of its clients, and as attributes for those who call them in its process (its HTTP API,
which Dask's Kubernetes operator uses, and Dask Gateway's preload). The originals are called in
turn.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from distributed import Scheduler

    from .plugin import ElasticPlugin

__all__ = ["RETIRE_GRACE", "ScalingHooks"]

RETIRE_GRACE = 30.0
"""Seconds that a retiring worker gives its rank to reach its next commit."""

POLL = 0.01


class ScalingHooks:
    """Wraps the scheduler's ``retire_workers`` and ``adaptive_target``."""

    def __init__(self, plugin: ElasticPlugin, scheduler: Scheduler) -> None:
        self._plugin = plugin
        self._scheduler = scheduler
        self._retire: Callable[..., Awaitable[Any]] = scheduler.handlers["retire_workers"]
        self._target: Callable[..., int] = scheduler.handlers["adaptive_target"]
        for name in ("retire_workers", "adaptive_target"):
            scheduler.handlers[name] = getattr(self, name)
            setattr(scheduler, name, getattr(self, name))

    async def retire_workers(
        self, workers: list[str] | None = None, names: list[Any] | None = None, **kwargs: Any
    ) -> Any:
        """Let ranks leave at their next commit before their workers are retired."""
        if workers is None and names is None:
            chosen = {
                key: kwargs.pop(key)
                for key in ("memory_ratio", "n", "key", "minimum", "target", "attribute")
                if key in kwargs
            }
            chosen.pop("attribute", None)
            workers = self._scheduler.workers_to_close(**chosen)
        wanted = None if names is None else {str(name) for name in names}
        addresses = [
            address
            for address, state in list(self._scheduler.workers.items())
            if (workers is not None and address in workers)
            or (wanted is not None and str(state.name) in wanted)
        ]
        ranks = [rank for address in addresses for rank in self._plugin.mark_leaving(address)]
        waited = 0.0
        while any(self._plugin.holds(rank) for rank in ranks) and waited < RETIRE_GRACE:
            await asyncio.sleep(POLL)
            waited += POLL
        if names is not None:
            kwargs["names"] = names
        else:
            kwargs["workers"] = workers
        return await self._retire(**kwargs)

    async def retire(self, addresses: list[str]) -> None:
        """Retire workers at once, as an adaptive cluster does; their ranks were asked to leave."""
        await self._retire(workers=addresses, close_workers=True, remove=True)

    def adaptive_target(self, target_duration: float | None = None) -> int:
        """Return how many workers an adaptive cluster should have: also those that jobs want."""
        return max(self._target(target_duration=target_duration), self._plugin.demand())
