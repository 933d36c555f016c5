"""Carry on one job: a copy of its membership machine, and its effects.

The driver decides in which order events happened, at what time and with which chance (its
*journal*). The copy here handles the same, so it comes to the same effects. They are carried out
here, next to the workers, so that the machine and its effects are never apart, whenever the kernel
dies. :class:`JobController` has a table of a job's states.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from nbelastic.cluster.dask_compat import PeriodicCall
from nbelastic.cluster.job_log import in_one_line
from nbelastic.membership import Phase, pack_machine
from nbelastic.messages import (
    Abort,
    Beats,
    EndRank,
    JobEvent,
    JobHandover,
    KernelAttached,
    KernelLost,
    LimitsChanged,
    Notify,
    Publish,
    RankEffect,
    Record,
    Release,
    RestartWorker,
    SaveCommit,
    StartRank,
    StopReason,
    StopRequested,
    Tick,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nbelastic.cluster.journal import JournalFile
    from nbelastic.messages import (
        Effect,
        Event,
        JournalStep,
        Message,
        PackedError,
        Reason,
        Slot,
    )

    from .records import JobRecord

logger = logging.getLogger(__name__)

CARETAKER_INTERVAL = 0.25
"""Seconds between two ticks of a caretaker."""

MOST_BEHIND = 200
"""Events that a driver may be behind; above, it gets no heartbeats, which the next replace."""


class WorkerOps(Protocol):
    """Operations on workers and drivers that a controller needs of the plugin."""

    def claim(self, job: str, record: JobRecord, effect: StartRank) -> Event | None:
        """Claim a slot for a rank; return the event of its refusal, or None."""

    def order(self, job: str, record: JobRecord, effect: RankEffect, starts: Iterable[int]) -> None:
        """Order ranks of a job to obey an effect."""

    def send(self, record: JobRecord, message: Message) -> None:
        """Send a message to a job's driver."""

    def rearrange(self) -> None:
        """Decide anew how the jobs share the cluster."""

    def restart_worker(self, slot: Slot, reason: str) -> None:
        """Restart a worker."""

    def drop(self, job: str) -> None:
        """Forget a job."""


