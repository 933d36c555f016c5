"""Open, drive, hand over and close jobs, on requests of kernels."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from msgspec.structs import replace

from nbelastic import messages as m
from nbelastic.cluster.dask_compat import hold_keys, hold_nothing_back, release_keys, until
from nbelastic.cluster.wire import FROM_KERNELS, in_parts, pack, unpack
from nbelastic.membership import unpack_machine, view
from nbelastic.status import JobInfo

from .arbiter import Arbiter
from .job import ScheduledJob, say
from .leaving import Departures
from .records import RANK_KEY, tell_agent

logger = logging.getLogger(__name__)

CLOSE_GRACE = 5.0  # seconds for ranks of a closed job to end, and for Dask to see it
POLL = 0.005

KEEPER = "fire-and-forget"  # Dask's client that releases a task when it is done


class JobService:
    """Opens, hands over and closes jobs; `prepare` puts agents on the workers of one."""

    def __init__(
        self,
        arbiter: Arbiter,
        departures: Departures,
        spawn: Callable[[Coroutine[Any, Any, object]], None],
        prepare: Callable[[ScheduledJob], Awaitable[None]],
    ) -> None:
        self._arbiter, self._departures = arbiter, departures
        self._spawn, self._prepare = spawn, prepare
        self._scheduler = scheduler = arbiter.scheduler
        self._jobs = arbiter.jobs
        self._handlers: dict[type, Callable[[str, Any], None]] = {
            m.JournalStep: self.step,
            m.InjectRequest: self.inject,
            m.GiveUp: self.give_up,
        }
        self._given_up: deque[str] = deque(maxlen=100)
        for name in ("open", "attach", "drives", "close", "payload", "jobs", "look", "wish"):
            scheduler.handlers[f"nbelastic_{name}"] = getattr(self, name)
        scheduler.stream_handlers[FROM_KERNELS] = self._take

    def _take(self, client: str, message: Any = None, **_: Any) -> None:
        """Take a message of a kernel. Raises nothing: the stream would close."""
        try:
            read = unpack(message, m.JournalStep | m.InjectRequest | m.GiveUp)
            self._handlers[type(read)](client, read)
        except Exception:  # whatever is in the message
            logger.exception("a message from the kernel %s cannot be read", client)

    # -- opening and closing ---------------------------------------------------------------------

    async def open(self, message: Any) -> str:
        """Publish a job; return an empty string, or why that cannot be: ``gone`` or ``taken``."""
        asked: m.OpenRequest = unpack(message, m.OpenRequest)
        terms = asked.terms
        if self._is_gone(asked.client, asked.topic):
            return "gone"  # this came later, on a connection of its own
        if asked.job in self._jobs:
            return "taken"
        self._arbiter.open()
        job = self._jobs[asked.job] = ScheduledJob(
            asked.job,
            scheduler=self._scheduler,
            carry_out=self._carry_out,
            uid=asked.uid,
            terms=replace(terms, machine=b""),
            workers=None if terms.workers is None else self._resolved(terms.workers),
            machine=unpack_machine(terms.machine),
            client=asked.client,
            topic=asked.topic,
            started=time.time(),
        )
        if terms.partitions:
            hold_keys(self._scheduler, job.holder, terms.partitions)
        hold_nothing_back(self._scheduler.client_comms.get(asked.client))
        await self._prepare(job)
        return ""

    def _resolved(self, workers: tuple[str, ...]) -> frozenset[str]:
        """Return workers' names and addresses, with the scheduler's form of each address."""
        found = set(workers)
        for each in (name for name in workers if "://" in name):
            with contextlib.suppress(ValueError, OSError):  # no address, or an unknown host
                found.add(self._scheduler.coerce_address(each))
        return frozenset(found)

    async def payload(self, job: str) -> dict[str, Any]:
        """Return the payload of a job."""
        return pack(self._jobs[job].terms.payload)

    async def close(self, job: str, uid: str, epoch: int, steps: int) -> None:
        """Forget a job, once its ranks have ended."""
        record = self._jobs.get(job)
        if record is None or (record.uid, record.epoch) != (uid, epoch):
            return
        record.closing = True
        self._arbiter.schedule()
        # They take another way, and may come later.
        await until(lambda: record.steps >= steps, CLOSE_GRACE, POLL)
        over = m.EndRank(0, "evict", m.Text("the job has ended"))
        record.order(over, record.ranks)
        await until(lambda: not record.ranks and not self._busy(record), CLOSE_GRACE, POLL)
        record.send(m.JobClosed())
        self.drop(job)

    def drop(self, name: str) -> None:
        """Forget a job."""
        job = self._jobs.pop(name, None)
        if job is None:
            return
        job.stop()
        job.release()
        release_keys(self._scheduler, job.holder)
        self.forget_tasks([job.key(start) for start in range(job.machine.roster.starts)])
        for host in self._arbiter.workers.values():
            tell_agent(self._scheduler, host, pack(m.ForgetOrder(name)))
        self._arbiter.schedule()

    def _busy(self, job: ScheduledJob) -> bool:
        keys = [job.key(n) for n in range(job.machine.roster.starts) if n not in job.never]
        tasks = map(self._scheduler.tasks.get, keys)
        return any(task is not None and task.state == "processing" for task in tasks)

    async def jobs(self) -> dict[str, Any]:
        """Return a summary of each job."""
        return in_parts(m.encode(tuple(map(_info_of, self._jobs.values()))))

    def _refusal(self, job: str) -> dict[str, Any]:
        return pack(m.AttachRefusal("unknown", tuple(sorted(self._jobs))))

    # -- for users who do not drive a job --------------------------------------------------------

    async def look(self, job: str) -> dict[str, Any]:
        """Return the description of a job, without a change of driver."""
        return pack(self._jobs[job].describe()) if job in self._jobs else self._refusal(job)

    async def wish(self, message: Any) -> dict[str, Any] | None:
        """Pass a user's event to a job, as if its driver's user had sent it."""
        asked: m.JobWish = unpack(message, m.JobWish)
        record = self._jobs.get(asked.job)
        if record is None or record.closing:
            return self._refusal(asked.job)
        record.take_in(asked.event)
        return None

    # -- driving ---------------------------------------------------------------------------------

    def step(self, client: str, step: m.JournalStep) -> None:
        """Take a step of a driver's journal, or tell the driver of its replacement."""
        record = self._driven(step.job, client, step.epoch)
        if record is None or not record.step(step):
            say(self._scheduler, client, step.topic, step.epoch, m.DriverReplaced())

    def inject(self, client: str, request: m.InjectRequest) -> None:
        """Pass faults on to ranks."""
        if (record := self._driven(request.job, client, request.epoch)) is not None:
            record.order(request.order, request.starts)

    def _carry_out(self, job: ScheduledJob, effects: list[m.Effect]) -> None:
        """Carry out what a job's machine has decided."""
        self._arbiter.schedule()
        for effect in effects:
            if isinstance(effect, m.StartRank):
                problem = self._arbiter.claim(job, effect)
                if problem is not None:
                    job.take_in(problem)
            elif isinstance(effect, m.Publish):
                job.order(effect, [each.start for each in effect.plan.members])
            elif isinstance(effect, m.Abort | m.Notify | m.Release):
                job.order(replace(effect, starts=()), effect.starts)
            elif isinstance(effect, m.EndRank):
                job.order(effect, [effect.start])
            elif isinstance(effect, m.RestartWorker):
                self._spawn(self._departures.restart(effect.slot, str(effect.reason)))

    async def drives(self, job: str, client: str, epoch: int) -> bool:
        """Return whether a job is still a driver's."""
        return self._driven(job, client, epoch) is not None

    def _driven(self, job: str, client: str, epoch: int) -> ScheduledJob | None:
        """Return a job if it is still the driver's."""
        record = self._jobs.get(job)
        mine = record is not None and (record.client, record.epoch) == (client, epoch)
        return record if mine else None

    # -- kernels that go and come ----------------------------------------------------------------

    async def attach(self, message: Any) -> dict[str, Any]:
        """Hand a job over to a new driver, or (`again`) back to the one of its topic."""
        asked: m.AttachRequest = unpack(message, m.AttachRequest)
        record = self._jobs.get(asked.job)
        if self._is_gone(asked.client, asked.topic):
            return pack(m.AttachRefusal("gone"))
        if record is None or record.closing:
            return self._refusal(asked.job)
        if asked.again and record.topic != asked.topic:
            return pack(m.AttachRefusal("taken"))
        if record.client is not None and record.topic != asked.topic:
            record.send(m.DriverReplaced())
        hold_nothing_back(self._scheduler.client_comms.get(asked.client))
        handover = pack(record.take_over(asked.client, asked.topic))
        asyncio.get_running_loop().call_soon(self._resume, asked.job, record.epoch)
        return handover

    def _resume(self, job: str, epoch: int) -> None:
        """Send a new driver the events that were not stepped, and its slots."""
        record = self._jobs.get(job)
        if record is None or record.epoch != epoch:
            return
        for event in list(record.backlog.values()):
            record.send(event)
        for start in record.ranks:
            if record.key(start) not in self._scheduler.tasks:
                self._arbiter.grant(record, start)
        self._arbiter.decide()
        self._arbiter.announce(record, self._arbiter.workers.values())

    def leave(self, client: str) -> None:
        """Abandon the jobs of a kernel that is gone."""
        for job in list(self._jobs.values()):
            if job.client == client:
                self._abandon(job)

    def give_up(self, client: str, message: m.GiveUp) -> None:
        """Cancel a pending open or attach; its request may arrive later."""
        self._given_up.append(message.topic)
        for job in list(self._jobs.values()):
            if job.topic == message.topic and message.over:
                self._spawn(self.close(job.name, job.uid, job.epoch, job.steps))
            elif job.topic == message.topic and job.client == client:
                self._abandon(job)

    def _is_gone(self, client: str, topic: str) -> bool:
        return client not in self._scheduler.clients or topic in self._given_up

    def _abandon(self, job: ScheduledJob) -> None:
        if job.epoch == 1 and not job.steps:
            self.drop(job.name)  # it has not begun
            return
        # Slots for which the kernel has not submitted a task are taken back: no other will.
        for start, host in list(job.ranks.items()):
            if job.key(start) not in self._scheduler.tasks:
                logger.info("job %r: start %d has no task: its slot is taken back", job.name, start)
                self._arbiter.free(job.name, start, host)
                job.take_in(m.SlotBusy(host.slot.id))
        job.abandon()
        self._arbiter.schedule()

    # -- tasks -----------------------------------------------------------------------------------

    def keep_tasks(self, keys: Any, client: str) -> None:
        """Make Dask keep ranks' tasks after the loss of the submitting kernel."""
        ours = {key for key in keys if isinstance(key, str) and key.startswith(RANK_KEY)}
        if ours:
            wanted = {rec.key(start) for rec in self._jobs.values() for start in rec.ranks}
            self._scheduler.client_desires_keys(keys=list(ours & wanted), client=KEEPER)
            # Of a kernel, or for a worker, that is gone already.
            asyncio.get_running_loop().call_soon(self.forget_tasks, list(ours - wanted), client)

    def forget_tasks(self, keys: list[str], client: str = KEEPER) -> None:
        """Release tasks that will never finish, because Dask would keep their keys for ever."""
        known = [key for key in keys if key in self._scheduler.tasks]
        if known and client in self._scheduler.clients:
            self._scheduler.client_releases_keys(keys=known, client=client)


def _info_of(job: ScheduledJob) -> JobInfo:
    seen = view(job.machine)
    limits = job.machine.roster.limits
    return JobInfo(
        name=job.name,
        state=seen.state,
        size=seen.size,
        commits=seen.commits,
        started=job.started,
        attached=job.client is not None,
        priority=limits.priority,
        weight=limits.weight,
        min_np=limits.min_np,
        max_np=limits.max_np,
        slots=len(job.ranks),
        share=seen.share,
    )
