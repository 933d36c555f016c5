"""Open, drive, hand over and close jobs, on requests of kernels."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from nbelastic.cluster.dask_compat import hold_keys, shorten_batching
from nbelastic.cluster.journal import open_journal
from nbelastic.cluster.wire import FROM_KERNELS, in_parts, pack, unpack
from nbelastic.errors import OptionError
from nbelastic.membership import unpack_machine, view
from nbelastic.messages import (
    AttachRefusal,
    AttachRequest,
    DriverReplaced,
    EndRank,
    GiveUp,
    InjectFaults,
    InjectRequest,
    JobClosed,
    JobInfo,
    JobSummaries,
    JobWish,
    JournalStep,
    LimitsChanged,
    OpenRequest,
    SlotBusy,
    Text,
    encode,
)

from .controller import JobController
from .records import RANK_KEY, JobRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Scheduler

    from .plugin import ElasticPlugin

logger = logging.getLogger(__name__)

CLOSE_GRACE = 5.0
"""Seconds that ranks have to end when their job is closed, and that Dask has to see it."""

MOST_ENDED, ENDED_BYTES = 20, 64 * 2**20
"""Ended jobs that are remembered, and bytes of their histories and logs; the oldest go first."""

POLL = 0.005

KEEPER = "fire-and-forget"
"""Dask's own client for tasks without a waiting client; it releases a task when it is done."""


