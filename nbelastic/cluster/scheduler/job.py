"""Carry on one job: a copy of its membership machine, and its effects.

The driver decides in which order events happened, at what time and with which chance (its
*journal*). The copy here handles the same, so it comes to the same effects. They are carried out
here, next to the workers, so that the machine and its effects are never apart, whenever the kernel
dies. :class:`ScheduledJob` has a table of a job's states.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from nbelastic.cluster.dask_compat import PeriodicCall
from nbelastic.cluster.job_log import JobLog, in_one_line
from nbelastic.membership import Machine, Phase, pack_machine
from nbelastic.messages import (
    KERNEL_ATTACHED,
    Abort,
    Beat,
    Beats,
    Effect,
    EndRank,
    Event,
    JobEvent,
    JobHandover,
    JobPayload,
    JobTerms,
    JournalStep,
    KernelLost,
    LimitsChanged,
    Message,
    Notify,
    PackedError,
    Place,
    Publish,
    RankOutput,
    RankTelemetry,
    Reason,
    Record,
    Release,
    RestartWorker,
    SaveCommit,
    StartRank,
    StopReason,
    StopRequested,
    Tick,
    UnusedWorker,
)

from .records import RANK_KEY, WorkerRecord

if TYPE_CHECKING:
    from nbelastic.cluster.journal import JournalFile

    from .plugin import ElasticPlugin

logger = logging.getLogger(__name__)

CARETAKER_INTERVAL = 0.25
"""Seconds between two ticks of a caretaker."""

MOST_BEHIND = 200
"""Events that a driver may be behind; above, it gets no heartbeats, which the next replace."""

MOST_WAITING = 64_000_000
"""Bytes that may wait for a kernel, about as many as it keeps."""

FEW_WAITING = MOST_WAITING // 4
"""Bytes at which output is sent again."""


class OutputValve:
    """Lets the output of a job's ranks pass as long as its kernel reads.

    A kernel that is stopped, or whose cell holds its lock for minutes, reads nothing. Dask keeps
    all messages for it meanwhile, and ranks may print gigabytes. So no more output is sent to it
    from a certain size on, until it has read most of that.
    """

    def __init__(self) -> None:
        self._closed = False

    def take(self, message: RankOutput, waiting: int) -> RankOutput | None:
        """Return what to send to the kernel: the message, the mark of a gap, or nothing."""
        was_closed = self._closed
        self._closed = waiting > (FEW_WAITING if was_closed else MOST_WAITING)
        if not self._closed:
            return message
        return None if was_closed else replace(message, text="", gap=True)


@dataclass(eq=False)
class ScheduledJob:
    """An open job, with the `terms` of its opening.

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
    plugin: ElasticPlugin
    uid: str  # part of its tasks' keys, so that another job of this name has others
    terms: JobTerms
    workers: frozenset[str] | None  # those of its terms, with the scheduler's addresses for them
    machine: Machine
    client: str | None  # id of the Dask client that drives it; None while its kernel is gone
    topic: str  # on which its driver listens
    started: float  # seconds since the epoch
    journal: JournalFile | None = None
    epoch: int = 1  # number of its driver
    steps: int = 0  # number of the newest step of that driver's journal
    seq: int = 0  # number of the newest event
    backlog: dict[int, JobEvent] = field(default_factory=dict)  # events that were not stepped
    log: JobLog = field(default_factory=JobLog)
    output: OutputValve = field(default_factory=OutputValve)
    ranks: dict[int, WorkerRecord] = field(default_factory=dict)  # worker of each claimed start
    places: dict[int, Place] = field(default_factory=dict)  # place foreseen for each of them
    never: set[int] = field(default_factory=set)  # starts whose task has nothing to do any more
    beats: dict[int, Beat] = field(default_factory=dict)  # not passed on so far, as telemetry
    telemetry: dict[int, RankTelemetry] = field(default_factory=dict)
    unused: list[UnusedWorker] = field(default_factory=list)  # as last sent to its driver
    opening: bool = True  # workers are being prepared; its driver is told of all together
    closing: bool = False  # its driver has closed it: it cannot be taken over any more
    _last_tick: float = 0.0
    _abandoned: float = 0.0
    _draining: bool = False

    def __post_init__(self) -> None:
        self._caretaker = PeriodicCall(CARETAKER_INTERVAL, self._look_after)

    def release(self) -> None:
        """Drop all that may be large: the job itself is part of a cycle, and lives on."""
        self.terms = replace(self.terms, payload=JobPayload(b"", b"", b""), options=b"")
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
        wanted = limits.max_np if limits.max_np is not None else max(limits.np, limits.min_np)
        if self.client is None or self.machine.roster.ended:
            wanted = 0
        return 0 if self.machine.roster.ended else max(wanted, len(self.ranks))

    def send(self, message: Message) -> None:
        """Send a message to the driver, if any."""
        if self.client is not None:
            self.plugin.say(self.client, self.topic, self.epoch, message)

    # -- driven ----------------------------------------------------------------------------------

    def take_in(
        self, event: Event, result: bytes | None = None, error: PackedError | None = None
    ) -> None:
        """Take in an event; the driver decides when it happened."""
        if isinstance(event, Beats) and len(self.backlog) > MOST_BEHIND:
            return
        self.log.note_event(event, result, error)
        self.seq += 1
        self.backlog[self.seq] = JobEvent(self.seq, event, result, error)
        self.send(self.backlog[self.seq])
        if self.client is None and not self._draining:
            self._draining = True
            asyncio.get_running_loop().call_soon(self._drain)

    def step(self, step: JournalStep) -> bool:
        """Take a step of the driver's journal; return False if an earlier step is missing."""
        if step.number <= self.steps:
            return True  # sent twice
        if step.number != self.steps + 1:
            return False
        self.steps = step.number
        event = self.backlog.pop(step.seq).event if step.event is None else step.event
        self._apply(event, step.now, step.chance)
        return True

    def _apply(self, event: Event, now: float, chance: float) -> None:
        machine = self.machine
        effects = machine.handle(event, now, chance)
        if self.journal is not None:
            try:
                self.journal.write(event, now, chance, effects, machine)
            except OSError as error:  # a full disk must not end the job
                self.journal.close()
                self.journal = None
                logger.warning("the journal of job %r ends here: %s", self.name, error)
        if effects or isinstance(event, LimitsChanged):
            self.plugin.arbiter.schedule()
        for effect in effects:
            entry = self.log.note_effect(effect, machine.roster.size, event)
            if entry is not None:
                logger.info("job %r: %s", self.name, in_one_line(entry))
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, StartRank):
            problem = self.plugin.claim(self, effect)
            if problem is not None:
                self.take_in(problem)
        elif isinstance(effect, Publish):
            self.plugin.order(self, effect, [each.start for each in effect.plan.members])
        elif isinstance(effect, Abort | Notify | Release):
            self.plugin.order(self, replace(effect, starts=()), effect.starts)
        elif isinstance(effect, SaveCommit | EndRank):
            self.plugin.order(self, effect, [effect.start])
        elif isinstance(effect, RestartWorker):
            self.plugin.spawn(self.plugin.restart_worker(effect.slot, str(effect.reason)))

    # -- abandoned -------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Start the caretaker: the kernel is gone."""
        self.client = None
        self._last_tick = self._abandoned = asyncio.get_running_loop().time()
        self._note("abandoned", KernelLost(self.terms.lease))
        self._caretaker.start()
        if not self._draining:
            self._drain()

    def _note(self, kind: str, reason: Reason) -> None:
        generation = self.machine.roster.generation
        size = self.machine.roster.present
        entry = self.log.note(Record(kind, generation, size=size, reason=reason))
        logger.info("job %r: %s", self.name, in_one_line(entry))

    def _drain(self) -> None:
        """Hand the waiting events to the machine."""
        self._draining = True
        try:
            while self.client is None and self.backlog:
                waiting = self.backlog.pop(next(iter(self.backlog)))
                self._apply(waiting.event, self._now(), self.plugin.chance())
        finally:
            self._draining = False

    def _now(self) -> float:
        """Return the machine's time, in which a pause of the scheduler does not count."""
        last_tick, self._last_tick = self._last_tick, asyncio.get_running_loop().time()
        passed = min(self._last_tick - last_tick, 4 * CARETAKER_INTERVAL)
        return self.machine.roster.now + passed

    def _look_after(self) -> None:
        """Advance the machine's time, and end the job with its lease."""
        self._drain()
        roster = self.machine.roster
        expired = asyncio.get_running_loop().time() >= self._abandoned + self.terms.lease
        if roster.phase == Phase.ENDED:
            if expired:
                self.plugin.drop(self.name)
        elif expired and not roster.ended:
            stop = StopRequested(True, StopReason.UNATTENDED, self.terms.lease)
            self._apply(stop, self._now(), self.plugin.chance())
        else:
            self._apply(Tick(), self._now(), self.plugin.chance())

    def stop(self) -> None:
        """Stop the caretaker, and end the journal."""
        self._caretaker.stop()
        if self.journal is not None:
            self.journal.close()
            self.journal = None

    # -- taken over ------------------------------------------------------------------------------

    def take_over(self, client: str, topic: str) -> JobHandover:
        """Hand the job over to a driver; return its :class:`JobHandover`."""
        self._caretaker.stop()
        self.client, self.topic = client, topic
        self.epoch += 1
        self.steps = 0
        self._note("attached", KERNEL_ATTACHED)
        return self.describe()

    def describe(self) -> JobHandover:
        """Return all that is known of the job."""
        return JobHandover(
            epoch=self.epoch,
            uid=self.uid,
            seq=min(self.backlog, default=self.seq + 1) - 1,
            machine=pack_machine(self.machine),
            options=self.terms.options,
            started=self.started,
            log=self.log.contents(),
        )
