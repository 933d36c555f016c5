"""Hook into retirement and adaptive scaling of a cluster.

Dask removes a retired worker although a task still runs on it, and sizes an adaptive cluster by
expected durations. There are no hooks, so two methods of the scheduler are wrapped: as handlers of
its clients, and as attributes for calls in its process (its HTTP API, and Dask Gateway's preload).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from nbelastic.membership import rules

if TYPE_CHECKING:
    from .plugin import ElasticPlugin

RETIRE_GRACE = 30.0  # seconds for a rank to reach its next commit, once it was told to leave
LONGEST_RETIREMENT = rules.LONGEST_STAY + rules.MARGIN  # in all

POLL = 0.01


class ScalingHooks:
    """Wraps the scheduler's ``retire_workers`` and ``adaptive_target``."""

    def __init__(self, plugin: ElasticPlugin) -> None:
        self._plugin = plugin
        self._scheduler = scheduler = plugin.scheduler
        self._retire: Callable[..., Awaitable[Any]] = scheduler.handlers["retire_workers"]
        self._target: Callable[..., int] = scheduler.handlers["adaptive_target"]
        for name in ("retire_workers", "adaptive_target"):
            scheduler.handlers[name] = getattr(self, name)
            setattr(scheduler, name, getattr(self, name))

    async def retire_workers(
        self, workers: list[str] | None = None, names: list[Any] | None = None, **kwargs: Any
    ) -> Any:
        """Make ranks leave at their next commit before their workers are retired."""
        if workers is None and names is None:
            chosen = {
                key: kwargs.pop(key)
                for key in ("memory_ratio", "n", "key", "minimum", "target", "attribute")
                if key in kwargs
            }
            chosen.pop("attribute", None)
            workers = self._scheduler.workers_to_close(**chosen)
        addresses = self._addresses(workers or (), names or ())
        ranks = [rank for address in addresses for rank in self._plugin.mark_leaving(address)]
        waited = since_told = 0.0
        while ranks and waited < LONGEST_RETIREMENT and since_told < RETIRE_GRACE:
            await asyncio.sleep(POLL)
            ranks = [rank for rank in ranks if self._plugin.holds(rank)]
            waited += POLL
            since_told += POLL if all(map(self._plugin.was_told, ranks)) else 0.0
        given = {"workers": workers} if names is None else {"names": names}
        return await self._retire(**kwargs, **given)

    def _addresses(self, workers: Iterable[Any], names: Iterable[Any]) -> list[str]:
        """Return the addresses of the workers that are meant.

        `SpecCluster.scale` gives names where Dask expects addresses: of workers, or of a batch job
        with which theirs begin. If these are all workers, the cluster is being closed.
        """
        given, named = {str(each) for each in workers}, {str(each) for each in names}
        states = list(self._scheduler.workers.items())
        meant = [each for each, state in states if each in given or str(state.name) in named]
        others = [(each, str(state.name)) for each, state in states if each not in meant]
        by_name = [each for each, name in others if _is_named(name, given)]
        return meant + by_name if len(by_name) < len(states) else meant

    async def retire(self, addresses: list[str]) -> None:
        """Retire workers at once, as an adaptive cluster does; their ranks were asked to leave."""
        await self._retire(workers=addresses, close_workers=True, remove=True)

    def adaptive_target(self, target_duration: float | None = None) -> int:
        """Return the target of an adaptive cluster, at least the demand of all jobs."""
        return max(self._target(target_duration=target_duration), self._plugin.demand())


def _is_named(name: str, given: set[str]) -> bool:
    """Return whether a worker's name, or its batch job's name, is given."""
    job, _, number = name.rpartition("-")
    return name in given or (number.isdecimal() and job in given)