class JobService:
    """Opens, hands over and closes jobs."""

    def __init__(self, plugin: ElasticPlugin, scheduler: Scheduler) -> None:
        self._plugin = plugin
        self._scheduler = scheduler
        self._jobs = plugin.jobs
        self._given_up: deque[str] = deque(maxlen=100)
        self._ended: dict[str, tuple[JobInfo, bytes]] = {}  # with the packed description
        scheduler.handlers["nbelastic_open"] = self.open
        scheduler.handlers["nbelastic_attach"] = self.attach
        scheduler.handlers["nbelastic_drives"] = self.drives
        scheduler.handlers["nbelastic_close"] = self.close
        scheduler.handlers["nbelastic_payload"] = self.payload
        scheduler.handlers["nbelastic_jobs"] = self.list_jobs
        scheduler.handlers["nbelastic_look"] = self.look
        scheduler.handlers["nbelastic_wish"] = self.wish
        scheduler.stream_handlers[FROM_KERNELS] = self._take

    def _take(self, client: str, message: Any = None, **_: Any) -> None:
        """Take a message of a kernel. Raises nothing: the stream would close."""
        try:
            read: JournalStep | InjectRequest | GiveUp = unpack(
                message, JournalStep | InjectRequest | GiveUp
            )
            if isinstance(read, JournalStep):
                self.step(client, read)
            elif isinstance(read, InjectRequest):
                self.inject(client, read)
            else:
                self.give_up(client, read)
        except Exception:  # whatever is in the message
            logger.exception("a message from the kernel %s cannot be read", client)

    # -- opening and closing ---------------------------------------------------------------------

    async def open(self, message: Any) -> str:
        """Publish a job; return an empty string, or why that cannot be: ``gone`` or ``taken``."""
        asked: OpenRequest = unpack(message, OpenRequest)
        terms = asked.terms
        if self._is_gone(asked.client, asked.topic):
            return "gone"  # this came later, on a connection of its own
        if asked.job in self._jobs:
            return "taken"
        self._plugin.arbiter.open()
        record = self._jobs[asked.job] = JobRecord(
            uid=asked.uid,
            terms=replace(terms, machine=b""),
            workers=None if terms.workers is None else self._resolved(terms.workers),
            machine=unpack_machine(terms.machine),
            client=asked.client,
            topic=asked.topic,
            started=time.time(),
        )
        if terms.partitions:
            hold_keys(self._scheduler, record.holder, terms.partitions)
        self._shorten_batching(asked.client)
        journal = open_journal(asked.job, asked.uid, record.machine)
        record.controller = JobController(
            asked.job, record, self._plugin, self._plugin.chance, journal
        )
        await self._plugin.prepare(asked.job)
        return ""

    def _resolved(self, workers: tuple[str, ...]) -> frozenset[str]:
        """Return workers' names and addresses, with the scheduler's form of each address."""
        found = set(workers)
        for each in workers:
            if "://" in each:
                with contextlib.suppress(ValueError, OSError):  # no address, or an unknown host
                    found.add(self._scheduler.coerce_address(each))
        return frozenset(found)

    async def payload(self, job: str) -> dict[str, Any]:
        """Return the payload of a job."""
        return pack(self._jobs[job].terms.payload)

    async def close(self, job: str, uid: str, epoch: int, steps: int) -> list[str]:
        """Forget a job, once its ranks have ended and Dask has noticed.

        The last of the driver's steps may come later than this: they take another way. The return
        value names the workers that are free then.
        """
        record = self._jobs.get(job)
        if record is None or (record.uid, record.epoch) != (uid, epoch):
            return self._plugin.free_workers()
        record.closing = True
        self._plugin.arbiter.schedule()
        await _until(lambda: record.steps >= steps)
        over = EndRank(0, "evict", Text("the job has ended"))
        self._plugin.order(job, record, over, record.ranks)
        await _until(lambda: not record.ranks and not self._busy(record))
        self._plugin.send(record, JobClosed())
        self._plugin.drop(job)
        return self._plugin.free_workers()

    def _busy(self, record: JobRecord) -> bool:
        starts = set(range(record.machine.roster.starts)) - record.never
        keys = [record.key(start) for start in starts]
        tasks = [self._scheduler.tasks[key] for key in keys if key in self._scheduler.tasks]
        return any(task.state == "processing" for task in tasks)

    def remember(self, job: str, record: JobRecord) -> None:
        """Keep the history and the log of an ended job, for later questions."""
        if not record.steps and record.epoch == 1:
            return  # it has not begun
        record.log.results.clear()
        info = _info_of(job, record)
        info = dataclasses.replace(info, attached=False, slots=0, ended=time.time())
        self._ended.pop(job, None)
        self._ended[job] = info, encode(record.controller.describe())
        while len(self._ended) > MOST_ENDED or self._ended_bytes > ENDED_BYTES:
            del self._ended[next(iter(self._ended))]

    @property
    def _ended_bytes(self) -> int:
        return sum(len(packed) for _, packed in self._ended.values())

    async def list_jobs(self) -> dict[str, Any]:
        """Return a summary of each job, and of the newest that have ended."""
        there = [_info_of(name, record) for name, record in self._jobs.items()]
        ended = [info for name, (info, _) in self._ended.items() if name not in self._jobs]
        return pack(JobSummaries((*there, *ended)))

    def _refusal(self, job: str) -> dict[str, Any]:
        problem = "ended" if job in self._ended else "unknown"
        return pack(AttachRefusal(problem, tuple(sorted(self._jobs))))

    # -- for users who do not drive a job --------------------------------------------------------

    async def look(self, job: str) -> dict[str, Any]:
        """Return the description of a job, open or ended, without a change of driver."""
        record = self._jobs.get(job)
        if record is not None:
            return pack(record.controller.describe())
        if job in self._ended:
            return in_parts(self._ended[job][1])
        return self._refusal(job)

    async def wish(self, message: Any) -> dict[str, Any] | None:
        """Pass a user's event to a job, as if its driver's user had sent it."""
        asked: JobWish = unpack(message, JobWish)
        record = self._jobs.get(asked.job)
        if record is None or record.closing:
            return self._refusal(asked.job)
        if isinstance(asked.event, LimitsChanged):
            _check_limits(asked.event)
        record.controller.take_in(asked.event)
        return None

    # -- driving ---------------------------------------------------------------------------------

    def step(self, client: str, step: JournalStep) -> None:
        """Take a step of a driver's journal, or tell the driver of its replacement."""
        record = self._jobs.get(step.job)
        mine = self._is_driver(record, client, step.epoch)
        if record is None or not mine or not record.controller.step(step):
            self._plugin.say(client, step.topic, step.epoch, DriverReplaced())

    def inject(self, client: str, request: InjectRequest) -> None:
        """Pass faults on to ranks."""
        record = self._jobs.get(request.job)
        if record is not None and self._is_driver(record, client, request.epoch):
            effect = InjectFaults(request.faults, request.drop)
            self._plugin.order(request.job, record, effect, request.starts)

    async def drives(self, job: str, client: str, epoch: int) -> bool:
        """Return whether a job is still a driver's."""
        return self._is_driver(self._jobs.get(job), client, epoch)

    def _is_driver(self, record: JobRecord | None, client: str, epoch: int) -> bool:
        return record is not None and (record.client, record.epoch) == (client, epoch)

    # -- kernels that go and come ----------------------------------------------------------------

    async def attach(self, message: Any) -> dict[str, Any]:
        """Hand a job over to a new driver, or (`again`) back to its last driver.

        Every driver has a topic of its own, so that is known by it.
        """
        asked: AttachRequest = unpack(message, AttachRequest)
        record = self._jobs.get(asked.job)
        if record is None or record.closing or self._is_gone(asked.client, asked.topic):
            return self._refusal(asked.job)
        if asked.again and record.topic != asked.topic:
            return pack(AttachRefusal("taken"))
        if record.client is not None and record.topic != asked.topic:
            self._plugin.say(record.client, record.topic, record.epoch, DriverReplaced())
        self._shorten_batching(asked.client)
        handover = pack(record.controller.take_over(asked.client, asked.topic))
        asyncio.get_running_loop().call_soon(self._resume, asked.job, record.epoch)
        return handover

    def _shorten_batching(self, client: str) -> None:
        shorten_batching(getattr(self._scheduler, "client_comms", {}).get(client))

    def _resume(self, job: str, epoch: int) -> None:
        """Send a new driver everything to act on."""
        record = self._jobs.get(job)
        if record is None or record.epoch != epoch:
            return
        record.controller.catch_up()
        for start, slot in record.ranks.items():
            if record.key(start) not in self._scheduler.tasks:
                self._plugin.grant(record, start, slot)
        self._plugin.arbiter.decide()
        self._plugin.announce_all(job)

    def leave(self, client: str) -> None:
        """Abandon the jobs of a kernel that is gone."""
        for job, record in list(self._jobs.items()):
            if record.client == client:
                self._abandon(job, record)

    def give_up(self, client: str, message: GiveUp) -> None:
        """Cancel a pending open or attach; its request may arrive later."""
        self._given_up.append(message.topic)  # its request may come later than this
        for job, record in list(self._jobs.items()):
            if record.topic == message.topic and message.over:
                self._plugin.spawn(self.close(job, record.uid, record.epoch, record.steps))
            elif record.topic == message.topic and record.client == client:
                self._abandon(job, record)

    def _is_gone(self, client: str, topic: str) -> bool:
        return client not in self._scheduler.clients or topic in self._given_up

    def _abandon(self, job: str, record: JobRecord) -> None:
        if record.epoch == 1 and not record.steps:
            self._plugin.drop(job)  # it has not begun
            return
        self._take_back(job, record)
        record.controller.abandon()
        self._plugin.arbiter.schedule()

    def _take_back(self, job: str, record: JobRecord) -> None:
        """Take back slots for which the kernel has not submitted a task: no other will."""
        for start, slot in list(record.ranks.items()):
            if record.key(start) not in self._scheduler.tasks:
                logger.info("job %r: start %d has no task: its slot is taken back", job, start)
                self._plugin.free(job, start, slot)
                record.controller.take_in(SlotBusy(slot))

    # -- tasks -----------------------------------------------------------------------------------

    def keep_tasks(self, keys: Any, client: str) -> None:
        """Make Dask keep ranks' tasks after the loss of the submitting kernel.

        One that comes when its kernel or its worker is gone already is not wanted any more.
        """
        ours = {key for key in keys if isinstance(key, str) and key.startswith(RANK_KEY)}
        if ours:
            wanted = {rec.key(start) for rec in self._jobs.values() for start in rec.ranks}
            self._scheduler.client_desires_keys(keys=list(ours & wanted), client=KEEPER)
            asyncio.get_running_loop().call_soon(self._forget, list(ours - wanted), client)

    def forget_tasks(self, keys: list[str]) -> None:
        """Release tasks that will never finish, because Dask would keep their keys for ever."""
        self._forget(keys, KEEPER)

    def _forget(self, keys: list[str], client: str) -> None:
        known = [key for key in keys if key in self._scheduler.tasks]
        if known and client in self._scheduler.clients:
            self._scheduler.client_releases_keys(keys=known, client=client)


def _info_of(name: str, record: JobRecord) -> JobInfo:
    seen = view(record.machine, record.machine.roster.now)
    limits = record.machine.roster.limits
    return JobInfo(
        name=name,
        state=seen.state,
        size=seen.size,
        commits=seen.commits,
        started=record.started,
        attached=record.client is not None,
        priority=limits.priority,
        weight=limits.weight,
        min_np=limits.min_np,
        max_np=limits.max_np,
        slots=len(record.ranks),
        share=seen.share,
    )


def _check_limits(wish: LimitsChanged) -> None:
    """Raise an OptionError for impossible limits, because a job's limits concern all jobs."""
    for name, value in (("min_np", wish.min_np), ("max_np", wish.max_np)):
        if value is not None and value < 1:
            raise OptionError(f"{name}={value}: must be at least 1")
    if wish.weight is not None and not 0 < wish.weight < math.inf:
        raise OptionError(f"weight={wish.weight}: must be a number above 0")


async def _until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, at most CLOSE_GRACE seconds."""
    deadline = asyncio.get_running_loop().time() + CLOSE_GRACE
    while not condition() and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(POLL)
