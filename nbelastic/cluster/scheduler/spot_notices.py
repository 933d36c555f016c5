"""Retire workers before their machines go, for Dask without jobs.

:class:`SpotNotices` is made in the kernel and runs in the scheduler, in its event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed.diagnostics.plugin import SchedulerPlugin

from nbelastic.cluster.wire import PLUGIN

from .notices import STANDING
from .plugin import ElasticPlugin

if TYPE_CHECKING:
    from distributed import Scheduler


class SpotNotices(SchedulerPlugin):
    """Scheduler plugin that retires workers before their machines go; no job is needed.

    While it is registered, one worker of each host watches for notices: those of AWS, Google and
    Azure. Each worker watches for the end of its own SLURM or PBS job, SIGUSR1 and SIGUSR2. On a
    notice, the workers of the host are retired at once: Dask moves their data to other workers,
    and runs their tasks there. If the data has nowhere to go, that is tried again, after
    5 s and then each 10 s.

    A job of :func:`nbelastic.fit` needs no such plugin. With both, ranks leave at a commit first.

    Examples
    --------
    >>> client.register_plugin(nbelastic.SpotNotices())  # doctest: +SKIP
    >>> client.unregister_scheduler_plugin(nbelastic.SpotNotices.name)  # doctest: +SKIP
    """

    name = STANDING
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        """Watch machines by the plugin that jobs have, too."""
        await scheduler.register_scheduler_plugin(ElasticPlugin(), name=PLUGIN, idempotent=True)
        plugin = scheduler.plugins[PLUGIN]
        assert isinstance(plugin, ElasticPlugin)
        plugin.watch_machines()