class JobController:
    """Carries on one job.

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

    `chance` returns a random number from 0 up to 1.
    """

    def __init__(
        self,
        job: str,
        record: JobRecord,
        ops: WorkerOps,
        chance: Callable[[], float],
        journal: JournalFile | None = None,
    ) -> None:
        self._job = job
        self._record = record
        self._ops = ops
        self._chance = chance
        self._journal = journal
        self._caretaker = PeriodicCall(CARETAKER_INTERVAL, self._look_after)
        self._last_tick = 0.0
        self._abandoned = 0.0
        self._draining = False

    # -- driven ----------------------------------------------------------------------------------

    def take_in(
        self, event: Event, result: bytes | None = None, error: PackedError | None = None
    ) -> None:
        """Take in an event; the driver decides when it happened."""
        record = self._record
        if isinstance(event, Beats) and len(record.backlog) > MOST_BEHIND:
            return
        record.log.note_event(event, result, error)
        record.seq += 1
        record.backlog[record.seq] = JobEvent(record.seq, event, result, error)
        if record.client is not None:
            self._ops.send(record, record.backlog[record.seq])
        elif not self._draining:
            self._draining = True
            asyncio.get_running_loop().call_soon(self._drain)

    def step(self, step: JournalStep) -> bool:
        """Take a step of the driver's journal; return False if an earlier step is missing."""
        record = self._record
        if step.number <= record.steps:
            return True  # sent twice
        if step.number != record.steps + 1:
            return False
        record.steps = step.number
        event = record.backlog.pop(step.seq).event if step.event is None else step.event
        self._apply(event, step.now, step.chance)
        return True

    def _apply(self, event: Event, now: float, chance: float) -> None:
        machine = self._record.machine
        effects = machine.handle(event, now, chance)
        if self._journal is not None:
            try:
                self._journal.write(event, now, chance, effects, machine)
            except OSError as error:  # a full disk must not end the job
                self._journal.close()
                self._journal = None
                logger.warning("the journal of job %r ends here: %s", self._job, error)
        if effects or isinstance(event, LimitsChanged):
            self._ops.rearrange()
        for effect in effects:
            size = 0 if machine.roster.ended else machine.roster.counted.present
            entry = self._record.log.note_effect(effect, size, event)
            if entry is not None:
                logger.info("job %r: %s", self._job, in_one_line(entry))
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        record, job = self._record, self._job
        if isinstance(effect, StartRank):
            problem = self._ops.claim(job, record, effect)
            if problem is not None:
                self.take_in(problem)
        elif isinstance(effect, Publish):
            self._ops.order(job, record, effect, [each.start for each in effect.plan.members])
        elif isinstance(effect, Abort | Notify | Release):
            self._ops.order(job, record, replace(effect, starts=()), effect.starts)
        elif isinstance(effect, SaveCommit | EndRank):
            if isinstance(effect, EndRank):
                record.told.add(effect.start)
            self._ops.order(job, record, effect, [effect.start])
        elif isinstance(effect, RestartWorker):
            self._ops.restart_worker(effect.slot, str(effect.reason))

    # -- abandoned -------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Start the caretaker: the kernel is gone."""
        record = self._record
        record.client = None
        self._last_tick = self._abandoned = asyncio.get_running_loop().time()
        self._note("abandoned", KernelLost(record.terms.lease))
        self._caretaker.start()
        if not self._draining:
            self._drain()

    def _note(self, kind: str, reason: Reason) -> None:
        generation = self._record.machine.roster.generation
        size = self._record.machine.roster.counted.present
        entry = self._record.log.note(Record(kind, generation, size=size, reason=reason))
        logger.info("job %r: %s", self._job, in_one_line(entry))

    def _drain(self) -> None:
        """Hand the waiting events to the machine."""
        record = self._record
        self._draining = True
        try:
            while record.client is None and record.backlog:
                waiting = record.backlog.pop(next(iter(record.backlog)))
                self._apply(waiting.event, self._now(), self._chance())
        finally:
            self._draining = False

    def _now(self) -> float:
        """Return the machine's time, in which a pause of the scheduler does not count."""
        last_tick, self._last_tick = self._last_tick, asyncio.get_running_loop().time()
        passed = min(self._last_tick - last_tick, 4 * CARETAKER_INTERVAL)
        return self._record.machine.roster.now + passed

    def _look_after(self) -> None:
        """Advance the machine's time, and end the job with its lease."""
        self._drain()
        roster = self._record.machine.roster
        expired = asyncio.get_running_loop().time() >= self._abandoned + self._record.terms.lease
        if roster.phase == Phase.ENDED:
            if expired:
                self._ops.drop(self._job)
        elif expired and not roster.ended:
            stop = StopRequested(True, StopReason.UNATTENDED, self._record.terms.lease)
            self._apply(stop, self._now(), self._chance())
        else:
            self._apply(Tick(), self._now(), self._chance())

    def stop(self) -> None:
        """Stop the caretaker, and end the journal."""
        self._caretaker.stop()
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    # -- taken over ------------------------------------------------------------------------------

    def take_over(self, client: str, topic: str) -> JobHandover:
        """Hand the job over to a driver; return its :class:`JobHandover`."""
        record = self._record
        self._caretaker.stop()
        record.client, record.topic = client, topic
        record.epoch += 1
        record.steps = 0
        self._note("attached", KernelAttached())
        return self.describe()

    def describe(self) -> JobHandover:
        """Return all that is known of the job."""
        record = self._record
        return JobHandover(
            epoch=record.epoch,
            uid=record.uid,
            seq=min(record.backlog, default=record.seq + 1) - 1,
            machine=pack_machine(record.machine),
            options=record.terms.options,
            started=record.started,
            log=record.log.contents(),
        )

    def catch_up(self) -> None:
        """Send a new driver the events that have not been stepped."""
        for event in list(self._record.backlog.values()):
            self._ops.send(self._record, event)
