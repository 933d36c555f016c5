"""Find workers for jobs, assign each slot to a single job, and relay messages.

The plugin decides nothing about membership; it carries facts to the drivers and orders to the
agents. It stays when all jobs have ended, without state.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import random
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from distributed import Scheduler
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin
from msgspec.structs import replace

from nbelastic import messages as m
from nbelastic.cluster.dask_compat import (
    PeriodicCall,
    hold_nothing_back,
    release_keys,
    unsent_bytes,
)
from nbelastic.cluster.wire import FROM_AGENTS, PLUGIN, pack, pack_for_ranks, unpack
from nbelastic.cluster.worker.agent import Agent
from nbelastic.errors import VersionMismatch
from nbelastic.membership import Stage

from .arbiter import Arbiter
from .heartbeats import HeartbeatMonitor
from .job import ScheduledJob
from .job_service import JobService
from .leaving import STANDING, NoticeController, ScalingHooks
from .records import RANK_KEY, WorkerRecord, fits, is_busy, misfit, obstacle

logger = logging.getLogger(__name__)

HELLO_TIMEOUT = 10.0  # seconds that a worker may take for its hello once it has its agent
REVIEW_INTERVAL = 0.5  # seconds between two reviews of the workers that are not offered to a job


class ElasticPlugin(SchedulerPlugin):
    """Discovery, placement and relay for all jobs on a cluster."""

    name = PLUGIN
    idempotent = True
    chance = staticmethod(random.Random().random)  # users' own random numbers are left alone

    async def start(self, scheduler: Scheduler) -> None:
        """Take up work on a scheduler."""
        self.scheduler = scheduler
        self.jobs: dict[str, ScheduledJob] = {}
        self.workers: dict[str, WorkerRecord] = {}  # by address
        self._refused: dict[str, str] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self.review = PeriodicCall(REVIEW_INTERVAL, self._review_all)
        self._installing: dict[str, asyncio.Event] = {}  # until the hello, by address
        self._heartbeats = HeartbeatMonitor(self)
        self.scaling = ScalingHooks(self)
        self._notices = NoticeController(self)
        self.arbiter = Arbiter(self)
        self._handlers: dict[type[m.Message], Callable[[str, Any], object]] = {
            m.Hello: self._hello,
            m.RankEvent: self._report,
            m.Heartbeats: self._take_beats,
            m.RankOutput: self._output,
            m.RankTelemetry: self._heartbeats.take_telemetry,
            m.FaultReport: self._fault,
            m.RankEnded: self._ended,
            m.RankLeaving: lambda worker, _: self.mark_leaving(worker, soon=True),
            m.NoticeReport: self._take_notice,
        }
        scheduler.stream_handlers[FROM_AGENTS] = self._take
        self._job_service = JobService(self)

    async def before_close(self) -> None:
        """Stop watching: the scheduler is closing."""
        self._heartbeats.stop()
        self.review.stop()
        self.arbiter.stop()
        for job in self.jobs.values():
            job.stop()
        for task in self._tasks:
            task.cancel()

    # -- jobs --------------------------------------------------------------------------------------

    async def prepare(self, job: ScheduledJob) -> None:
        """Put agents on the workers that a job may use, and tell its driver of all together."""
        self._heartbeats.start()
        self.review.start()
        there = self.scheduler.workers.items()
        without = [a for a, state in there if a not in self.workers and fits(job, state)]
        await asyncio.gather(*map(self._install_agent, without))
        if self.jobs.get(job.name) is job:
            job.opening = False
            self.arbiter.decide()
            self._notices.announce_risks()
            self.announce(job, self.workers.values())
            self._review_job(job)

    def drop(self, name: str) -> None:
        """Forget a job."""
        job = self.jobs.pop(name, None)
        if job is None:
            return
        job.stop()
        self._job_service.remember(job)
        job.release()
        release_keys(self.scheduler, job.holder)
        self._job_service.forget_tasks([job.key(s) for s in range(job.machine.roster.starts)])
        for host in self.workers.values():
            self.tell_agent(host, pack(m.ForgetOrder(name)))
        self.arbiter.schedule()
        self._settle()

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Carry on a lost kernel's jobs, until another kernel attaches."""
        self._job_service.leave(client)

    # One that comes again may have been away unnoticed: messages to it in between are lost.
    add_client = remove_client

    def update_graph(
        self, scheduler: Scheduler, *, client: str, keys: Any = (), **kwargs: Any
    ) -> None:
        """Keep ranks' tasks after the loss of the submitting kernel."""
        self._job_service.keep_tasks(keys, client)

    def _settle(self) -> None:
        self._notices.review()
        if not self.jobs:
            self._heartbeats.stop()
            self.arbiter.stop()
            if not self._notices.standing:
                self.review.stop()

    # -- workers -----------------------------------------------------------------------------------

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Put an agent on a new worker if any job, or the watch for notices, wants it."""
        state, standing = scheduler.workers[worker], self._notices.standing
        if worker in self.workers or worker in self._refused or worker in self._installing:
            return
        wanted = any(fits(job, state) for job in self.jobs.values())
        if wanted or (standing and state.status is Status.running):
            self.spawn(self._install_agent(worker))

    def _installed(self, address: str) -> None:
        if address in self._installing:
            self._installing[address].set()

    async def _install_agent(self, address: str) -> None:
        """Put an agent on a worker and wait for its hello; note why that is refused."""
        if address in self._installing:
            await self._installing[address].wait()
            return
        here = self._installing[address] = asyncio.Event()
        try:
            message = {"op": "plugin-add", "plugin": pickle.dumps(Agent()), "name": PLUGIN}
            answers = await asyncio.wait_for(
                self.scheduler.broadcast(msg=message, workers=[address], on_error="return"),
                HELLO_TIMEOUT,
            )
            answer = answers.get(address)
            if not isinstance(answer, dict) or answer.get("status") != "OK":
                problem = answer.get("text") if isinstance(answer, dict) else repr(answer)
                self._refuse(address, f"it cannot load nbelastic: {problem}")
            else:
                await asyncio.wait_for(here.wait(), HELLO_TIMEOUT)
        except (OSError, asyncio.TimeoutError) as error:
            self._refuse(address, f"it did not answer: {error!r}")
        finally:
            self._installing.pop(address).set()

    def _refuse(self, address: str, reason: str) -> None:
        logger.info("worker %s can host no rank: %s", address, reason)
        self._refused[address] = reason

    def _hello(self, worker: str, hello: m.Hello) -> None:
        # The scheduler's address of a worker, which others reach it at: an agent knows only the
        # contact address that its worker was started with, which may have a host's name in it.
        slot = replace(hello.slot, worker=worker)
        nanny = getattr(self.scheduler.workers.get(worker), "nanny", None)
        host = self.workers[worker] = WorkerRecord(slot, hello.versions, hello.pid, nanny)
        self._refused.pop(worker, None)
        self._installed(worker)
        hold_nothing_back(self.scheduler.stream_comms.get(worker))
        self._notices.arrived(host)
        for job in self.jobs.values():
            self.announce(job, [host])
        self.arbiter.schedule()

    def _review_all(self) -> None:
        self._settle()  # the plugin may be gone for which machines were watched
        for address in self.scheduler.workers:  # Dask does not say that it resumes a paused one
            self.add_worker(self.scheduler, address)
        if self.jobs:
            self.arbiter.decide()
        for job in list(self.jobs.values()):
            self._review_job(job)

    def _review_job(self, job: ScheduledJob) -> None:
        """Tell a driver of changes in the workers not offered to its job; offer those free now."""
        if job.client is None or job.opening or job.closing:
            return
        most = job.machine.roster.limits.max_np
        full = most is not None and len(job.ranks) >= most
        there = self.scheduler.workers
        looked_at = [host.address for host in job.ranks.values()] if full else list(there)
        before = {each.worker for each in job.unused}
        found = [self._unused(job, address) for address in looked_at if address in there]
        unused = [each for each in found if each is not None]
        if unused != job.unused:
            job.unused = unused
            job.take_in(m.WorkersUnused(tuple(unused)))
        if not full:
            free = before - {each.worker for each in unused} & self.workers.keys()
            self.announce(job, [self.workers[address] for address in free])

    def _unused(self, job: ScheduledJob, address: str) -> m.UnusedWorker | None:
        """Return why a job is not offered a worker; None if offered, or in use by its rank."""
        state = self.scheduler.workers[address]
        host = self.workers.get(address)
        if host is not None and host not in job.ranks.values():
            problem = obstacle(job, state, host)
            if problem is not None or self.arbiter.offers(job, host):
                return problem
            if other := self.arbiter.reserved.get(host.slot.id):
                return m.UnusedWorker(address, m.UnusedReason.RESERVED, other)
            excluded = job.machine.roster.excluded(host.slot)
            if self.arbiter.has_its_share(job) and not excluded:
                return m.UnusedWorker(address, m.UnusedReason.BEYOND_SHARE)
            return None
        if host is not None:  # of one that has its rank, if that cannot begin
            waits = not host.has_beaten and is_busy(job, state)
            return m.UnusedWorker(address, m.UnusedReason.BUSY) if waits else None
        refusal = self._refused.get(address, "")
        reason = m.UnusedReason.REFUSED if refusal else m.UnusedReason.BEING_PREPARED
        return misfit(job, state) or m.UnusedWorker(address, reason, refusal)

    def announce(self, job: ScheduledJob, hosts: Iterable[WorkerRecord]) -> None:
        """Announce usable free slots to a job's driver."""
        if job.client is None or job.opening:
            return
        there = self.scheduler.workers
        offered = (each for each in hosts if self.arbiter.offers(job, each))
        known = ((each, there.get(each.address)) for each in offered)
        found = [each.slot for each, at in known if at and obstacle(job, at, each) is None]
        if found:
            job.take_in(m.SlotsFound(tuple(found)))

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Tell drivers that a worker is gone."""
        self._installed(worker)  # its agent is not waited for any more
        self._refused.pop(worker, None)
        host = self.workers.pop(worker, None)
        if host is None:
            return
        for job in list(self.jobs.values()):
            lost = [start for start, at in job.ranks.items() if at is host]
            for start in lost:
                job.ranks.pop(start)
            self._job_service.forget_tasks([job.key(start) for start in lost])
            self._heartbeats.send_beats(job)  # the last ones tell how far a lost rank had come
            job.take_in(m.SlotGone(host.slot.id))
        self.arbiter.schedule()

    def mark_leaving(
        self, address: str, *, soon: bool = False, notice: m.Notice | None = None
    ) -> list[tuple[str, int]]:
        """Note that a worker was asked to leave, or is at risk; return its ranks."""
        host = self.workers.get(address)
        if host is None:
            return []
        host.retiring |= notice is None
        for job in self.jobs.values():
            job.take_in(m.SlotLeaving(host.slot.id, soon, notice))
        self.arbiter.schedule()
        return [] if host.holder is None else [host.holder]

    def mark_staying(self, host: WorkerRecord) -> None:
        """Revoke a worker's request to leave, and offer its slot again."""
        for job in self.jobs.values():
            job.take_in(m.SlotStays(host.slot.id))
            self.announce(job, [host])
        self.arbiter.schedule()

    def was_told(self, rank: tuple[str, int]) -> bool | None:
        """Return whether a rank was told to end; None for a rank without its slot."""
        job = self.jobs.get(rank[0])
        if job is None or rank[1] not in job.ranks:
            return None
        found = job.machine.roster.ranks.get(rank[1])
        return found is None or found.leave_sent or found.stage == Stage.ENDING

    def demand(self) -> int:
        """Return how many workers all jobs want, and as many more as will soon go."""
        wanted = sum(job.demand for job in self.jobs.values())
        return wanted + self._notices.going if wanted else 0

    def valid_workers_downscaling(self, scheduler: Scheduler, workers: list[Any]) -> list[Any]:
        """Return workers for Dask to close, also workers whose long-running task is a rank."""
        # Dask takes workers without tasks first, then the last of this list: the youngest rank.
        starts = {h.address: h.holder[1] for h in self.workers.values() if h.holder is not None}
        held = map(scheduler.workers.get, sorted(starts, key=starts.__getitem__))
        return [worker for worker in workers if worker.address not in starts] + [
            state
            for state in filter(None, held)
            if all(str(task.key).startswith(RANK_KEY) for task in state.long_running)
        ]

    # -- for job controllers -----------------------------------------------------------------------

    def _at(self, slot: m.Slot) -> WorkerRecord | None:
        """Return the worker of a slot, if still there."""
        host = self.workers.get(slot.worker)
        return host if host is not None and host.slot.id == slot.id else None

    def claim(self, job: ScheduledJob, effect: m.StartRank) -> m.Event | None:
        """Claim a slot for a rank; return the event of its refusal, or None."""
        slot, host = effect.slot.id, self._at(effect.slot)
        if host is None:
            return m.SlotGone(slot)
        if host.holder is not None or host.leaving or job.client is None:
            return m.SlotBusy(slot)  # only a kernel can start a rank on it
        if not self.arbiter.claim(job, host):
            logger.info("job %r: %s is beyond its share by now", job.name, host.address)
            return m.SlotBusy(slot)
        host.holder, host.has_beaten, host.silence = (job.name, effect.start), False, 0.0
        job.ranks[effect.start] = host
        job.places[effect.start] = effect.place
        self.grant(job, effect.start)
        return None

    def free(self, name: str, start: int, host: WorkerRecord | None) -> None:
        """Take a slot back from a rank, and offer it to the job of its reservation, or to all."""
        job = self.jobs.get(name)
        if job is not None:
            job.ranks.pop(start, None)
            job.beats.pop(start, None)
            job.places.pop(start, None)
        if host is not None:
            if host.holder == (name, start):
                logger.info("job %r: start %d holds %s no more", name, start, host.address)
                host.holder, host.frozen = None, False  # if it falls silent again, that is news
            for each in self.jobs.values():
                self.announce(each, [host])
        self.arbiter.schedule()

    def grant(self, job: ScheduledJob, start: int) -> None:
        """Make the driver start a rank on a granted slot."""
        job.send(m.SlotGranted(start, job.ranks[start].slot, job.places[start]))

    async def restart_worker(self, slot: m.Slot, reason: str) -> None:
        """Restart a worker through its nanny; remove a worker without a nanny."""
        address = slot.worker
        if self._at(slot) is None:
            return
        logger.info("worker %s is restarted, or removed if it has no nanny: %s", address, reason)
        await self.scheduler.restart_workers(
            workers=[address],
            wait_for_workers=False,
            on_error="return",
            stimulus_id=f"nbelastic-restart-{time.time()}",
        )
        if address in self.scheduler.workers and address in self.workers:
            await self.scheduler.remove_worker(address, stimulus_id=f"nbelastic: {reason}")

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
        for job in list(self.jobs.values()):
            if job.uid == uid and start in job.ranks:
                job.take_in(m.RankRaised(start, detail))
                self.free(job.name, start, job.ranks.get(start))

    # -- from the agents ---------------------------------------------------------------------------

    def _take(self, worker: str, message: Any = None, **_: Any) -> None:
        """Take a message of an agent; an unreadable message costs only the rank of its worker."""
        try:  # Dask closes a stream whose handler raises, and the worker closes with it
            read = unpack(message)
            self._handlers[type(read)](worker, read)
        except Exception as error:  # whatever is in the message
            logger.warning("a message from %s cannot be read", worker, exc_info=True)
            self._evict_sender(worker, error)

    def _evict_sender(self, worker: str, error: Exception) -> None:
        if isinstance(error, VersionMismatch):
            self._refuse(worker, str(error))
            self._installed(worker)
        problem = str(error)[:500]
        host = self.workers.get(worker)
        if host is not None and host.holder is not None:
            self._evict(host, *host.holder, f"unreadable message: {problem}")
            if (job := self.jobs.get(host.holder[0])) is not None:
                self._heartbeats.send_beats(job)
                job.take_in(m.SlotGone(host.slot.id, m.LossReason.UNREADABLE, problem))

    def _evict(self, host: WorkerRecord, job: str, start: int, reason: str) -> None:
        order = m.RankOrder(job, start, m.EndRank(start, "evict", m.Text(reason)))
        self.tell_agent(host, pack(order))

    def _report(self, worker: str, message: m.RankEvent) -> None:
        if isinstance(message.event, m.RankReturned) and message.result is None:
            raise ValueError("a rank that returns must send its result")
        if (job := self.jobs.get(message.job)) is not None:
            self._heartbeats.send_telemetry(job)
            job.take_in(message.event, message.result, message.error)

    def _output(self, worker: str, message: m.RankOutput) -> None:
        if (job := self.jobs.get(message.job)) is not None:
            job.log.note_output(message.start, message.text)
            stream = self.scheduler.client_comms.get(job.client or "")
            job.send_output(message, unsent_bytes(stream))

    def _fault(self, worker: str, message: m.FaultReport) -> None:
        if (job := self.jobs.get(message.job)) is not None:
            job.send(replace(message, worker=worker))

    def _take_notice(self, worker: str, message: m.NoticeReport) -> None:
        if (host := self.workers.get(worker)) is not None:
            self._notices.take(host, message.notice)

    def _ended(self, worker: str, message: m.RankEnded) -> None:
        if message.never and message.job in self.jobs:
            self.jobs[message.job].never.add(message.start)
        self.free(message.job, message.start, self.workers.get(worker))

    def _take_beats(self, worker: str, message: m.Heartbeats) -> None:
        host = self.workers.get(worker)
        self._heartbeats.take(host, message.beats)
        for job, beat in message.beats:  # of ranks that no job knows (any more)
            known = job in self.jobs and self.jobs[job].ranks.get(beat.start) is host
            if host is not None and not known:
                self._evict(host, job, beat.start, "the job goes on without this rank")

    # -- sending -----------------------------------------------------------------------------------

    def order(self, job: ScheduledJob, effect: m.RankEffect, starts: Iterable[int]) -> None:
        """Order ranks of a job to obey an effect; it is packed once for all."""
        packed = pack_for_ranks(job.name, effect)
        for start in list(starts):
            if start in job.ranks:
                self.tell_agent(job.ranks[start], packed(start))

    def tell_agent(self, worker: WorkerRecord, message: dict[str, Any]) -> None:
        """Send a packed message to a worker's agent."""
        if worker.address in self.scheduler.stream_comms:
            self.scheduler.worker_send(worker.address, {"op": PLUGIN, "message": message})

    def say(self, client: str, topic: str, epoch: int, message: m.Message) -> None:
        """Send a message to a kernel, as an event of its topic; a logged one would stay here."""
        packed = pack(m.ToDriver(epoch, message))
        self.scheduler.client_send(client, {"op": "event", "topic": topic, "event": (0.0, packed)})

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine in the background."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # else asyncio logs that it was never retrieved


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
        plugin.review.start()  # it watches also without a job, while this one is registered
