"""The scheduler plugin: finds workers for jobs, gives each slot to one of them, relays messages.

It decides nothing about membership; it carries facts to the drivers and orders to the agents. All
of it runs in the scheduler's event loop, so nothing here needs a lock and nothing may block.

Installed once per cluster, whatever the number of jobs, it stays when they end, without state.
An agent is put on a worker when the first job wants that worker, not before.
"""

from __future__ import annotations

import asyncio
import functools
import random
import time
from typing import TYPE_CHECKING, Any

from distributed.diagnostics.plugin import SchedulerPlugin

from nbelastic.membership import SlotBusy, SlotGone, pack_place

from .desk import Desk
from .haste import hasten
from .install import Installer
from .manners import Manners
from .protocol import PLUGIN, Message
from .pulse import Pulse
from .records import Host, JobRecord, fits

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    from distributed import Scheduler

    from nbelastic.membership import Event, Slot, StartRank

    from .look import Process

__all__ = ["ElasticPlugin"]

VERSIONS_THAT_MATTER = ("nbelastic", "python", "torch")


class ElasticPlugin(SchedulerPlugin):
    """Discovery, placement and relay for all jobs on a cluster."""

    name = PLUGIN
    idempotent = True
    chance = staticmethod(random.Random().random)  # users' own random numbers are left alone

    async def start(self, scheduler: Scheduler) -> None:
        """Take up work on a scheduler."""
        self._scheduler = scheduler
        self.jobs: dict[str, JobRecord] = {}
        self._hosts: dict[str, Host] = {}
        self._addresses: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._installer = Installer(scheduler, self._refuse)
        self._pulse = Pulse(scheduler, self.jobs, self._hosts, self._to_driver)
        self._manners = Manners(self, scheduler)
        self._desk = Desk(self, scheduler)
        scheduler.stream_handlers["nbelastic-hello"] = self._hello
        scheduler.stream_handlers["nbelastic-report"] = self._report
        scheduler.stream_handlers["nbelastic-beats"] = self._take_beats
        scheduler.stream_handlers["nbelastic-output"] = self._output
        scheduler.stream_handlers["nbelastic-vitals"] = self._pulse.take_vitals
        scheduler.stream_handlers["nbelastic-harm"] = self._harm
        scheduler.stream_handlers["nbelastic-ended"] = self._ended
        scheduler.stream_handlers["nbelastic-leaving"] = self._leaving

    async def before_close(self) -> None:
        """Stop watching: the scheduler is closing."""
        self._pulse.stop()
        for record in self.jobs.values():
            record.conduct.stop()
        for task in self._tasks:
            task.cancel()

    # -- jobs --------------------------------------------------------------------------------------

    async def prepare(self, job: str) -> None:
        """Put agents on the workers that a job may use, and tell its driver of all together."""
        self._pulse.start()
        without = self._without_agent(job)
        await asyncio.gather(*(self._installer.install(address) for address in without))
        if job in self.jobs:
            self.jobs[job].opening = False
            self.announce_all(job)

    def drop(self, job: str) -> None:
        """Forget a job."""
        record = self.jobs.pop(job, None)
        if record is None:
            return
        record.conduct.stop()
        self._desk.forget_tasks([record.key(s) for s in range(record.machine.roster.starts)])
        for host in self._hosts.values():
            self.to_agent(host.slot["id"], job, "forget")
        self._settle()

    def add_client(self, scheduler: Scheduler, client: str) -> None:
        """Take note that a kernel is back that was not known to be away.

        What it was told meanwhile is lost; it hears that it has to attach again.
        """
        self._desk.leave(client)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Carry on the jobs of a kernel that is gone, until another attaches to them."""
        self._desk.leave(client)

    def update_graph(
        self, scheduler: Scheduler, *, client: str, keys: Any = (), **kwargs: Any
    ) -> None:
        """Keep ranks' tasks when the kernel that has submitted them is gone."""
        self._desk.keep_tasks(keys, client)

    def _settle(self) -> None:
        if not self.jobs:
            self._pulse.stop()

    # -- workers -----------------------------------------------------------------------------------

    def _without_agent(self, job: str) -> list[str]:
        record, workers = self.jobs[job], self._scheduler.workers
        return [a for a, ws in workers.items() if a not in self._addresses and fits(record, ws)]

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Put an agent on a new worker if any job wants it."""
        state = scheduler.workers[worker]
        if worker not in self._addresses and any(fits(j, state) for j in self.jobs.values()):
            self._spawn(self._installer.install(worker))

    def _refuse(self, address: str, reason: str) -> None:
        state = self._scheduler.workers.get(address)
        for name, record in self.jobs.items():
            if state is not None and fits(record, state):
                self._to_driver(name, "refused", worker=address, reason=reason)

    def _hello(
        self, worker: str, slot: dict[str, str], versions: dict[str, str], process: Process
    ) -> None:
        self._hosts[slot["id"]] = Host(slot=slot, versions=versions, process=process)
        self._addresses[worker] = slot["id"]
        self._installer.arrived(worker)
        hasten(self._scheduler.stream_comms.get(worker))
        self._pulse.acquaint(slot["id"])
        for name in self.jobs:
            self._announce(name, [slot["id"]])

    def announce_all(self, job: str) -> None:
        """Tell a driver of all free slots that it may use."""
        self._announce(job, list(self._hosts))

    def _announce(self, job: str, slots: Iterable[str]) -> None:
        record = self.jobs.get(job)
        if record is None or record.client is None or record.opening:
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
        self._installer.arrived(worker)  # nobody needs to wait for its agent any more
        slot = self._addresses.pop(worker, None)
        if slot is None:
            return
        self._hosts.pop(slot)
        detail = "its worker left the cluster"
        for name, record in list(self.jobs.items()):
            lost = [start for start, at in record.ranks.items() if at == slot]
            for start in lost:
                record.ranks.pop(start)
            self._desk.forget_tasks([record.key(start) for start in lost])
            self._event(name, {"kind": "SlotGone", "slot": slot, "detail": detail})

    def mark_leaving(self, address: str) -> list[tuple[str, int]]:
        """Note that a worker was asked to leave; return the ranks that run on it."""
        slot = self._addresses.get(address)
        if slot is None:
            return []
        host = self._hosts[slot]
        host.leaving = True
        for name in self.jobs:
            self._event(name, {"kind": "SlotLeaving", "slot": slot})
        return [] if host.holder is None else [host.holder]

    def holds(self, rank: tuple[str, int]) -> bool:
        """Return whether a rank still has its slot."""
        job, start = rank
        return job in self.jobs and start in self.jobs[job].ranks

    def busy(self, address: str) -> bool:
        """Return whether a rank has the slot of a worker."""
        slot = self._addresses.get(address)
        return slot is not None and self._hosts[slot].holder is not None

    def demand(self) -> int:
        """Return how many workers all jobs together would like to have."""
        return sum(record.demand for record in self.jobs.values())

    def valid_workers_downscaling(self, scheduler: Scheduler, workers: list[Any]) -> list[Any]:
        """Have an adaptive cluster take workers without ranks before any with one."""
        without = [worker for worker in workers if not self.busy(worker.address)]
        return without or workers

    # -- for conductors ----------------------------------------------------------------------------

    def claim(self, job: str, record: JobRecord, effect: StartRank) -> Event | None:
        """Give a slot to a rank; return what there is to tell if that cannot be."""
        slot = effect.slot.id
        host = self._hosts.get(slot)
        if host is None:
            return SlotGone(slot, "its worker is gone")
        if host.holder is not None or host.leaving or record.client is None:
            return SlotBusy(slot)  # without a kernel nobody can start a rank on it
        host.holder, host.beats, host.silence = (job, effect.start), False, 0.0
        record.ranks[effect.start] = slot
        record.places[effect.start] = pack_place(effect.place)
        self.grant(record, effect.start, slot)
        return None

    def free(self, job: str, start: int, slot: str | None) -> None:
        """Take a slot back from a rank, and offer it to all."""
        record = self.jobs.get(job)
        if record is not None:
            record.ranks.pop(start, None)
            record.beats.pop(start, None)
            record.places.pop(start, None)
        if slot is not None:
            if self._hosts[slot].holder == (job, start):
                self._hosts[slot].holder = None
            for name in self.jobs:
                self._announce(name, [slot])

    def grant(self, record: JobRecord, start: int, slot: str) -> None:
        """Have the driver start a rank on a slot that it was given."""
        place = record.places[start]
        self.send(record, "granted", start=start, slot=self._hosts[slot].slot, place=place)

    def renew(self, slot: Slot, reason: str) -> None:
        """Restart a worker through its nanny; without one, part with it."""
        if slot.id in self._hosts:
            self._spawn(self._restart_worker(slot.worker, reason))

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

    def _harm(self, worker: str, job: str, **fields: Any) -> None:
        if job in self.jobs:
            self.send(self.jobs[job], "harm", worker=worker, **fields)

    def _leaving(self, worker: str, job: str, start: int) -> None:
        self.mark_leaving(worker)

    def _ended(self, worker: str, job: str, start: int) -> None:
        self.free(job, start, self._addresses.get(worker))

    def _take_beats(self, worker: str, beats: list[tuple[str, list[Any]]]) -> None:
        slot = self._addresses.get(worker)
        self._pulse.take(slot, beats)
        for job, (start, *_) in beats:  # of ranks that nobody knows (any more)
            if slot is not None and (
                job not in self.jobs or self.jobs[job].ranks.get(start) != slot
            ):
                reason = "the job goes on without this rank"
                self.to_agent(slot, job, "end", start=start, how="evict", reason=reason)

    # -- sending -----------------------------------------------------------------------------------

    def to_agent(self, slot: str, job: str, do: str, **fields: Any) -> None:
        """Send a message to the agent of a slot."""
        host = self._hosts.get(slot)
        if host is not None and host.slot["worker"] in self._scheduler.stream_comms:
            message = {"op": PLUGIN, "job": job, "do": do, **fields}
            self._scheduler.worker_send(host.slot["worker"], message)

    def _event(self, job: str, event: Message, attachment: Any = None) -> None:
        self._to_driver(job, "event", event=event, attachment=attachment)

    def _to_driver(self, job: str, do: str, **fields: Any) -> None:
        record = self.jobs.get(job)
        if record is None:
            return
        if do == "event":
            record.conduct.take_in(**fields)
        else:
            record.archive.note_message(do, fields)
            self.send(record, do, **fields)

    def send(self, record: JobRecord, do: str, **fields: Any) -> None:
        """Send a message to a job's driver, if it has one."""
        if record.client is not None:
            self.say(record.client, record.topic, {"do": do, "epoch": record.epoch, **fields})

    def say(self, client: str, topic: str, message: Message) -> None:
        """Send a message to a kernel, as an event of the topic that it has subscribed to.

        It is not logged as an event, which would keep it in the scheduler's memory.
        """
        event = {"op": "event", "topic": topic, "event": (0.0, message)}
        self._scheduler.client_send(client, event)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(functools.partial(_finished, self._tasks))


def _finished(tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
    tasks.discard(task)
    if not task.cancelled():
        task.exception()
