"""Find workers for jobs, assign each slot to a single job, and relay messages.

The plugin decides nothing about membership; it carries facts to the drivers and orders to the
agents.

Installed once per cluster, whatever the number of jobs, it stays when they end, without state. An
agent is put on a worker when the first job wants that worker, not before.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from typing import TYPE_CHECKING, Any

from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin
from msgspec.structs import replace

from nbelastic.cluster.dask_compat import (
    PeriodicCall,
    cause_of_death,
    release_keys,
    shorten_batching,
    unsent_bytes,
)
from nbelastic.cluster.wire import FROM_AGENTS, PLUGIN, pack, pack_for_ranks, unpack
from nbelastic.cluster.worker.signals import start_processes_shielded
from nbelastic.errors import VersionMismatch
from nbelastic.messages import (
    EndRank,
    FaultReport,
    ForgetOrder,
    Heartbeats,
    Hello,
    LossReason,
    NoticeReport,
    RankEnded,
    RankEvent,
    RankLeaving,
    RankOrder,
    RankOutput,
    RankRaised,
    RankReturned,
    RankTelemetry,
    SlotBusy,
    SlotDied,
    SlotGone,
    SlotGranted,
    SlotLeaving,
    SlotsFound,
    SlotStays,
    Text,
    ToDriver,
    UnusedReason,
    UnusedWorker,
    WorkerRefused,
    WorkersUnused,
)

from .agent_install import AgentInstaller
from .arbiter import Arbiter
from .heartbeats import HeartbeatMonitor
from .job_service import JobService
from .notices import NoticeController
from .records import (
    RANK_KEY,
    JobRecord,
    WorkerRecord,
    differing,
    fits,
    is_busy,
    misfit,
    obstacle,
)
from .scaling import ScalingHooks

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from distributed import Scheduler

    from nbelastic.messages import (
        Event,
        Message,
        Notice,
        PackedError,
        RankEffect,
        Slot,
        StartRank,
    )

logger = logging.getLogger(__name__)

REVIEW_INTERVAL = 0.5
"""Seconds between two reviews of the workers that are not offered to a job."""


class ElasticPlugin(SchedulerPlugin):
    """Discovery, placement and relay for all jobs on a cluster."""

    name = PLUGIN
    idempotent = True
    chance = staticmethod(random.Random().random)  # users' own random numbers are left alone

    async def start(self, scheduler: Scheduler) -> None:
        """Take up work on a scheduler."""
        start_processes_shielded()  # nannies of a LocalCluster share this thread
        self._scheduler = scheduler
        self.jobs: dict[str, JobRecord] = {}
        self._workers: dict[str, WorkerRecord] = {}
        self._addresses: dict[str, str] = {}
        self._refused: dict[str, str] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._review = PeriodicCall(REVIEW_INTERVAL, self._review_all)
        self._agents = AgentInstaller(scheduler, self._refuse)
        self._heartbeats = HeartbeatMonitor(
            scheduler, self.jobs, self._workers, self._event, self._to_driver
        )
        self._scaling = ScalingHooks(self, scheduler)
        self._notices = NoticeController(
            self, scheduler, self.jobs, self._workers, self._scaling.retire
        )
        self.arbiter = Arbiter(scheduler, self.jobs, self._workers, self._offer)
        self._handlers: dict[type[Message], Callable[[str, Any], None]] = {
            Hello: self._hello,
            RankEvent: self._report,
            Heartbeats: self._take_beats,
            RankOutput: self._output,
            RankTelemetry: self._heartbeats.take_telemetry,
            FaultReport: self._fault,
            RankEnded: self._ended,
            RankLeaving: self._leaving,
            NoticeReport: self._take_notice,
        }
        scheduler.stream_handlers[FROM_AGENTS] = self._take
        self._job_service = JobService(self, scheduler)

    async def before_close(self) -> None:
        """Stop watching: the scheduler is closing."""
        self._heartbeats.stop()
        self._review.stop()
        self.arbiter.stop()
        for record in self.jobs.values():
            record.controller.stop()
        for task in self._tasks:
            task.cancel()

    # -- jobs --------------------------------------------------------------------------------------

    async def prepare(self, job: str) -> None:
        """Put agents on the workers that a job may use, and tell its driver of all together."""
        self._heartbeats.start()
        self._review.start()
        without = self._without_agent(job)
        await asyncio.gather(*(self._agents.install(address) for address in without))
        if job in self.jobs:
            self.jobs[job].opening = False
            self.arbiter.decide()
            self._notices.announce_risks()
            self.announce_all(job)
            self._review_job(job, self.jobs[job])

    def drop(self, job: str) -> None:
        """Forget a job."""
        record = self.jobs.pop(job, None)
        if record is None:
            return
        record.controller.stop()
        self._job_service.remember(job, record)
        record.release()
        release_keys(self._scheduler, record.holder)
        self._job_service.forget_tasks([record.key(s) for s in range(record.machine.roster.starts)])
        for host in self._workers.values():
            self._to_agent(host, pack(ForgetOrder(job)))
        self.arbiter.schedule()
        self._settle()

    def add_client(self, scheduler: Scheduler, client: str) -> None:
        """Note the return of a kernel whose absence went unnoticed.

        Messages to it in between are lost; the answer to its next step is to attach again.
        """
        self._job_service.leave(client)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Carry on a lost kernel's jobs, until another kernel attaches."""
        self._job_service.leave(client)

    def update_graph(
        self, scheduler: Scheduler, *, client: str, keys: Any = (), **kwargs: Any
    ) -> None:
        """Keep ranks' tasks after the loss of the submitting kernel."""
        self._job_service.keep_tasks(keys, client)

    def _settle(self) -> None:
        if not self.jobs:
            self._heartbeats.stop()
            self.arbiter.stop()
            self._notices.review()
            if not self._notices.standing:
                self._review.stop()

    def watch_machines(self) -> None:
        """Watch for notices also without a job, while :class:`SpotNotices` is registered."""
        self._review.start()

    # -- workers -----------------------------------------------------------------------------------

    def _without_agent(self, job: str) -> list[str]:
        record, workers = self.jobs[job], self._scheduler.workers
        return [a for a, ws in workers.items() if a not in self._addresses and fits(record, ws)]

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Put an agent on a new worker if any job wants it."""
        state = scheduler.workers[worker]
        wanted = self._notices.standing or any(fits(j, state) for j in self.jobs.values())
        if worker not in self._addresses and wanted:
            self.spawn(self._agents.install(worker))

    def _refuse(self, address: str, reason: str) -> None:
        state = self._scheduler.workers.get(address)
        logger.info("worker %s can host no rank: %s", address, reason)
        self._refused[address] = reason
        for name, record in self.jobs.items():
            if state is not None and fits(record, state):
                self._to_driver(name, WorkerRefused(address, reason))

    def _hello(self, worker: str, hello: Hello) -> None:
        # The scheduler's address of a worker, which others reach it at: an agent knows only the
        # contact address that its worker was started with, which may have a host's name in it.
        slot = replace(hello.slot, worker=worker)
        nanny = getattr(self._scheduler.workers.get(worker), "nanny", None)
        host = WorkerRecord(slot, hello.versions, hello.process, nanny)
        self._workers[slot.id] = host
        self._addresses[worker] = slot.id
        self._refused.pop(worker, None)
        self._agents.arrived(worker)
        shorten_batching(self._scheduler.stream_comms.get(worker))
        self.spawn(self._heartbeats.warm_up(host))
        self._notices.arrived(host)
        for name in self.jobs:
            self._announce(name, [slot.id])
        self.arbiter.schedule()

    def announce_all(self, job: str) -> None:
        """Announce all usable free slots to a job's driver."""
        self._announce(job, list(self._workers))

    def _offer(self, job: str, slots: Iterable[str] | None) -> None:
        self._announce(job, list(self._workers) if slots is None else slots)

    def _review_all(self) -> None:
        self._notices.review()
        if self._notices.standing:
            for address, state in self._scheduler.workers.items():  # so that each can watch
                known = address in self._addresses or address in self._refused
                running = state.status is Status.running
                if not known and running and not self._agents.installs(address):
                    self.spawn(self._agents.install(address))
        elif not self.jobs:
            self._settle()  # the plugin is gone for which machines were watched
        if self.jobs:
            self.arbiter.decide()
        for name, record in list(self.jobs.items()):
            self._review_job(name, record)

    def _review_job(self, job: str, record: JobRecord) -> None:
        """Tell a driver of changes in the workers not offered to its job, with the reasons.

        Dask does not announce that it resumes a paused worker. So a worker without an obstacle any
        more gets its agent, or is offered, here.
        """
        if record.client is None or record.opening or record.closing:
            return
        most = record.machine.roster.limits.max_np
        full = most is not None and len(record.ranks) >= most
        used = [self._workers[slot].address for slot in record.ranks.values()]
        before = {each.worker for each in record.unused}
        found = [
            self._unused(job, record, address)
            for address in (used if full else self._scheduler.workers)
            if address in self._scheduler.workers
        ]
        unused = [each for each in found if each is not None]
        now = {each.worker for each in unused}
        if unused != record.unused:
            record.unused = unused
            self._event(job, WorkersUnused(tuple(unused)))
        if full:
            return
        for address in self._without_agent(job):
            if address not in self._refused and not self._agents.installs(address):
                self.spawn(self._agents.install(address))
        free = [address for address in before - now if address in self._addresses]
        self._announce(job, [self._addresses[address] for address in free])

    def _unused(self, job: str, record: JobRecord, address: str) -> UnusedWorker | None:
        """Return why a job is not offered a worker; None if offered, or in use by its rank."""
        state = self._scheduler.workers[address]
        slot = self._addresses.get(address)
        if slot is not None and slot not in record.ranks.values():
            problem = obstacle(record, state, self._workers[slot])
            if problem is None and not self.arbiter.offers(job, slot):
                problem = self._withheld(job, record, self._workers[slot].slot)
            return problem
        if slot is not None:  # of one that has its rank, if that cannot begin
            waits = not self._workers[slot].has_beaten and is_busy(record, state)
            return UnusedWorker(address, UnusedReason.BUSY) if waits else None
        problem = misfit(record, state)
        if problem is None:
            refusal = self._refused.get(address)
            reason = UnusedReason.REFUSED if refusal else UnusedReason.BEING_PREPARED
            problem = UnusedWorker(address, reason, refusal or "")
        return problem

    def _withheld(self, job: str, record: JobRecord, slot: Slot) -> UnusedWorker | None:
        """Return why the arbiter does not offer a free slot to a job."""
        other = self.arbiter.reserved_for(slot.id)
        if other:
            return UnusedWorker(slot.worker, UnusedReason.RESERVED, other)
        if self.arbiter.has_its_share(job) and not record.machine.roster.excluded(slot):
            return UnusedWorker(slot.worker, UnusedReason.BEYOND_SHARE)
        return None

    def _announce(self, job: str, slots: Iterable[str]) -> None:
        record = self.jobs.get(job)
        if record is None or record.client is None or record.opening:
            return
        found = []
        for slot in slots:
            host = self._workers[slot]
            state = self._scheduler.workers.get(host.address)
            if state is None or host.holder is not None or not self.arbiter.offers(job, slot):
                continue
            if obstacle(record, state, host) is None:
                found.append(host.slot)
            elif fits(record, state) and differing(record, host):
                reason = f"it runs {differing(record, host)}"
                self._to_driver(job, WorkerRefused(host.address, reason))
        if found:
            self._event(job, SlotsFound(tuple(found)))

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Tell drivers that a worker is gone."""
        self._agents.arrived(worker)  # its agent is not waited for any more
        self._refused.pop(worker, None)
        slot = self._addresses.pop(worker, None)
        if slot is None:
            return
        host = self._workers.pop(slot)
        if host.nanny and host.holder is not None and not host.leaving:
            self.spawn(self._tell_death(host.nanny, host, *host.holder))
        for name, record in list(self.jobs.items()):
            lost = [start for start, at in record.ranks.items() if at == slot]
            for start in lost:
                record.ranks.pop(start)
            self._job_service.forget_tasks([record.key(start) for start in lost])
            self._heartbeats.send_beats(name)  # the last ones tell how far a lost rank had come
            self._event(name, SlotGone(slot))
        self.arbiter.schedule()

    async def _tell_death(self, nanny: str, host: WorkerRecord, job: str, start: int) -> None:
        """Report the cause of death of a rank's process, once it is known."""
        cause = await cause_of_death(self._scheduler, nanny, host.process.pid)
        if cause and job in self.jobs:
            detail = f"the process of {host.address} {cause}"
            self._event(job, SlotDied(host.slot, start, detail))

    def mark_leaving(
        self, address: str, *, soon: bool = False, notice: Notice | None = None
    ) -> list[tuple[str, int]]:
        """Note that a worker was asked to leave, or is at risk; return its ranks."""
        slot = self._addresses.get(address)
        if slot is None:
            return []
        host = self._workers[slot]
        host.retiring |= notice is None
        for name in self.jobs:
            self._event(name, SlotLeaving(slot, soon, notice))
        self.arbiter.schedule()
        return [] if host.holder is None else [host.holder]

    def mark_staying(self, address: str) -> None:
        """Revoke a worker's request to leave, and offer its slot again."""
        slot = self._addresses[address]
        for name in self.jobs:
            self._event(name, SlotStays(slot))
            self._announce(name, [slot])
        self.arbiter.schedule()

    def holds(self, rank: tuple[str, int]) -> bool:
        """Return whether a rank still has its slot."""
        job, start = rank
        return job in self.jobs and start in self.jobs[job].ranks

    def was_told(self, rank: tuple[str, int]) -> bool:
        """Return whether a rank that has a slot was told to end."""
        job, start = rank
        return start in self.jobs[job].told

    def free_workers(self) -> list[str]:
        """Return the addresses of workers that could take a rank now."""
        workers = self._scheduler.workers
        return [
            host.address
            for host in self._workers.values()
            if host.holder is None
            and not host.leaving
            and host.address in workers
            and workers[host.address].status is Status.running
        ]

    def demand(self) -> int:
        """Return how many workers all jobs together would like to have.

        Those that will soon go count on top, so that others are there in time.
        """
        wanted = sum(record.demand for record in self.jobs.values())
        return wanted + self._notices.going if wanted else 0

    def valid_workers_downscaling(self, scheduler: Scheduler, workers: list[Any]) -> list[Any]:
        """Return the workers that Dask may close, workers with ranks included.

        A rank is a long-running task, and Dask leaves workers with one out. It takes workers
        without tasks first, then the last of this list: the youngest rank.
        """
        ranks = {
            address: worker.holder[1]
            for address, slot in self._addresses.items()
            if (worker := self._workers[slot]).holder is not None
        }
        found = [worker for worker in workers if worker.address not in ranks]
        return found + [
            scheduler.workers[address]
            for address in sorted(ranks, key=ranks.__getitem__)
            if address in scheduler.workers
            and all(
                str(task.key).startswith(RANK_KEY)
                for task in scheduler.workers[address].long_running
            )
        ]

    # -- for job controllers -----------------------------------------------------------------------

    def claim(self, job: str, record: JobRecord, effect: StartRank) -> Event | None:
        """Claim a slot for a rank; return the event of its refusal, or None."""
        slot = effect.slot.id
        host = self._workers.get(slot)
        if host is None:
            return SlotGone(slot)
        if host.holder is not None or host.leaving or record.client is None:
            return SlotBusy(slot)  # only a kernel can start a rank on it
        if not self.arbiter.claim(job, slot):
            logger.info("job %r: %s is beyond its share by now", job, host.address)
            return SlotBusy(slot)
        host.holder, host.has_beaten, host.silence = (job, effect.start), False, 0.0
        record.ranks[effect.start] = slot
        record.places[effect.start] = effect.place
        self.grant(record, effect.start, slot)
        return None

    def rearrange(self) -> None:
        """Decide anew how the jobs share the cluster."""
        self.arbiter.schedule()

    def free(self, job: str, start: int, slot: str | None) -> None:
        """Take a slot back from a rank, and offer it to the job of its reservation, or to all."""
        record = self.jobs.get(job)
        if record is not None:
            record.ranks.pop(start, None)
            record.beats.pop(start, None)
            record.told.discard(start)
            record.places.pop(start, None)
        if slot is not None:
            if self._workers[slot].holder == (job, start):
                logger.info(
                    "job %r: start %d holds %s no more", job, start, self._workers[slot].address
                )
                self._workers[slot].holder = None
                if record is not None:
                    record.silent.discard(slot)  # if it falls silent again, that is news
            for name in self.jobs:
                self._announce(name, [slot])
        self.arbiter.schedule()

    def grant(self, record: JobRecord, start: int, slot: str) -> None:
        """Make the driver start a rank on a granted slot."""
        self.send(record, SlotGranted(start, self._workers[slot].slot, record.places[start]))

    def restart_worker(self, slot: Slot, reason: str) -> None:
        """Restart a worker through its nanny; remove a worker without a nanny."""
        if slot.id in self._workers:
            self.spawn(self._restart_worker(slot.worker, reason))

    async def _restart_worker(self, address: str, reason: str) -> None:
        logger.info("worker %s is restarted, or removed if it has no nanny: %s", address, reason)
        await self._scheduler.restart_workers(
            workers=[address],
            wait_for_workers=False,
            on_error="return",
            stimulus_id=f"nbelastic-restart-{time.time()}",
        )
        if address in self._scheduler.workers and self._addresses.get(address):
            await self._scheduler.remove_worker(address, stimulus_id=f"nbelastic: {reason}")

    def transition(
        self, key: Any, start: str, finish: str, *args: Any, exception_text: str = "", **kwargs: Any
    ) -> None:
        """Note the end of a rank's task; the report of its agent comes first."""
        if finish in ("erred", "memory") and isinstance(key, str) and key.startswith(RANK_KEY):
            uid, _, number = key[len(RANK_KEY) :].rpartition("-")
            detail = f"its task ended without a report: {exception_text or finish}"
            # Later: if Dask is about to remove the worker, that is reported instead.
            asyncio.get_running_loop().call_soon(self._note_task_end, uid, int(number), detail)

    def _note_task_end(self, uid: str, start: int, detail: str) -> None:
        """Report a rank that has ended without a report."""
        for name, record in list(self.jobs.items()):
            if record.uid == uid and start in record.ranks:
                self._event(name, RankRaised(start, detail))
                self.free(name, start, record.ranks.get(start))

    # -- from the agents ---------------------------------------------------------------------------

    def _take(self, worker: str, message: Any = None, **_: Any) -> None:
        """Take a message of an agent; an unreadable message costs only the rank of its worker.

        Dask closes a stream when its handler raises, and a worker closes with its stream.
        """
        try:
            read = unpack(message)
            self._handlers[type(read)](worker, read)
        except Exception as error:  # whatever is in the message
            logger.warning("a message from %s cannot be read", worker, exc_info=True)
            self._evict_sender(worker, error)

    def _evict_sender(self, worker: str, error: Exception) -> None:
        """Evict the rank of a worker whose message cannot be read."""
        if isinstance(error, VersionMismatch):
            self._refuse(worker, str(error))
            self._agents.arrived(worker)
        problem = str(error)[:500]
        logger.info("worker %s has sent a message that cannot be read: %s", worker, problem)
        slot = self._addresses.get(worker)
        holder = None if slot is None else self._workers[slot].holder
        if slot is not None and holder is not None:
            gone = SlotGone(slot, LossReason.UNREADABLE, problem)
            self._evict(slot, *holder, f"unreadable message: {problem}")
            self._heartbeats.send_beats(holder[0])
            self._event(holder[0], gone)

    def _evict(self, slot: str, job: str, start: int, reason: str) -> None:
        order = RankOrder(job, start, EndRank(start, "evict", Text(reason)))
        self._to_agent(self._workers[slot], pack(order))

    def _report(self, worker: str, message: RankEvent) -> None:
        if isinstance(message.event, RankReturned) and message.result is None:
            raise ValueError("a rank that returns must send its result")
        self._heartbeats.send_telemetry(message.job)
        self._event(message.job, message.event, message.result, message.error)

    def _output(self, worker: str, message: RankOutput) -> None:
        record = self.jobs.get(message.job)
        if record is not None:
            record.log.note_output(message.start, message.text)
            stream = getattr(self._scheduler, "client_comms", {}).get(record.client)
            passed = record.output.take(message, unsent_bytes(stream))
            if passed is not None:
                self.send(record, passed)

    def _fault(self, worker: str, message: FaultReport) -> None:
        self._to_driver(message.job, replace(message, worker=worker))

    def _leaving(self, worker: str, message: RankLeaving) -> None:
        self.mark_leaving(worker, soon=True)

    def _take_notice(self, worker: str, message: NoticeReport) -> None:
        slot = self._addresses.get(worker)
        if slot is not None:
            self._notices.take(self._workers[slot], message.notice)

    def _ended(self, worker: str, message: RankEnded) -> None:
        if message.never and message.job in self.jobs:
            self.jobs[message.job].never.add(message.start)
        self.free(message.job, message.start, self._addresses.get(worker))

    def _take_beats(self, worker: str, message: Heartbeats) -> None:
        slot = self._addresses.get(worker)
        self._heartbeats.take(slot, message.beats)
        for each in message.beats:  # of ranks that no job knows (any more)
            job, start = each.job, each.beat.start
            known = job in self.jobs and self.jobs[job].ranks.get(start) == slot
            if slot is not None and not known:
                self._evict(slot, job, start, "the job goes on without this rank")

    # -- sending -----------------------------------------------------------------------------------

    def order(self, job: str, record: JobRecord, effect: RankEffect, starts: Iterable[int]) -> None:
        """Order ranks of a job to obey an effect; it is packed once for all."""
        packed = pack_for_ranks(job, effect)
        for start in list(starts):
            worker = self._workers.get(record.ranks.get(start, ""))
            if worker is not None:
                self._to_agent(worker, packed(start))

    def tell_agent(self, worker: WorkerRecord, message: Message) -> None:
        """Send a message to a worker's agent."""
        self._to_agent(worker, pack(message))

    def _to_agent(self, worker: WorkerRecord, message: dict[str, Any]) -> None:
        if worker.address in self._scheduler.stream_comms:
            self._scheduler.worker_send(worker.address, {"op": PLUGIN, "message": message})

    def _event(
        self,
        job: str,
        event: Event,
        result: bytes | None = None,
        error: PackedError | None = None,
    ) -> None:
        record = self.jobs.get(job)
        if record is not None:
            record.controller.take_in(event, result, error)

    def _to_driver(self, job: str, message: Message) -> None:
        record = self.jobs.get(job)
        if record is not None:
            self.send(record, message)

    def send(self, record: JobRecord, message: Message) -> None:
        """Send a message to a job's driver, if any."""
        if record.client is not None:
            self.say(record.client, record.topic, record.epoch, message)

    def say(self, client: str, topic: str, epoch: int, message: Message) -> None:
        """Send a message to a kernel, as an event of its subscribed topic.

        It is not logged as an event, which would keep it in the scheduler's memory.
        """
        packed = pack(ToDriver(epoch, message))
        self._scheduler.client_send(client, {"op": "event", "topic": topic, "event": (0.0, packed)})

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine in the background."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(functools.partial(_finished, self._tasks))


def _finished(tasks: set[asyncio.Task[object]], task: asyncio.Task[object]) -> None:
    tasks.discard(task)
    if not task.cancelled():
        task.exception()
