"""Carry on one job: a copy of its membership machine, and its effects.

The driver decides in which order events happened, at what time and with which chance (its
*journal*). The copy here handles the same, so it comes to the same effects. They are carried out
here, next to the workers, so that the machine and its effects are never apart, whenever the kernel
dies. :class:`ScheduledJob` has a table of a job's states.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from distributed import Scheduler
from distributed.comm.addressing import get_address_host
from distributed.core import Status
from distributed.scheduler import WorkerState
from msgspec.structs import replace

from nbelastic import messages as m
from nbelastic.cluster.dask_compat import PeriodicCall
from nbelastic.cluster.job_log import JobLog, in_one_line
from nbelastic.cluster.wire import MUST_MATCH, pack, pack_for_ranks
from nbelastic.membership import Machine, Phase, pack_machine

from .records import RANK_KEY, WorkerRecord, tell_agent

logger = logging.getLogger(__name__)

CARETAKER_INTERVAL = 0.25  # seconds between two ticks of a caretaker
MOST_BEHIND = 200  # events that wait for a driver; above, it gets no heartbeats
MOST_WAITING = 64_000_000  # bytes that may wait for a kernel, about as many as it keeps
FEW = MOST_WAITING // 4  # bytes at which output is sent again

draw_chance = random.Random().random  # users' own random numbers are left alone

_STATUS = {Status.paused: m.UnusedReason.PAUSED, Status.closing_gracefully: m.UnusedReason.LEAVING}


@dataclass(eq=False)
class ScheduledJob:
    """An open job, with the `terms` of its opening; `carry_out` gets what its machine decides.

    ==========  ===============================================================================
    a job is    then
    ==========  ===============================================================================
    driven      events are numbered, kept, and sent to the driver; its steps name them
    abandoned   its kernel is gone: a *caretaker* hands events and time to the copy. It starts no
                ranks (only a kernel can submit tasks). All else goes on: plans, losses, the end.
                After the lease it ends the job
    taken over  a driver has attached: it gets the copy, and all events not yet stepped. Each
                driver has an *epoch*; a former one's steps are answered by ``DriverReplaced``
    ==========  ===============================================================================
    """

    name: str
    scheduler: Scheduler
    carry_out: Callable[[ScheduledJob, list[m.Effect]], None]
    uid: str  # part of its tasks' keys, so that another job of this name has others
    terms: m.JobTerms
    workers: frozenset[str] | None  # those of its terms, with the scheduler's addresses for them
    machine: Machine
    client: str | None  # id of the Dask client that drives it; None while its kernel is gone
    topic: str  # on which its driver listens
    started: float  # seconds since the epoch
    epoch: int = 1  # number of its driver
    steps: int = 0  # number of the newest step of that driver's journal
    seq: int = 0  # number of the newest event
    backlog: dict[int, m.JobEvent] = field(default_factory=dict)  # events that were not stepped
    log: JobLog = field(default_factory=JobLog)
    ranks: dict[int, WorkerRecord] = field(default_factory=dict)  # worker of each claimed start
    places: dict[int, m.Place] = field(default_factory=dict)  # place foreseen for each of them
    never: set[int] = field(default_factory=set)  # starts whose task has nothing to do any more
    beats: dict[int, m.Beat] = field(default_factory=dict)  # not passed on so far, as telemetry
    telemetry: dict[int, m.RankTelemetry] = field(default_factory=dict)
    unused: list[m.UnusedWorker] = field(default_factory=list)  # as last sent to its driver
    opening: bool = True  # workers are being prepared; its driver is told of all together
    closing: bool = False  # its driver has closed it: it cannot be taken over any more
    _muted: bool = False  # its kernel does not read: output is not sent
    _last_tick: float = 0.0
    _abandoned: float = 0.0

    def __post_init__(self) -> None:
        self._caretaker = PeriodicCall(CARETAKER_INTERVAL, self._look_after)

    def release(self) -> None:
        """Drop all that may be large: the job itself is part of a cycle, and lives on."""
        self.terms = replace(self.terms, payload=m.JobPayload(b"", b"", b""), options=b"")
        self.backlog.clear()
        self.log = JobLog()

    def key(self, start: int) -> str:
        """Return the key of a rank's task."""
        return f"{RANK_KEY}{self.uid}-{start}"

    @property
    def holder(self) -> str:
        """Name of the client, to Dask, that wants its partitions."""
        return f"nbelastic-{self.uid}"

    @property
    def demand(self) -> int:
        """Number of ranks that the job has or wants; only the present ranks without a kernel."""
        limits = self.machine.roster.limits
        if self.machine.roster.ended:
            return 0
        wanted = limits.max_np if limits.max_np is not None else max(limits.np, limits.min_np)
        return max(0 if self.client is None else wanted, len(self.ranks))

    def send(self, message: m.Message) -> None:
        """Send a message to the driver, if any."""
        if self.client is not None:
            say(self.scheduler, self.client, self.topic, self.epoch, message)

    def order(self, effect: m.RankEffect, starts: Iterable[int]) -> None:
        """Order ranks to obey an effect; it is packed once for all."""
        packed = pack_for_ranks(self.name, effect)
        for start in list(starts):
            if start in self.ranks:
                tell_agent(self.scheduler, self.ranks[start], packed(start))

    def send_output(self, message: m.RankOutput, waiting: int) -> None:
        """Send output, or once the mark of a gap, while too many bytes are `waiting`.

        A kernel that is stopped, or whose cell holds its lock for minutes, reads nothing. Dask
        keeps all messages for it meanwhile, and ranks may print gigabytes.
        """
        was_muted, self._muted = self._muted, waiting > (FEW if self._muted else MOST_WAITING)
        if not self._muted:
            self.send(message)
        elif not was_muted:
            self.send(replace(message, text="", gap=True))

    # -- workers -----------------------------------------------------------------------------------

    def misfit(self, worker: WorkerState) -> m.UnusedWorker | None:
        """Return why the job may not use a worker; names and resources are as in Dask."""
        if worker.status not in (Status.init, Status.running):
            reason = _STATUS.get(worker.status, m.UnusedReason.CLOSING)
            return m.UnusedWorker(worker.address, reason)
        if self.workers is not None:
            names = {worker.address, str(worker.name), get_address_host(worker.address)}
            if not names & self.workers:
                return m.UnusedWorker(worker.address, m.UnusedReason.NOT_IN_WORKERS)
        needs = self.terms.resources.items()
        has = {key: worker.resources.get(key, 0) for key, _ in needs}
        lacking = ", ".join(f"{k} {has[k]:g} of {need:g}" for k, need in needs if has[k] < need)
        reason = m.UnusedReason.LACKS_RESOURCES
        return m.UnusedWorker(worker.address, reason, lacking) if lacking else None

    def obstacle(self, worker: WorkerState, record: WorkerRecord) -> m.UnusedWorker | None:
        """Return why a worker with an agent and without a rank of the job is not offered to it."""
        if problem := self.misfit(worker):
            return problem
        if record.holder is not None:
            return m.UnusedWorker(worker.address, m.UnusedReason.TAKEN, record.holder[0])
        if record.leaving:
            return m.UnusedWorker(worker.address, m.UnusedReason.LEAVING)
        if versions := self.differing(record):
            return m.UnusedWorker(worker.address, m.UnusedReason.OTHER_VERSIONS, versions)
        return None

    def is_busy(self, worker: WorkerState) -> bool:
        """Whether other tasks have the threads or resources that a rank's task waits for."""
        others = [task for task in worker.processing if not str(task.key).startswith(RANK_KEY)]
        in_pool = [task for task in others if task not in worker.long_running]
        return len(in_pool) >= worker.nthreads or any(
            worker.resources.get(name, 0) - need
            < sum((task.resource_restrictions or {}).get(name, 0) for task in others)
            for name, need in self.terms.resources.items()
        )

    def differing(self, record: WorkerRecord) -> str:
        """Return the versions of a worker that differ from the kernel's."""
        return ", ".join(
            f"{name} {record.versions.get(name)} (kernel: {self.terms.versions.get(name)})"
            for name in MUST_MATCH
            if record.versions.get(name) != self.terms.versions.get(name)
        )

    # -- driven ----------------------------------------------------------------------------------

    def take_in(
        self, event: m.Event, result: bytes | None = None, error: m.PackedError | None = None
    ) -> None:
        """Take in an event; the driver decides when it happened."""
        if isinstance(event, m.Beats) and len(self.backlog) > MOST_BEHIND:
            return
        self.log.note_event(event, result, error)
        self.seq += 1
        self.backlog[self.seq] = m.JobEvent(self.seq, event, result, error)
        self.send(self.backlog[self.seq])
        if self.client is None:
            asyncio.get_running_loop().call_soon(self._drain)

    def step(self, step: m.JournalStep) -> bool:
        """Take a step of the driver's journal; return False if an earlier step is missing."""
        if step.number <= self.steps:
            return True  # sent twice
        if step.number != self.steps + 1:
            return False
        self.steps = step.number
        event = self.backlog.pop(step.seq).event if step.event is None else step.event
        self._apply(event, step.now, step.chance)
        return True

    def _apply(self, event: m.Event, now: float, chance: float) -> None:
        machine = self.machine
        effects = machine.handle(event, now, chance)
        for effect in effects:
            entry = self.log.note_effect(effect, machine.roster.size, event)
            if entry is not None:
                logger.info("job %r: %s", self.name, in_one_line(entry))
        if effects or isinstance(event, m.LimitsChanged):
            self.carry_out(self, effects)

    # -- abandoned -------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Start the caretaker: the kernel is gone."""
        self.client = None
        self._last_tick = self._abandoned = asyncio.get_running_loop().time()
        words = f"its kernel is gone; it goes on for up to {self.terms.lease:g} s"
        self._note("abandoned", m.Text(words))
        self._caretaker.start()
        self._drain()

    def _note(self, kind: str, reason: m.Reason) -> None:
        generation = self.machine.roster.generation
        size = self.machine.roster.present
        entry = self.log.note(m.Record(kind, generation, size=size, reason=reason))
        logger.info("job %r: %s", self.name, in_one_line(entry))

    def _drain(self) -> None:
        """Hand the waiting events to the machine."""
        while self.client is None and self.backlog:
            self._decide(self.backlog.pop(next(iter(self.backlog))).event)

    def _decide(self, event: m.Event) -> None:
        """Decide without a driver; a pause of the scheduler is no time."""
        last_tick, self._last_tick = self._last_tick, asyncio.get_running_loop().time()
        passed = min(self._last_tick - last_tick, 4 * CARETAKER_INTERVAL)
        self._apply(event, self.machine.roster.now + passed, draw_chance())

    def _look_after(self) -> None:
        """Advance the machine's time, and end the job with its lease."""
        self._drain()
        if self._expired and not self.machine.roster.ended:
            why = f"ended, because no kernel attached to it within {self.terms.lease:g} s"
            self._decide(m.StopRequested(now=True, reason=why))
        else:
            self._decide(m.Tick())

    @property
    def _expired(self) -> bool:
        return asyncio.get_running_loop().time() >= self._abandoned + self.terms.lease

    @property
    def over(self) -> bool:
        """Whether it has ended without a kernel, and its lease is over: it can be dropped."""
        ended = self.machine.roster.phase == Phase.ENDED
        return ended and self.client is None and self._expired

    def stop(self) -> None:
        """Stop the caretaker."""
        self._caretaker.stop()

    # -- taken over ------------------------------------------------------------------------------

    def take_over(self, client: str, topic: str) -> m.JobHandover:
        """Hand the job over to a driver; return its :class:`JobHandover`."""
        self._caretaker.stop()
        self.client, self.topic = client, topic
        self.epoch += 1
        self.steps = 0
        self._note("attached", m.KERNEL_ATTACHED)
        return self.describe()

    def describe(self) -> m.JobHandover:
        """Return all that is known of the job."""
        return m.JobHandover(
            epoch=self.epoch,
            uid=self.uid,
            seq=min(self.backlog, default=self.seq + 1) - 1,
            machine=pack_machine(self.machine),
            options=self.terms.options,
            started=self.started,
            log=self.log.contents(),
        )


def say(scheduler: Scheduler, client: str, topic: str, epoch: int, message: m.Message) -> None:
    """Send a message to a kernel, as an event of its topic; a logged one would stay here."""
    packed = pack(m.ToDriver(epoch, message))
    scheduler.client_send(client, {"op": "event", "topic": topic, "event": (0.0, packed)})
