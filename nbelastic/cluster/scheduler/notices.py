"""Move ranks off machines with a termination notice, then retire their workers.

One agent of each host watches for notices of the host, and each agent for signals and the end of
its own batch job, while there is a job that wants it, or :class:`~.spot_notices.SpotNotices` is
registered.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from distributed.core import Status

from nbelastic.membership import rules
from nbelastic.messages import NoticeGiven, WatchOrder

from .records import NoticeRecord

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from distributed import Scheduler

    from nbelastic.messages import NoticeReport

    from .plugin import ElasticPlugin
    from .records import JobRecord, WorkerRecord

logger = logging.getLogger(__name__)

STANDING = "nbelastic-spot-notices"
"""Name of the scheduler plugin that has notices watched for without a job."""

MARGIN = rules.MARGIN
"""Seconds before the end of a machine at which its workers are retired, with ranks or without."""

LEAST = rules.SOON
"""Seconds that ranks have in any case, also if a machine should be gone already."""

MOST = 86400.0
"""Most seconds that a notice is taken to leave."""

SILENT = 3.0
"""Seconds without a heartbeat of a rank after which another worker of the host watches."""

POLL = 0.05

RETRY = 5.0
"""Seconds after which workers that could not be retired, because of their data, are tried again.

After the first time it is twice as long.
"""


class NoticeController:
    """Takes notices from agents, and appoints the agents that watch for them.

    ``await retire(addresses)`` retires workers at once.
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
        self._hosts: dict[str, NoticeRecord] = {}
        self._risks: dict[str, NoticeReport] = {}
        self._under_way: set[str] = set()

    @property
    def standing(self) -> bool:
        """Whether notices are watched for without a job."""
        return STANDING in getattr(self._scheduler, "plugins", ())

    @property
    def going(self) -> int:
        """How many workers are to be replaced, because of a notice."""
        workers = self._workers.values()
        at_risk = sum(
            w.risk is not None and w.holder is not None and not w.notices for w in workers
        )
        return at_risk + sum(bool(each.notices) for each in workers)

    # -- watchers ----------------------------------------------------------------------------------

    def review(self) -> None:
        """Appoint one agent of each host to watch for notices; retire replaced workers.

        That is the agent which does already, unless it is silent or closes; else the one with the
        lowest address. Without a job that wants it no agent watches.
        """
        on = self.standing or any(job.terms.notices for job in self._jobs.values())
        self._hosts = {h: each for h, each in self._hosts.items() if self._now < each.deadline}
        hosts: dict[str, WorkerRecord] = {}
        for worker in self._workers.values():
            other = hosts.setdefault(worker.slot.host, worker)
            if _fitness(worker) < _fitness(other):
                hosts[worker.slot.host] = worker
        for worker in self._workers.values():
            order = WatchOrder(on, on and hosts[worker.slot.host] is worker)
            if order != worker.watch:
                worker.watch = order
                self._plugin.tell_agent(worker, order)
        self._risks = {host: each for host, each in self._risks.items() if host in hosts}
        self._retire_replaced()

    # -- notices -----------------------------------------------------------------------------------

    def take(self, worker: WorkerRecord, report: NoticeReport) -> None:
        """Make ranks leave the workers that a notice is about, or stay if it is revoked."""
        if report.host and not worker.watch.host:
            return  # it has watched once: another one knows better
        host = worker.slot.host
        logger.info(
            "notice of %s, from %s: %s in %.0f s, for %s%s%s",
            report.source.value,
            worker.address,
            report.action or "end",
            report.seconds,
            f"all workers of {host}" if report.host else "it alone",
            ", soft" * report.soft,
            ", revoked" * report.revoked,
        )
        concerned = [
            each
            for each in self._workers.values()
            if each is worker or (report.host and each.slot.host == host)
        ]
        if report.soft:
            self._risks.pop(host, None)
            if not report.revoked:
                self._risks[host] = report
            self._set_risk(concerned, None if report.revoked else report)
        elif report.revoked:
            if report.host:
                self._hosts.pop(host, None)
            self._stay(concerned, report)
        else:
            notice = self._record(report)
            if report.host:
                self._hosts[host] = notice
            self._leave(concerned, notice)

    def _record(self, report: NoticeReport) -> NoticeRecord:
        left = report.seconds if 0 <= report.seconds <= MOST else 0.0
        deadline = self._now + left
        retire_at = max(deadline - MARGIN, self._now + LEAST)
        return NoticeRecord(report.source, report.action, deadline, retire_at)

    def arrived(self, worker: WorkerRecord) -> None:
        """Note a new worker: its host may be about to go, or at risk."""
        host = worker.slot.host
        notice = self._hosts.get(host)
        if notice is not None and self._now < notice.deadline:
            self._leave([worker], notice)
        else:
            self._hosts.pop(host, None)
            self._set_risk([worker], self._risks.get(host))

    def announce_risks(self, job: str) -> None:
        """Tell a new job which workers are at risk; those that will go it is not offered."""
        for worker in self._workers.values():
            risk = self._risks.get(worker.slot.host)
            if risk is not None and worker.risk is not None:
                self._plugin.mark_at_risk(worker.address, _given(worker, risk))

    def _leave(self, workers: Iterable[WorkerRecord], notice: NoticeRecord) -> None:
        hosts = set()
        for worker in workers:
            known, before = worker.notices.get(notice.source), worker.notice
            if known is not None and known.deadline <= notice.deadline:
                continue  # nothing is more urgent than it was
            worker.notices[notice.source] = notice
            hosts.add(worker.slot.host)
            if worker.notice is not before and not worker.retiring:
                self._mark_leaving(worker)
        for host in hosts - self._under_way:
            self._under_way.add(host)
            self._plugin.spawn(self._retire_when_empty(host))

    def _mark_leaving(self, worker: WorkerRecord) -> None:
        notice = worker.notice
        assert notice is not None
        left = max(notice.deadline - self._now, 0.0)
        given = NoticeGiven(worker.slot.name, notice.source, notice.action, left)
        self._plugin.mark_leaving(worker.address, notice=given)

    def _stay(self, workers: Iterable[WorkerRecord], report: NoticeReport) -> None:
        """Keep workers whose notice is revoked, unless another one is in force."""
        for worker in workers:
            if worker.notices.pop(report.source, None) is None or worker.retiring:
                continue
            if worker.notices:
                self._mark_leaving(worker)
            else:
                self._plugin.mark_staying(worker.address)
                self._set_risk([worker], self._risks.get(worker.slot.host))

    async def _retire_when_empty(self, host: str) -> None:
        """Retire the workers of a host when their ranks have left, or when it is time.

        They are retired together, so that the data of one does not move to another. A cluster
        manager then replaces them.
        """
        wait = RETRY
        try:
            while True:
                going = [w for w in self._workers.values() if w.slot.host == host and w.notices]
                if not going:
                    return
                due = [worker for worker in going if self._is_due(worker)]
                if due and (len(due) == len(going) or any(map(self._is_late, due))):
                    self._keep(await self._retire(due))
                    await asyncio.sleep(wait)
                    wait = 2 * RETRY
                else:
                    await asyncio.sleep(POLL)
        finally:
            self._under_way.discard(host)

    def _is_due(self, worker: WorkerRecord) -> bool:
        return worker.holder is None or self._is_late(worker)

    def _is_late(self, worker: WorkerRecord) -> bool:
        notice = worker.notice
        return notice is not None and self._now >= notice.retire_at

    async def _retire(self, workers: list[WorkerRecord]) -> list[WorkerRecord]:
        """Retire workers; return those that Dask keeps, because their data can go nowhere."""
        there = [worker for worker in workers if worker.address in self._scheduler.workers]
        for worker in there:
            logger.info("worker %s is retired: its machine will go", worker.address)
            worker.retiring = True  # a notice that is revoked from now on is revoked too late
        try:
            if there:
                await self._retire_now([worker.address for worker in there])
        except Exception:  # it is tried again
            logger.exception("workers whose machine will go cannot be retired")
        states = {worker.address: self._scheduler.workers.get(worker.address) for worker in there}
        usable = (Status.running, Status.paused)
        return [w for w in there if getattr(states[w.address], "status", None) in usable]

    def _keep(self, workers: Iterable[WorkerRecord]) -> None:
        """Offer workers again that could not be retired, if their notices were revoked since."""
        for worker in workers:
            worker.retiring = False
            if not worker.notices:
                self._plugin.mark_staying(worker.address)

    async def _retire_replaced_worker(self, worker: WorkerRecord) -> None:
        """Retire a worker that another has replaced."""
        while await self._retire([worker]):
            await asyncio.sleep(RETRY)

    # -- machines at risk --------------------------------------------------------------------------

    def _set_risk(self, workers: Iterable[WorkerRecord], report: NoticeReport | None) -> None:
        """Note that workers are at risk, or not any more."""
        for worker in workers:
            before, worker.risk = worker.risk, None if report is None else report.source
            if worker.leaving or worker.risk is before:
                continue
            if report is None:
                self._plugin.mark_staying(worker.address)
            else:
                self._plugin.mark_at_risk(worker.address, _given(worker, report))

    def _retire_replaced(self) -> None:
        """Retire workers at risk that a job has left, because others have taken their place."""
        for worker in self._workers.values():
            if worker.risk is None or worker.leaving or worker.holder is not None:
                continue
            if any(worker.slot.id in job.machine.roster.departing for job in self._jobs.values()):
                worker.retiring = True
                self._plugin.spawn(self._retire_replaced_worker(worker))

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _given(worker: WorkerRecord, report: NoticeReport) -> NoticeGiven:
    return NoticeGiven(worker.slot.name, report.source, report.action, 0.0, soft=True)


def _fitness(worker: WorkerRecord) -> tuple[bool, bool, str]:
    """Return how fit a worker is to watch for its host: the lowest value watches."""
    unfit = worker.retiring or worker.silence >= SILENT
    return unfit, not worker.watch.host, worker.address
