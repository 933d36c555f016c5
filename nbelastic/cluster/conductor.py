"""A job as the scheduler has it: a copy of its membership machine, and what it says, done.

The driver decides: it says in which order events happened, at what time and with which chance (its
*journal*). The copy here is handed the same, so it comes to the same effects, and they are carried
out here, next to the workers. So machine and deeds are never apart, whenever the kernel dies.

========================  =========================================================================
a job is                  then
========================  =========================================================================
driven                    events are numbered, kept, and sent to the driver; its steps name them
abandoned                 its kernel is gone: a *caretaker* hands events and time to the copy. It
                          starts no ranks (only a kernel can submit tasks); all else goes on: plans,
                          losses, the end. After the lease it ends the job
taken over                a driver has attached: it gets the copy, and all events not yet stepped.
                          Each driver has an *epoch*; a former one's steps are answered "stale"
========================  =========================================================================

All of it runs in the scheduler's event loop.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, Protocol

from nbelastic.membership import (
    Abort,
    EndRank,
    Event,
    Notify,
    Phase,
    Publish,
    Release,
    RestartWorker,
    StartRank,
    StopRequested,
    Tick,
    pack_event,
    pack_plan,
    to_dict,
    unpack_event,
)

from .timer import Every

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbelastic.membership import Effect, Slot

    from .protocol import Message
    from .records import JobRecord

__all__ = ["Conductor", "Stage"]

CARETAKER_INTERVAL = 0.25
"""Seconds between two looks of a caretaker at the time."""

MOST_BEHIND = 200
"""Events that a driver may be behind; then it is spared heartbeats, which the next replace."""


class Stage(Protocol):
    """What a conductor needs of the plugin."""

    def claim(self, job: str, record: JobRecord, effect: StartRank) -> Event | None:
        """Give a slot to a rank; return what there is to tell if that cannot be."""

    def to_agent(self, slot: str, job: str, do: str, **fields: Any) -> None:
        """Send a message to the agent of a slot."""

    def send(self, record: JobRecord, do: str, **fields: Any) -> None:
        """Send a message to a job's driver."""

    def renew(self, slot: Slot, reason: str) -> None:
        """Restart a worker."""

    def drop(self, job: str) -> None:
        """Forget a job."""


