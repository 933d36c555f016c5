"""Find workers for jobs, assign each slot to a single job, and relay messages.

The plugin decides nothing about membership; it carries facts to the drivers and orders to the
agents. It stays when all jobs have ended, without state.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Callable, Coroutine
from typing import Any

from distributed import Scheduler
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin
from msgspec.structs import replace

from nbelastic import messages as m
from nbelastic.cluster.dask_compat import PeriodicCall, hold_nothing_back, unsent_bytes
from nbelastic.cluster.wire import FROM_AGENTS, PLUGIN, pack, unpack
from nbelastic.cluster.worker.agent import Agent
from nbelastic.errors import VersionMismatch

from .arbiter import Arbiter
from .heartbeats import HeartbeatMonitor
from .job import ScheduledJob
from .job_service import JobService
from .leaving import STANDING, Departures
from .records import RANK_KEY, WorkerRecord, tell_agent

logger = logging.getLogger(__name__)

HELLO_TIMEOUT = 10.0  # seconds that a worker may take for its hello once it has its agent
REVIEW_INTERVAL = 0.5  # seconds between two reviews of the workers that are not offered to a job


class ElasticPlugin(SchedulerPlugin):
    """Discovery, placement and relay for all jobs on a cluster."""

    name = PLUGIN
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        """Take up work on a scheduler."""
        self.scheduler = scheduler
        self.jobs: dict[str, ScheduledJob] = {}
        self.workers: dict[str, WorkerRecord] = {}  # by address
        self._refused: dict[str, str] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self.review = PeriodicCall(REVIEW_INTERVAL, self._review_all)
        self._installing: dict[str, asyncio.Event] = {}  # until the hello, by address
        self._heartbeats = HeartbeatMonitor(scheduler, self.jobs, self.workers)
        self.arbiter = Arbiter(scheduler, self.jobs, self.workers)
        self.departures = Departures(self.arbiter, self._spawn)
        self._handlers: dict[type[m.Message], Callable[[str, Any], object]] = {
            m.Hello: self._hello,
            m.RankEvent: self._report,
            m.Heartbeats: self._take_beats,
            m.RankOutput: self._output,
            m.RankTelemetry: self._heartbeats.take_telemetry,
            m.FaultReport: self._fault,
            m.RankEnded: self._ended,
            m.RankLeaving: lambda worker, _: self.departures.mark_leaving(worker, soon=True),
            m.NoticeReport: self._take_notice,
        }
        scheduler.stream_handlers[FROM_AGENTS] = self._take
        self.service = JobService(self.arbiter, self.departures, self._spawn, self._prepare)

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

    async def _prepare(self, job: ScheduledJob) -> None:
        """Put agents on the workers that a job may use, and tell its driver of all together."""
        self._heartbeats.start()
        self.review.start()
        there = self.scheduler.workers.items()
        without = [a for a, state in there if a not in self.workers and not job.misfit(state)]
        await asyncio.gather(*map(self._install_agent, without))
        if self.jobs.get(job.name) is job:
            job.opening = False
            self.arbiter.decide()
            self.departures.announce_risks()
            self.arbiter.announce(job, self.workers.values())
            self._review_job(job)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Carry on a lost kernel's jobs, until another kernel attaches."""
        self.service.leave(client)

    # One that comes again may have been away unnoticed: messages to it in between are lost.
    add_client = remove_client

    def update_graph(
        self, scheduler: Scheduler, *, client: str, keys: Any = (), **kwargs: Any
    ) -> None:
        """Keep ranks' tasks after the loss of the submitting kernel."""
        self.service.keep_tasks(keys, client)

    # -- workers -----------------------------------------------------------------------------------

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Put an agent on a new worker if any job, or the watch for notices, wants it."""
        state, standing = scheduler.workers[worker], self.departures.standing
        if worker in self.workers or worker in self._refused or worker in self._installing:
            return
        wanted = any(job.misfit(state) is None for job in self.jobs.values())
        if wanted or (standing and state.status is Status.running):
            self._spawn(self._install_agent(worker))

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
        self.departures.arrived(host)
        for job in self.jobs.values():
            self.arbiter.announce(job, [host])
        self.arbiter.schedule()

    def _review_all(self) -> None:
        for job in [each for each in self.jobs.values() if each.over]:
            self.service.drop(job.name)
        self.departures.review()
        if not self.jobs:
            self._heartbeats.stop()
            self.arbiter.stop()
            if not self.departures.standing:
                self.review.stop()
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
            self.arbiter.announce(job, [self.workers[address] for address in free])

    def _unused(self, job: ScheduledJob, address: str) -> m.UnusedWorker | None:
        """Return why a job is not offered a worker; None if offered, or in use by its rank."""
        state = self.scheduler.workers[address]
        host = self.workers.get(address)
        if host is not None and host not in job.ranks.values():
            problem = job.obstacle(state, host)
            if problem is not None or self.arbiter.offers(job, host):
                return problem
            if other := self.arbiter.reserved.get(host.slot.id):
                return m.UnusedWorker(address, m.UnusedReason.RESERVED, other)
            excluded = job.machine.roster.excluded(host.slot)
            if self.arbiter.has_its_share(job) and not excluded:
                return m.UnusedWorker(address, m.UnusedReason.BEYOND_SHARE)
            return None
        if host is not None:  # of one that has its rank, if that cannot begin
            waits = not host.has_beaten and job.is_busy(state)
            return m.UnusedWorker(address, m.UnusedReason.BUSY) if waits else None
        refusal = self._refused.get(address, "")
        reason = m.UnusedReason.REFUSED if refusal else m.UnusedReason.BEING_PREPARED
        return job.misfit(state) or m.UnusedWorker(address, reason, refusal)

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
            self.service.forget_tasks([job.key(start) for start in lost])
            self._heartbeats.send_beats(job)  # the last ones tell how far a lost rank had come
            job.take_in(m.SlotGone(host.slot.id))
        self.arbiter.schedule()

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
                self.arbiter.free(job.name, start, job.ranks.get(start))

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
        tell_agent(self.scheduler, host, pack(order))

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
            self.departures.take(host, message.notice)

    def _ended(self, worker: str, message: m.RankEnded) -> None:
        if message.never and message.job in self.jobs:
            self.jobs[message.job].never.add(message.start)
        self.arbiter.free(message.job, message.start, self.workers.get(worker))

    def _take_beats(self, worker: str, message: m.Heartbeats) -> None:
        host = self.workers.get(worker)
        self._heartbeats.take(host, message.beats)
        for job, beat in message.beats:  # of ranks that no job knows (any more)
            known = job in self.jobs and self.jobs[job].ranks.get(beat.start) is host
            if host is not None and not known:
                self._evict(host, job, beat.start, "the job goes on without this rank")

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
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
    Azure. Each worker watches for the end of its own SLURM or PBS job. On a notice, the workers of
    the host are retired at once: Dask moves their data to other workers, and runs their tasks
    there. If the data has nowhere to go, that is tried again, after 5 s and then each 10 s.

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
