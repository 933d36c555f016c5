"""Leave machines that say they will go, and retire their workers before they do.

Runs in the scheduler, in its event loop. One agent of each host watches for notices of the host,
and each agent for the end of its own batch job, while there is a job that wants it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from nbelastic.cluster.wire import NoticeReport, WatchOrder
from nbelastic.membership import NoticeGiven

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from distributed import Scheduler

    from .plugin import ElasticPlugin
    from .records import JobRecord, WorkerRecord

__all__ = ["NoticeDesk"]

MARGIN = 10.0
"""Seconds before the end of a machine at which its workers are retired, with ranks or without."""

POLL = 0.05


class NoticeDesk:
    """Takes notices from agents, and appoints the agents that watch for them.

    Parameters
    ----------
    plugin : ElasticPlugin
        The plugin.
    scheduler : distributed.Scheduler
        The scheduler.
    jobs, workers : mapping
        The plugin's records.
    retire : coroutine function
        ``retire(addresses)`` retires workers at once.
    """

    def __init__(
        self,
        plugin: ElasticPlugin,
        scheduler: Scheduler,
        jobs: Mapping[str, JobRecord],
        workers: Mapping[str, WorkerRecord],
        retire: Callable[[list[str]], Awaitable[None]],
    ) -> None:
        self._plugin = plugin
        self._scheduler = scheduler
        self._jobs = jobs
        self._workers = workers
        self._retire_now = retire
        self._hosts: dict[str, tuple[NoticeReport, float]] = {}

    @property
    def going(self) -> int:
        """How many workers are there that will go, by a notice."""
        return sum(worker.deadline is not None for worker in self._workers.values())

    def review(self) -> None:
        """Have one agent of each host watch for its notices: the lowest address, if there is none.

        Without a job that wants it no agent watches.
        """
        on = any(job.notices for job in self._jobs.values())
        hosts: dict[str, WorkerRecord] = {}
        for worker in self._workers.values():
            other = hosts.setdefault(worker.slot.host, worker)
            if (not worker.watch.host, worker.address) < (not other.watch.host, other.address):
                hosts[worker.slot.host] = worker
        for worker in self._workers.values():
            order = WatchOrder(on, on and hosts[worker.slot.host] is worker)
            if order != worker.watch:
                worker.watch = order
                self._plugin.tell_agent(worker, order)

    def take(self, worker: WorkerRecord, report: NoticeReport) -> None:
        """Have ranks leave the workers that a notice is about, or stay if it is revoked."""
        host = worker.slot.host
        deadline = self._now + max(report.seconds, 0.0)
        if report.host and report.revoked:
            self._hosts.pop(host, None)
        elif report.host:
            self._hosts[host] = report, deadline
        concerned = [
            each
            for each in self._workers.values()
            if each is worker or (report.host and each.slot.host == host)
        ]
        if report.revoked:
            self._stay(concerned)
        else:
            self._leave(concerned, report, deadline)

    def arrived(self, worker: WorkerRecord) -> None:
        """Note a new worker: its host may be about to go."""
        report, deadline = self._hosts.get(worker.slot.host, (None, 0.0))
        if report is not None and self._now < deadline:
            self._leave([worker], report, deadline)
        else:
            self._hosts.pop(worker.slot.host, None)

    def _leave(
        self, workers: Iterable[WorkerRecord], report: NoticeReport, deadline: float
    ) -> None:
        fresh = [worker for worker in workers if not worker.leaving]
        for worker in fresh:
            worker.deadline = deadline
            left = deadline - self._now
            notice = NoticeGiven(worker.slot.name, report.source, report.action, left)
            self._plugin.mark_leaving(worker.address, notice=notice)
        if fresh:
            self._plugin.spawn(self._retire(fresh, deadline))

    def _stay(self, workers: Iterable[WorkerRecord]) -> None:
        for worker in workers:
            if worker.deadline is not None:
                worker.deadline = None
                self._plugin.mark_staying(worker.address)

    async def _retire(self, workers: list[WorkerRecord], deadline: float) -> None:
        """Retire workers when their ranks have left, so that cluster managers replace them."""
        while self._now < deadline - MARGIN and any(_holds(worker) for worker in workers):
            await asyncio.sleep(POLL)
        known = self._scheduler.workers
        going = [each.address for each in workers if each.deadline is not None]
        going = [address for address in going if address in known]
        if going:
            await self._retire_now(going)

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _holds(worker: WorkerRecord) -> bool:
    """Return whether a worker that will go has a rank."""
    return worker.deadline is not None and worker.holder is not None
