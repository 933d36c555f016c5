"""The scheduler plugin: finds workers for jobs, gives each slot to one of them, relays messages.

It decides nothing about membership; it carries facts to the drivers and orders to the agents. All
of it runs in the scheduler's event loop, so nothing here needs a lock and nothing may block.

Installed once per cluster, whatever the number of jobs, it stays when they end, without state.
An agent is put on a worker when the first job wants that worker, not before.
"""

from __future__ import annotations

import asyncio
import functools
import time
from typing import TYPE_CHECKING, Any

from distributed.diagnostics.plugin import SchedulerPlugin

from .install import Installer
from .manners import Manners
from .protocol import PLUGIN, Message
from .pulse import Pulse
from .records import Host, JobRecord, fits

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    from distributed import Scheduler

__all__ = ["ElasticPlugin"]

CLOSE_GRACE = 5.0
"""Seconds that ranks have to end when their job is closed."""

POLL = 0.005

VERSIONS_THAT_MATTER = ("nbelastic", "python", "torch")


class ElasticPlugin(SchedulerPlugin):
    """Discovery, placement and relay for all jobs on a cluster."""

    name = PLUGIN
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        """Take up work on a scheduler."""
        self._scheduler = scheduler
        self._jobs: dict[str, JobRecord] = {}
        self._hosts: dict[str, Host] = {}
        self._addresses: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._installer = Installer(scheduler, self._refuse)
        self._pulse = Pulse(self._jobs, self._hosts, self._to_driver)
        self._manners = Manners(self, scheduler)
        scheduler.handlers["nbelastic_open"] = self._open
        scheduler.handlers["nbelastic_close"] = self._close_job
        scheduler.handlers["nbelastic_payload"] = self._payload
        scheduler.stream_handlers["nbelastic-order"] = self._order
        scheduler.stream_handlers["nbelastic-hello"] = self._hello
        scheduler.stream_handlers["nbelastic-report"] = self._report
        scheduler.stream_handlers["nbelastic-beats"] = self._take_beats
        scheduler.stream_handlers["nbelastic-output"] = self._output
        scheduler.stream_handlers["nbelastic-vitals"] = self._pulse.take_vitals
        scheduler.stream_handlers["nbelastic-ended"] = self._ended
        scheduler.stream_handlers["nbelastic-leaving"] = self._leaving

    async def before_close(self) -> None:
        """Stop watching: the scheduler is closing."""
        self._pulse.stop()
        for task in self._tasks:
            task.cancel()

    # -- jobs --------------------------------------------------------------------------------------

    async def _open(self, job: str, client: str, payload: bytes, spec: dict[str, Any]) -> str:
        """Publish a job; return an empty string, or why that cannot be."""
        if job in self._jobs:
            return f"a job named {job!r} is on this cluster already"
        workers = spec["workers"]
        self._jobs[job] = JobRecord(
            client=client,
            topic=spec["topic"],
            payload=payload,
            workers=None if workers is None else set(workers),
            resources=spec["resources"],
            versions=spec["versions"],
            heartbeat_timeout=spec["heartbeat_timeout"],
        )
        self._pulse.start()
        without = self._without_agent(job)
        await asyncio.gather(*(self._installer.install(address) for address in without))
        if job in self._jobs:
            self._jobs[job].opening = False
            self._announce(job, list(self._hosts))
        return ""

    async def _close_job(self, job: str) -> None:
        """Forget a job, once what still runs of it has ended; that is told to."""
        record = self._jobs.get(job)
        if record is None:
            return
        for start, slot in list(record.ranks.items()):
            self._end(job, start, slot, "the job has ended")
        waited = 0.0
        while record.ranks and waited < CLOSE_GRACE:
            await asyncio.sleep(POLL)
            waited += POLL
        self._to_driver(job, "closed")
        self._jobs.pop(job, None)
        for host in self._hosts.values():
            self._to_agent(host.slot["id"], job, "forget")
        self._settle()

    async def _payload(self, job: str) -> bytes:
        """Return the pickled function of a job."""
        return self._jobs[job].payload

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """End the jobs of a kernel that is gone: nobody would ever decide for them again."""
        for name, record in list(self._jobs.items()):
            if record.client == client:
                record.orphaned = True
                for start, slot in list(record.ranks.items()):
                    self._end(name, start, slot, "the kernel that drove the job is gone")
                if not record.ranks:
                    self._jobs.pop(name)
        self._settle()

    def _settle(self) -> None:
        if not self._jobs:
            self._pulse.stop()

    def _end(self, job: str, start: int, slot: str, reason: str) -> None:
        self._to_agent(slot, job, "end", start=start, how="evict", reason=reason)

    # -- workers -----------------------------------------------------------------------------------

    def _without_agent(self, job: str) -> list[str]:
        record, workers = self._jobs[job], self._scheduler.workers
        return [a for a, ws in workers.items() if a not in self._addresses and fits(record, ws)]

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Put an agent on a new worker if any job wants it."""
        state = scheduler.workers[worker]
        if worker not in self._addresses and any(fits(j, state) for j in self._jobs.values()):
            self._spawn(self._installer.install(worker))

    def _refuse(self, address: str, reason: str) -> None:
        state = self._scheduler.workers.get(address)
        for name, record in self._jobs.items():
            if state is not None and fits(record, state):
                self._to_driver(name, "refused", worker=address, reason=reason)

    def _hello(self, worker: str, slot: dict[str, str], versions: dict[str, str], pid: int) -> None:
        del pid
        self._hosts[slot["id"]] = Host(slot=slot, versions=versions)
        self._addresses[worker] = slot["id"]
        self._installer.arrived(worker)
        for name in self._jobs:
            self._announce(name, [slot["id"]])

    def _announce(self, job: str, slots: Iterable[str]) -> None:
        """Tell a driver of free slots that it may use."""
        record = self._jobs.get(job)
        if record is None or record.orphaned or record.opening:
            return
        found = []
        for slot in slots:
            host = self._hosts[slot]
            state = self._scheduler.workers.get(host.slot["worker"])
            if host.holder is not None or host.leaving or state is None or not fits(record, state):
                continue
            differing = [
                f"{name} {host.versions.get(name)} (kernel: {record.versions.get(name)})"
                for name in VERSIONS_THAT_MATTER
                if host.versions.get(name) != record.versions.get(name)
            ]
            if differing:
                reason = "it runs " + ", ".join(differing)
                self._to_driver(job, "refused", worker=host.slot["worker"], reason=reason)
            else:
                found.append(host.slot)
        if found:
            self._event(job, {"kind": "SlotsFound", "slots": found})

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Tell drivers that a worker is gone."""
        slot = self._addresses.pop(worker, None)
        if slot is None:
            return
        self._hosts.pop(slot)
        detail = "its worker left the cluster"
        for name, record in list(self._jobs.items()):
            record.ranks = {start: at for start, at in record.ranks.items() if at != slot}
            self._event(name, {"kind": "SlotGone", "slot": slot, "detail": detail})
            if record.orphaned and not record.ranks:
                self._jobs.pop(name)
        self._settle()

    def mark_leaving(self, address: str) -> list[tuple[str, int]]:
        """Note that a worker was asked to leave; return the ranks that run on it."""
        slot = self._addresses.get(address)
        if slot is None:
            return []
        host = self._hosts[slot]
        host.leaving = True
        for name in self._jobs:
            self._event(name, {"kind": "SlotLeaving", "slot": slot})
        return [] if host.holder is None else [host.holder]

    def holds(self, rank: tuple[str, int]) -> bool:
        """Return whether a rank still has its slot."""
        job, start = rank
        return job in self._jobs and start in self._jobs[job].ranks

    def busy(self, address: str) -> bool:
        """Return whether a rank has the slot of a worker."""
        slot = self._addresses.get(address)
        return slot is not None and self._hosts[slot].holder is not None

    def demand(self) -> int:
        """Return how many workers all jobs together would like to have."""
        return sum(max(record.demand, len(record.ranks)) for record in self._jobs.values())

    def valid_workers_downscaling(self, scheduler: Scheduler, workers: list[Any]) -> list[Any]:
        """Have an adaptive cluster take workers without ranks before any with one."""
        without = [worker for worker in workers if not self.busy(worker.address)]
        return without or workers

    # -- from the driver ---------------------------------------------------------------------------

    def _order(self, client: str, job: str, do: str, **fields: Any) -> None:
        record = self._jobs.get(job)
        if record is None or record.client != client:
            return
        if do == "claim":
            self._claim(job, record, **fields)
        elif do == "demand":
            record.demand = fields["ranks"]
        elif do == "restart":
            self._restart(**fields)
        elif do == "end":
            slot = record.ranks.get(fields["start"])
            if slot is not None:
                self._to_agent(slot, job, "end", **fields)
        else:
            for start in fields.pop("starts"):
                slot = record.ranks.get(start)
                if slot is not None:
                    self._to_agent(slot, job, do, start=start, **fields)

    def _claim(self, job: str, record: JobRecord, start: int, slot: str) -> None:
        host = self._hosts.get(slot)
        if host is None:
            self._event(job, {"kind": "SlotGone", "slot": slot, "detail": "its worker is gone"})
        elif host.holder is not None or host.leaving:
            self._event(job, {"kind": "SlotBusy", "slot": slot})
        else:
            host.holder, host.beats, host.silence = (job, start), False, 0.0
            record.ranks[start] = slot
            self._to_driver(job, "granted", start=start)

    def _restart(self, slot: str, reason: str) -> None:
        host = self._hosts.get(slot)
        if host is not None:
            self._spawn(self._restart_worker(host.slot["worker"], reason))

    async def _restart_worker(self, address: str, reason: str) -> None:
        """Restart a worker through its nanny; without one, part with it."""
        await self._scheduler.restart_workers(
            workers=[address],
            wait_for_workers=False,
            on_error="return",
            stimulus_id=f"nbelastic-restart-{time.time()}",
        )
        if address in self._scheduler.workers and self._addresses.get(address):
            await self._scheduler.remove_worker(address, stimulus_id=f"nbelastic: {reason}")

    # -- from the agents ---------------------------------------------------------------------------

    def _report(self, worker: str, job: str, event: Message, attachment: Any) -> None:
        self._pulse.send_vitals(job)
        self._event(job, event, attachment)

    def _output(self, worker: str, job: str, start: int, text: str) -> None:
        self._to_driver(job, "output", start=start, text=text)

    def _leaving(self, worker: str, job: str, start: int) -> None:
        self.mark_leaving(worker)

    def _ended(self, worker: str, job: str, start: int) -> None:
        record = self._jobs.get(job)
        if record is not None:
            record.ranks.pop(start, None)
            record.beats.pop(start, None)
            if record.orphaned and not record.ranks:
                self._jobs.pop(job)
                self._settle()
        slot = self._addresses.get(worker)
        if slot is None:
            return
        host = self._hosts[slot]
        if host.holder == (job, start):
            host.holder = None
        for name in self._jobs:
            self._announce(name, [slot])

    def _take_beats(self, worker: str, beats: list[tuple[str, list[Any]]]) -> None:
        self._pulse.take(self._addresses.get(worker), beats)

    # -- sending -----------------------------------------------------------------------------------

    def _to_agent(self, slot: str, job: str, do: str, **fields: Any) -> None:
        host = self._hosts.get(slot)
        if host is not None and host.slot["worker"] in self._scheduler.stream_comms:
            message = {"op": PLUGIN, "job": job, "do": do, **fields}
            self._scheduler.worker_send(host.slot["worker"], message)

    def _event(self, job: str, event: Message, attachment: Any = None) -> None:
        self._to_driver(job, "event", event=event, attachment=attachment)

    def _to_driver(self, job: str, do: str, **fields: Any) -> None:
        """Send a message to a driver, as an event of the topic that it has subscribed to.

        It is not logged as an event, which would keep it in the scheduler's memory.
        """
        record = self._jobs.get(job)
        if record is not None and not record.orphaned:
            message = {"op": "event", "topic": record.topic, "event": (0.0, {"do": do, **fields})}
            self._scheduler.client_send(record.client, message)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(functools.partial(_finished, self._tasks))


def _finished(tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
    tasks.discard(task)
    if not task.cancelled():
        task.exception()