class Conductor:
    """Carries on one job.

    Parameters
    ----------
    job : str
        Its name.
    record : JobRecord
        All that there is of it.
    stage : Stage
        The plugin.
    chance : callable
        Returns a random number from 0 up to 1.
    """

    def __init__(
        self, job: str, record: JobRecord, stage: Stage, chance: Callable[[], float]
    ) -> None:
        self._job = job
        self._record = record
        self._stage = stage
        self._chance = chance
        self._caretaker = Every(CARETAKER_INTERVAL, self._look_after)
        self._looked = 0.0
        self._abandoned = 0.0
        self._draining = False

    # -- driven ----------------------------------------------------------------------------------

    def take_in(self, event: Message, attachment: Any = None) -> None:
        """Take in an event: it is the driver's to say when it happened."""
        record = self._record
        if event["kind"] == "Beats" and len(record.backlog) > MOST_BEHIND:
            return
        record.archive.note_event(event, attachment)
        record.seq += 1
        record.backlog[record.seq] = (event, attachment)
        if record.client is not None:
            self._send_event(record.seq)
        elif not self._draining:
            self._draining = True
            asyncio.get_running_loop().call_soon(self._drain)

    def _send_event(self, seq: int) -> None:
        event, attachment = self._record.backlog[seq]
        self._stage.send(self._record, "event", seq=seq, event=event, attachment=attachment)

    def step(self, number: int, now: float, chance: float, seq: int, event: Message | None) -> bool:
        """Take one step of the driver's journal; return False if one before it is missing."""
        record = self._record
        if number <= record.steps:
            return True  # said twice
        if number != record.steps + 1:
            return False
        record.steps = number
        if event is None:
            event, _ = record.backlog.pop(seq)
        self._apply(unpack_event(event), now, chance)
        return True

    def _apply(self, event: Event, now: float, chance: float) -> None:
        machine = self._record.machine
        for effect in machine.handle(event, now, chance):
            size = 0 if machine.roster.ended else machine.roster.counted.present
            self._record.archive.note_effect(effect, size)
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        tell = functools.partial(self._to_rank)
        if isinstance(effect, StartRank):
            problem = self._stage.claim(self._job, self._record, effect)
            if problem is not None:
                self.take_in(pack_event(problem))
        elif isinstance(effect, Publish):
            plan = pack_plan(effect.plan)
            for member in effect.plan.members:
                tell(member.start, "plan", plan=plan)
        elif isinstance(effect, Abort):
            for start in effect.starts:
                tell(start, "abort", generation=effect.generation, reason=effect.reason)
        elif isinstance(effect, Notify):
            for start in effect.starts:
                tell(start, "notice", generation=effect.generation)
        elif isinstance(effect, Release):
            for start in effect.starts:
                tell(start, "release", generation=effect.generation)
        elif isinstance(effect, EndRank):
            tell(effect.start, "end", how=effect.how, reason=effect.reason)
        elif isinstance(effect, RestartWorker):
            self._stage.renew(effect.slot, effect.reason)

    def _to_rank(self, start: int, do: str, **fields: Any) -> None:
        slot = self._record.ranks.get(start)
        if slot is not None:
            self._stage.to_agent(slot, self._job, do, start=start, **fields)

    # -- abandoned -------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Look after the job from here on: its kernel is gone."""
        record = self._record
        record.client = None
        self._looked = self._abandoned = asyncio.get_running_loop().time()
        self._note("abandoned", f"its kernel is gone; it goes on for up to {record.lease:g} s")
        self._caretaker.start()
        if not self._draining:
            self._drain()

    def _note(self, kind: str, detail: str) -> None:
        generation = self._record.machine.roster.generation
        size = self._record.machine.roster.counted.present
        self._record.archive.record(kind, generation=generation, size=size, detail=detail)

    def _drain(self) -> None:
        """Hand the machine what has happened."""
        record = self._record
        self._draining = True
        try:
            while record.client is None and record.backlog:
                event, _ = record.backlog.pop(next(iter(record.backlog)))
                self._apply(unpack_event(event), self._now(), self._chance())
        finally:
            self._draining = False

    def _now(self) -> float:
        """Return the machine's time, in which a pause of the scheduler does not count."""
        looked, self._looked = self._looked, asyncio.get_running_loop().time()
        passed = min(self._looked - looked, 4 * CARETAKER_INTERVAL)
        return self._record.machine.roster.now + passed

    def _look_after(self) -> None:
        """Let time pass for the machine, and the lease run out."""
        self._drain()
        roster = self._record.machine.roster
        expired = asyncio.get_running_loop().time() >= self._abandoned + self._record.lease
        if roster.phase == Phase.ENDED:
            if expired:
                self._stage.drop(self._job)
        elif expired and not roster.ended:
            reason = f"ended: no kernel has attached to it for {self._record.lease:g} s"
            self._apply(StopRequested(now=True, reason=reason), self._now(), self._chance())
        else:
            self._apply(Tick(), self._now(), self._chance())

    def stop(self) -> None:
        """Look after it no more."""
        self._caretaker.stop()

    # -- taken over ------------------------------------------------------------------------------

    def take_over(self, client: str, topic: str) -> dict[str, Any]:
        """Hand the job over to a driver; return all that it needs to know."""
        record = self._record
        self.stop()
        record.client, record.topic = client, topic
        record.epoch += 1
        record.steps = 0
        self._note("attached", "a kernel has attached to it")
        return {
            "epoch": record.epoch,
            "uid": record.uid,
            "seq": min(record.backlog, default=record.seq + 1) - 1,
            "machine": to_dict(record.machine),
            "options": record.options,
            "started": record.started,
            "archive": record.archive.pack(),
        }

    def catch_up(self) -> None:
        """Send a new driver what has not been stepped yet."""
        for seq in list(self._record.backlog):
            self._send_event(seq)
