"""Let ranks leave before their workers: after a notice, and when retired.

One agent of each host watches for notices of the host, and each agent for the end of its own batch
job, while there is a job that wants it, or :class:`~.plugin.SpotNotices` is registered.

Dask removes a retired worker although a task still runs on it, and sizes an adaptive cluster by
expected durations. There are no hooks, so two methods of the scheduler are wrapped: as handlers of
its clients, and as attributes for calls in its process (its HTTP API, and Dask Gateway's preload).
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from distributed.core import Status
from msgspec.structs import replace

from nbelastic.cluster.wire import pack
from nbelastic.membership import Stage, rules
from nbelastic.messages import Notice, Slot, SlotLeaving, SlotStays, WatchOrder

from .arbiter import Arbiter
from .records import WorkerRecord, tell_agent

logger = logging.getLogger(__name__)

STANDING = "nbelastic-spot-notices"  # the plugin that has notices watched for without a job
MOST = 86400.0  # most seconds that a notice is taken to leave
RETRY = 5.0  # seconds until workers that their data has kept are retired again; then twice as many
POLL = 0.05

RETIRE_GRACE = 30.0  # seconds for a rank to reach its next commit, once it was told to leave
LONGEST_RETIREMENT = rules.LONGEST_STAY + rules.MARGIN  # in all
RETIRE_POLL = 0.01


class Departures:
    """Takes notices, and wraps the scheduler's ``retire_workers`` and ``adaptive_target``."""

    def __init__(
        self, arbiter: Arbiter, spawn: Callable[[Coroutine[Any, Any, object]], None]
    ) -> None:
        self._arbiter, self._spawn = arbiter, spawn
        self._scheduler = scheduler = arbiter.scheduler
        self._jobs, self._workers = arbiter.jobs, arbiter.workers
        self._under_way: set[str] = set()
        self._retire: Callable[..., Awaitable[Any]] = scheduler.handlers["retire_workers"]
        self._target: Callable[..., int] = scheduler.handlers["adaptive_target"]
        for name in ("retire_workers", "adaptive_target"):
            scheduler.handlers[name] = getattr(self, name)
            setattr(scheduler, name, getattr(self, name))

    @property
    def standing(self) -> bool:
        """Whether notices are watched for without a job."""
        return STANDING in getattr(self._scheduler, "plugins", ())

    # -- watchers ----------------------------------------------------------------------------------

    def review(self) -> None:
        """Appoint one agent of each host to watch for notices; retire replaced workers."""
        jobs = self._jobs.values()
        on = self.standing or any(job.terms.notices for job in jobs)
        fittest_first = sorted(
            self._workers.values(),
            key=lambda each: (each.retiring or each.frozen, not each.watch.host, each.address),
        )
        hosts = {worker.slot.host: worker for worker in reversed(fittest_first)}
        for worker in self._workers.values():
            order = WatchOrder(on, on and hosts[worker.slot.host] is worker)
            if order != worker.watch:
                worker.watch = order
                tell_agent(self._scheduler, worker, pack(order))
        # Workers at risk that a job has left go, because others have taken their place.
        for worker in list(self._workers.values()):
            left = any(worker.slot.id in job.machine.roster.departing for job in jobs)
            if worker.notice is not None and worker.at_risk and worker.holder is None and left:
                self._note(worker, replace(worker.notice, soft=False))

    # -- notices -----------------------------------------------------------------------------------

    def take(self, worker: WorkerRecord, notice: Notice) -> None:
        """Make ranks leave the workers of a notice, or stay if it is revoked."""
        if notice.host and not worker.watch.host:
            return  # it has watched once: another one knows better
        host = worker.slot.host
        logger.info(
            "notice of %s, from %s: %s in %.0f s, for %s%s",
            *(notice.source.value, worker.address, notice.action or "end", notice.seconds),
            f"all workers of {host}" if notice.host else "it alone",
            ", soft" * notice.soft + ", revoked" * notice.revoked,
        )
        left = notice.seconds if 0 <= notice.seconds <= MOST else 0.0
        kept = replace(notice, seconds=self._now + left)
        for each in list(self._workers.values()):
            if each is worker or (notice.host and each.slot.host == host):
                self._note(each, kept)

    def arrived(self, worker: WorkerRecord) -> None:
        """Note a new worker: its host may be about to go, or at risk, as others there know."""
        neighbours = [w for w in self._workers.values() if w.slot.host == worker.slot.host]
        for notice in [each for w in neighbours for each in w.notices.values() if each.host]:
            self._note(worker, notice)

    def announce_risks(self) -> None:
        """Tell jobs of workers at risk; workers due to leave are not offered to a new job."""
        for worker in self._workers.values():
            if worker.at_risk:
                self._tell(worker)

    def _note(self, worker: WorkerRecord, notice: Notice) -> None:
        """Keep a notice, or drop a revoked notice; tell jobs of the change."""
        key, before = (notice.source, notice.soft), worker.notice
        known = worker.notices.get(key)
        if notice.revoked:
            worker.notices.pop(key, None)
        elif known is None or notice.seconds < known.seconds:  # else nothing is more urgent
            worker.notices[key] = notice
        first = worker.notice
        if first is before:
            return
        if first is not None and not first.soft:
            worker.retire_at = max(first.seconds - rules.MARGIN, self._now + rules.SOON)
            if worker.slot.host not in self._under_way:
                self._under_way.add(worker.slot.host)
                self._spawn(self._retire_when_empty(worker.slot.host))
        if not worker.retiring:  # else it goes in any case
            if not worker.ends and before is not None:
                self.mark_staying(worker)
            self._tell(worker)

    def _tell(self, worker: WorkerRecord) -> None:
        """Tell jobs a worker's most urgent notice, if any."""
        notice = worker.notice
        if notice is not None:
            left = max(notice.seconds - self._now, 0.0)
            told = replace(notice, name=worker.slot.name, seconds=left)
            self.mark_leaving(worker.address, notice=told)

    async def _retire_when_empty(self, host: str) -> None:
        """Retire the workers of a host when their ranks have left, or when it is time."""
        # Together, so that the data of one does not move to another.
        wait = RETRY
        try:
            while going := [w for w in self._workers.values() if w.slot.host == host and w.ends]:
                late = [worker for worker in going if self._now >= worker.retire_at]
                due = [worker for worker in going if worker.holder is None or worker in late]
                if late or len(due) == len(going):
                    await self._retire_now(due)
                    await asyncio.sleep(wait)
                    wait = 2 * RETRY
                else:
                    await asyncio.sleep(POLL)
        finally:
            self._under_way.discard(host)

    async def _retire_now(self, workers: list[WorkerRecord]) -> None:
        """Retire workers; offer workers again that Dask has kept for their data, if revoked."""
        there = [worker for worker in workers if worker.address in self._scheduler.workers]
        for worker in there:
            logger.info("worker %s is retired: its machine will go", worker.address)
            worker.retiring = True  # a notice that is revoked from now on is revoked too late
        try:
            if there:
                # As an adaptive cluster does; their ranks were asked to leave.
                addresses = [worker.address for worker in there]
                await self._retire(workers=addresses, close_workers=True, remove=True)
        except Exception:  # it is tried again
            logger.exception("workers whose machine will go cannot be retired")
        for worker in there:
            state = self._scheduler.workers.get(worker.address)
            if getattr(state, "status", None) in (Status.running, Status.paused):
                worker.retiring = False
                if not worker.ends:
                    self.mark_staying(worker)
                    self._tell(worker)

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # -- retirement, and sizes of clusters ---------------------------------------------------------

    async def retire_workers(
        self, workers: list[str] | None = None, names: list[Any] | None = None, **kwargs: Any
    ) -> Any:
        """Make ranks leave at their next commit before their workers are retired."""
        if workers is None and names is None:
            kwargs.pop("attribute", None)
            terms = kwargs.keys() & {"memory_ratio", "n", "key", "minimum", "target"}
            workers = self._scheduler.workers_to_close(**{each: kwargs.pop(each) for each in terms})
        addresses = self._addresses(workers or (), names or ())
        ranks = [rank for address in addresses for rank in self.mark_leaving(address)]
        waited = since_told = 0.0
        while ranks and waited < LONGEST_RETIREMENT and since_told < RETIRE_GRACE:
            await asyncio.sleep(RETIRE_POLL)
            ranks = [rank for rank in ranks if self._was_told(rank) is not None]
            waited += RETIRE_POLL
            since_told += RETIRE_POLL if all(map(self._was_told, ranks)) else 0.0
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
        by_name = [each for each, name in others if {name, re.sub(r"-\d+$", "", name)} & given]
        return meant + by_name if len(by_name) < len(states) else meant

    def adaptive_target(self, target_duration: float | None = None) -> int:
        """Return the target of an adaptive cluster, at least the demand of all jobs."""
        return max(self._target(target_duration=target_duration), self.demand())

    def demand(self) -> int:
        """Return how many workers all jobs want, and as many more as will soon go."""
        wanted = sum(job.demand for job in self._jobs.values())
        going = (w.ends or (w.at_risk and w.holder is not None) for w in self._workers.values())
        return wanted + sum(going) if wanted else 0

    async def restart(self, slot: Slot, reason: str) -> None:
        """Restart a worker through its nanny; remove a worker without a nanny."""
        address = slot.worker
        if self._arbiter.at(slot) is None:
            return
        logger.info("worker %s is restarted, or removed if it has no nanny: %s", address, reason)
        await self._scheduler.restart_workers(
            workers=[address],
            wait_for_workers=False,
            on_error="return",
            stimulus_id=f"nbelastic-restart-{time.time()}",
        )
        if address in self._scheduler.workers and address in self._workers:
            await self._scheduler.remove_worker(address, stimulus_id=f"nbelastic: {reason}")

    # -- what jobs are told ------------------------------------------------------------------------

    def mark_leaving(
        self, address: str, *, soon: bool = False, notice: Notice | None = None
    ) -> list[tuple[str, int]]:
        """Note that a worker was asked to leave, or is at risk; return its ranks."""
        host = self._workers.get(address)
        if host is None:
            return []
        host.retiring |= notice is None
        for job in self._jobs.values():
            job.take_in(SlotLeaving(host.slot.id, soon, notice))
        self._arbiter.schedule()
        return [] if host.holder is None else [host.holder]

    def mark_staying(self, host: WorkerRecord) -> None:
        """Revoke a worker's request to leave, and offer its slot again."""
        for job in self._jobs.values():
            job.take_in(SlotStays(host.slot.id))
            self._arbiter.announce(job, [host])
        self._arbiter.schedule()

    def _was_told(self, rank: tuple[str, int]) -> bool | None:
        """Whether a rank was told to end; None for a rank without its slot."""
        job = self._jobs.get(rank[0])
        if job is None or rank[1] not in job.ranks:
            return None
        found = job.machine.roster.ranks.get(rank[1])
        return found is None or found.leave_sent or found.stage == Stage.ENDING
