"""The desk at which jobs are opened, driven, taken over and closed, in the scheduler's loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from nbelastic.membership import SlotBusy, from_dict, pack_event, view

from .conductor import Conductor
from .records import RANK_KEY, JobRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Scheduler

    from .plugin import ElasticPlugin
    from .protocol import Message

__all__ = ["Desk"]

CLOSE_GRACE = 5.0
"""Seconds that ranks have to end when their job is closed, and that Dask has to see it."""

POLL = 0.005

KEEPER = "fire-and-forget"
"""Dask's own client for tasks that nobody waits for: it lets go of a task when it is done."""


class Desk:
    """Opens, hands over and closes jobs.

    Parameters
    ----------
    plugin : ElasticPlugin
        Whose jobs.
    scheduler : distributed.Scheduler
        Where.
    """

    def __init__(self, plugin: ElasticPlugin, scheduler: Scheduler) -> None:
        self._plugin = plugin
        self._scheduler = scheduler
        self._jobs = plugin.jobs
        self._given_up: deque[str] = deque(maxlen=100)
        scheduler.handlers["nbelastic_open"] = self.open
        scheduler.handlers["nbelastic_attach"] = self.attach
        scheduler.handlers["nbelastic_drives"] = self.drives
        scheduler.handlers["nbelastic_close"] = self.close
        scheduler.handlers["nbelastic_payload"] = self.payload
        scheduler.handlers["nbelastic_jobs"] = self.tell_jobs
        scheduler.stream_handlers["nbelastic-step"] = self.step
        scheduler.stream_handlers["nbelastic-order"] = self.order
        scheduler.stream_handlers["nbelastic-give-up"] = self.give_up

    # -- opening and closing ---------------------------------------------------------------------

    async def open(
        self, job: str, client: str, topic: str, payload: bytes, spec: dict[str, Any]
    ) -> str:
        """Publish a job; return an empty string, or why that cannot be: ``gone`` or ``taken``."""
        if self._is_gone(client, topic):
            return "gone"  # this came later, on a connection of its own
        if job in self._jobs:
            return "taken"
        workers = spec["workers"]
        record = self._jobs[job] = JobRecord(
            client=client,
            topic=topic,
            payload=payload,
            workers=None if workers is None else set(workers),
            resources=spec["resources"],
            versions=spec["versions"],
            heartbeat_timeout=spec["heartbeat_timeout"],
            lease=spec["lease"],
            options=spec["options"],
            machine=from_dict(spec["machine"]),
            uid=spec["uid"],
            started=time.time(),
        )
        record.conductor = Conductor(job, record, self._plugin, self._plugin.chance)
        await self._plugin.prepare(job)
        return ""

    async def payload(self, job: str) -> bytes:
        """Return the pickled function of a job."""
        return self._jobs[job].payload

    async def close(self, job: str, uid: str, epoch: int, steps: int) -> None:
        """Forget a job, once what still runs of it has ended and Dask has seen that.

        The last of the driver's steps may come later than this: they take another way.
        """
        record = self._jobs.get(job)
        if record is None or (record.uid, record.epoch) != (uid, epoch):
            return
        record.closing = True
        await _until(lambda: record.steps >= steps)
        for start, slot in list(record.ranks.items()):
            reason = "the job has ended"
            self._plugin.to_agent(slot, job, "end", start=start, how="evict", reason=reason)
        await _until(lambda: not record.ranks and not self._busy(record))
        self._plugin.send(record, "closed")
        self._plugin.drop(job)

    def _busy(self, record: JobRecord) -> bool:
        keys = [record.key(start) for start in range(record.machine.roster.starts)]
        tasks = [self._scheduler.tasks[key] for key in keys if key in self._scheduler.tasks]
        return any(task.state == "processing" for task in tasks)

    async def tell_jobs(self) -> list[dict[str, Any]]:
        """Return what there is to know of each job."""
        found = []
        for name, record in self._jobs.items():
            seen = view(record.machine, record.machine.roster.now)
            found.append(
                {
                    "name": name,
                    "state": seen.state,
                    "size": seen.size,
                    "commits": seen.commits,
                    "started": record.started,
                    "attached": record.client is not None,
                }
            )
        return found

    # -- driving ---------------------------------------------------------------------------------

    def step(
        self,
        client: str,
        job: str,
        topic: str,
        epoch: int,
        number: int,
        now: float,
        chance: float,
        seq: int = 0,
        event: Message | None = None,
    ) -> None:
        """Take one step of a driver's journal; tell it if the job is not its own any more."""
        record = self._jobs.get(job)
        mine = self._is_driver(record, client, epoch)
        if record is None or not mine or not record.conduct.step(number, now, chance, seq, event):
            self._plugin.say(client, topic, {"do": "stale", "epoch": epoch})

    def order(self, client: str, job: str, epoch: int, do: str, **fields: Any) -> None:
        """Pass something on to ranks that has nothing to do with membership."""
        record = self._jobs.get(job)
        if record is None or not self._is_driver(record, client, epoch):
            return
        for start in fields.pop("starts"):
            slot = record.ranks.get(start)
            if slot is not None:
                self._plugin.to_agent(slot, job, do, start=start, **fields)

    async def drives(self, job: str, client: str, epoch: int) -> bool:
        """Return whether a job is still a driver's."""
        return self._is_driver(self._jobs.get(job), client, epoch)

    def _is_driver(self, record: JobRecord | None, client: str, epoch: int) -> bool:
        return record is not None and (record.client, record.epoch) == (client, epoch)

    # -- kernels that go and come ----------------------------------------------------------------

    async def attach(self, job: str, client: str, topic: str, again: bool) -> dict[str, Any]:
        """Hand a job over to a driver: a new one, or (`again`) the one that had it last.

        Every driver has a topic of its own, so that is known by it.
        """
        record = self._jobs.get(job)
        if record is None or record.closing or self._is_gone(client, topic):
            return {"problem": "unknown", "jobs": sorted(self._jobs)}
        if again and record.topic != topic:
            return {"problem": "taken"}
        if record.client is not None and record.topic != topic:
            self._plugin.say(record.client, record.topic, {"do": "stale", "epoch": record.epoch})
        packed = record.conduct.take_over(client, topic)
        asyncio.get_running_loop().call_soon(self._resume, job, record.epoch)
        return packed

    def _resume(self, job: str, epoch: int) -> None:
        """Tell a new driver all that it has to act on."""
        record = self._jobs.get(job)
        if record is None or record.epoch != epoch:
            return
        record.conduct.catch_up()
        for start, slot in record.ranks.items():
            if record.key(start) not in self._scheduler.tasks:
                self._plugin.grant(record, start, slot)
        self._plugin.announce_all(job)

    def leave(self, client: str) -> None:
        """Take note that a kernel is gone."""
        for job, record in list(self._jobs.items()):
            if record.client == client:
                self._abandon(job, record)

    async def give_up(self, client: str, topic: str, over: bool) -> None:
        """Take note that a kernel does not wait any more for what it has asked for."""
        self._given_up.append(topic)  # what it has asked for may come later than this
        for job, record in list(self._jobs.items()):
            if record.topic == topic and over:
                await self.close(job, record.uid, record.epoch, record.steps)
            elif record.topic == topic and record.client == client:
                self._abandon(job, record)

    def _is_gone(self, client: str, topic: str) -> bool:
        return client not in self._scheduler.clients or topic in self._given_up

    def _abandon(self, job: str, record: JobRecord) -> None:
        if record.epoch == 1 and not record.steps:
            self._plugin.drop(job)  # it has not begun
            return
        self._take_back(job, record)
        record.conduct.abandon()

    def _take_back(self, job: str, record: JobRecord) -> None:
        """Take back slots for which the kernel has not submitted a task: nobody will."""
        for start, slot in list(record.ranks.items()):
            if record.key(start) not in self._scheduler.tasks:
                self._plugin.free(job, start, slot)
                record.conduct.take_in(pack_event(SlotBusy(slot)))

    # -- tasks -----------------------------------------------------------------------------------

    def keep_tasks(self, keys: Any, client: str) -> None:
        """Have Dask keep ranks' tasks when the kernel that has submitted them is gone.

        One that comes when its kernel or its worker is gone already is not wanted any more.
        """
        ours = {key for key in keys if isinstance(key, str) and key.startswith(RANK_KEY)}
        if ours:
            wanted = {rec.key(start) for rec in self._jobs.values() for start in rec.ranks}
            self._scheduler.client_desires_keys(keys=list(ours & wanted), client=KEEPER)
            asyncio.get_running_loop().call_soon(self._forget, list(ours - wanted), client)

    def forget_tasks(self, keys: list[str]) -> None:
        """Let go of tasks that will never run to an end: Dask would keep them for ever."""
        self._forget(keys, KEEPER)

    def _forget(self, keys: list[str], client: str) -> None:
        known = [key for key in keys if key in self._scheduler.tasks]
        if known and client in self._scheduler.clients:
            self._scheduler.client_releases_keys(keys=known, client=client)


async def _until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, at most CLOSE_GRACE seconds."""
    deadline = asyncio.get_running_loop().time() + CLOSE_GRACE
    while not condition() and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(POLL)
