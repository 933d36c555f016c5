"""The driver: the thread that feeds the membership machine and does what it says.

One thread per job, ``nbelastic-driver-NAME``, started by :meth:`Driver.start` and ended by the
machine's ``End``. It owns the machine, the link and the embedded cluster if there is one.

Messages from the cluster come in on the event loop of the Dask client, calls of the user in any
thread; both only put something on the queue. The driver's thread takes one thing at a time, asks
the machine, carries the effects out, and publishes what others may see (status, history, logs)
under a lock. Nothing else is shared, so nothing waits for anything but the queue.

Everything is bounded: a look at the queue takes half a second at most, the machine always names a
deadline, and closing the link has a timeout of its own.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

import cloudpickle

from nbelastic.cluster import Failure, unpack_error
from nbelastic.errors import JobError
from nbelastic.membership import (
    HELD_UP,
    Abort,
    ClusterGone,
    End,
    EndRank,
    Event,
    Machine,
    Notify,
    Outcome,
    Publish,
    RankFailed,
    RankReturned,
    Record,
    Release,
    RestartWorker,
    SlotGone,
    StartRank,
    Tick,
    View,
    unpack_event,
    view,
)

from . import display
from .clock import LiveClock
from .failure import exception_for
from .gauges import Gauges
from .status import HistoryEvent, Output

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbelastic.cluster import Link, Message
    from nbelastic.membership import Effect

    from .options import Options

__all__ = ["Driver"]

logger = logging.getLogger(__name__)

LONGEST_WAIT = 0.5
"""Seconds between two looks at the clock and at the connection."""


class Inbox(Protocol):
    """A queue of events and messages: :class:`queue.SimpleQueue`, or what a test takes for it."""

    def put(self, item: Event | Message, /) -> None:
        """Add an item. Any thread may do that."""

    def get(self, *, timeout: float) -> Event | Message:
        """Return the next item, or raise ``queue.Empty`` after `timeout` seconds."""


class Driver:
    """Runs one job. Made and started by ``fit``; see the module's docstring."""

    def __init__(
        self,
        name: str,
        options: Options,
        cleanup: Callable[[], None],
        *,
        inbox: Inbox | None = None,
        clock: LiveClock | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.name = name
        self.started = time.time()
        self.ended: float | None = None
        self.future: Future[list[Any]] = Future()
        self._options = options
        self._cleanup = cleanup
        self._machine = Machine(options.limits())
        self._clock = LiveClock() if clock is None else clock
        self._inbox: Inbox = queue.SimpleQueue() if inbox is None else inbox
        self._chance = chance
        self._lock = threading.Lock()
        self._history: list[HistoryEvent] = []
        self._output: list[Output] = []
        self.gauges = Gauges()
        self._names: dict[int, str] = {}
        self._ranks: dict[int, int] = {}
        self._granting: dict[int, StartRank] = {}
        self._slots: dict[int, str] = {}
        self._failures: dict[int, Failure] = {}
        self._results: dict[int, bytes] = {}
        self._now = 0.0
        self._demand = -1
        self._outcome: Outcome | None = None
        self._link: Link | None = None
        self._thread = threading.Thread(
            target=self.run, name=f"nbelastic-driver-{name}", daemon=True
        )
        self.future.set_running_or_notify_cancel()

    def start(self, link: Link) -> None:
        """Start the thread; from here on it owns the link."""
        self.adopt_link(link)
        self._thread.start()

    def adopt_link(self, link: Link) -> None:
        """Take over a link, for whoever calls :meth:`run` in a thread of its own."""
        self._link = link

    def tell(self, event: Event) -> None:
        """Put an event of the user on the queue."""
        self._inbox.put(event)

    def receive(self, message: Message) -> None:
        """Put a message from the cluster on the queue. Called in the client's event loop."""
        self._inbox.put(message)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread to end."""
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(timeout)

    # -- what others may see -------------------------------------------------------------------

    def view(self) -> View:
        """Return what the machine looks like now."""
        with self._lock:
            return view(self._machine, self._now)

    def history(self) -> tuple[HistoryEvent, ...]:
        """Return what has happened so far."""
        with self._lock:
            return tuple(self._history)

    def output(self, since: int = 0) -> tuple[Output, ...]:
        """Return what ranks have printed, but for the first `since` pieces."""
        with self._lock:
            return tuple(self._output[since:])

    def latest_rank(self, start: int) -> int | None:
        """Return the rank that a start of the function had last."""
        return self._ranks.get(start)

    # -- the thread ----------------------------------------------------------------------------

    def run(self) -> None:
        """Run the job to its end. What the thread does."""
        try:
            self._loop()
        except Exception as error:  # a bug: the job must not hang, and its user must know
            logger.exception("the driver of job %r failed", self.name)
            self._finish(error)
        else:
            self._finish(None)

    def _loop(self) -> None:
        while self._outcome is None:
            deadline = self._machine.deadline()
            wait = LONGEST_WAIT
            if deadline is not None:
                wait = min(max(deadline - self._now, 0.0), wait)
            try:
                item = self._inbox.get(timeout=wait)
            except queue.Empty:
                item = self._look_at_connection()
            event = item if isinstance(item, Event) else self._unpack(item)
            if event is not None:
                self._step(event)

    def _step(self, event: Event) -> None:
        with self._lock:
            self._now = self._clock.now()
            effects = self._machine.handle(event, self._now, self._chance())
        for effect in effects:
            self._carry_out(effect)
        self._say_demand()

    def _look_at_connection(self) -> Event:
        assert self._link is not None
        if self._link.status == "running":
            return Tick()
        return ClusterGone(f"the connection to the scheduler is {self._link.status}")

    def _unpack(self, message: Message) -> Event | None:
        """Turn a message from the cluster into an event, or deal with it here."""
        do = message["do"]
        if do == "event":
            event = unpack_event(message["event"])
            attachment = message["attachment"]
            if isinstance(event, RankReturned):
                self._results[event.start] = attachment
            elif isinstance(event, RankFailed) and attachment:
                self._failures[event.start] = unpack_error(attachment)
            elif isinstance(event, SlotGone):
                self._forget_slot(event.slot)
            return event
        if do == "granted":
            self._begin(message["start"])
        elif do == "output":
            start = message["start"]
            with self._lock:
                self._output.append(Output(start, self._ranks.get(start), message["text"]))
        elif do == "vitals":
            self._take_vitals(message["vitals"])
        elif do == "refused":
            self._note(Record("refused", 0, worker=message["worker"], detail=message["reason"]))
        return None

    def _take_vitals(self, vitals: list[Any]) -> None:
        elapsed = time.time() - self.started
        self.gauges.take(elapsed, vitals)
        members = self._machine.roster.members()
        self.gauges.note_pace(elapsed, self.gauges.total(rank.start for rank in members))

    # -- effects -------------------------------------------------------------------------------

    def _carry_out(self, effect: Effect) -> None:
        link = self._link
        assert link is not None
        if isinstance(effect, StartRank):
            self._granting[effect.start] = effect
            self._names[effect.start] = f"rank {effect.place.rank} on {effect.slot.worker}"
            self._ranks[effect.start] = effect.place.rank
            link.order("claim", start=effect.start, slot=effect.slot.id)
        elif isinstance(effect, Publish):
            for rank, member in enumerate(effect.plan.members):
                self._names[member.start] = f"rank {rank} on {member.slot.worker}"
                self._ranks[member.start] = rank
            link.publish(effect.plan)
        elif isinstance(effect, Abort):
            link.order(
                "abort",
                starts=list(effect.starts),
                generation=effect.generation,
                reason=effect.reason,
            )
        elif isinstance(effect, Notify):
            link.order("notice", starts=list(effect.starts), generation=effect.generation)
        elif isinstance(effect, Release):
            link.order("release", starts=list(effect.starts), generation=effect.generation)
        elif isinstance(effect, EndRank):
            self._granting.pop(effect.start, None)
            link.order("end", start=effect.start, how=effect.how, reason=effect.reason)
        elif isinstance(effect, RestartWorker):
            link.order("restart", slot=effect.slot.id, reason=effect.reason)
        elif isinstance(effect, Record):
            self._note(effect)
        elif isinstance(effect, End):
            self._outcome = effect.outcome

    def _begin(self, start: int) -> None:
        """Start a rank whose slot was granted, unless it has been given up meanwhile."""
        effect = self._granting.pop(start, None)
        if effect is None or self._link is None:
            return
        self._slots[start] = effect.slot.id
        self._link.submit(
            start,
            effect.slot,
            effect.place,
            resources=self._options.resources,
            operation_timeout_s=self._options.stall_timeout * 1.5 + 30.0,
        )

    def _forget_slot(self, slot: str) -> None:
        """Let go of tasks pinned to a worker that is gone: Dask would keep them for ever."""
        assert self._link is not None
        for start, at in list(self._slots.items()):
            if at == slot:
                self._slots.pop(start)
                self._link.forget(start)

    def _say_demand(self) -> None:
        """Tell the scheduler how many ranks the job would like, for adaptive clusters."""
        limits = self._machine.roster.limits
        demand = limits.max_np if limits.max_np is not None else max(limits.np, limits.min_np)
        if demand != self._demand and self._link is not None:
            self._demand = demand
            self._link.order("demand", ranks=demand)

    def _note(self, record: Record) -> None:
        """Put something into the history; a rank that was waited for, with the line it stood at."""
        detail = record.detail
        line = [] if record.start is None else self.gauges.rank(record.start).line
        if detail.startswith(HELD_UP) and line:
            file, number, function = line
            place = display.label(file) or file
            detail += f"; it stood at {place}, line {number}, in {function}"
        event = HistoryEvent(
            time=time.time(),
            kind=record.kind,
            worker=record.worker,
            rank=record.rank,
            generation=record.generation,
            detail=detail,
            size=0 if self._machine.roster.ended else len(self._machine.roster.members()),
        )
        with self._lock:
            self._history.append(event)

    # -- the end -------------------------------------------------------------------------------

    def _finish(self, bug: Exception | None) -> None:
        """Take everything down, then let the user know."""
        try:
            if self._link is not None:
                self._link.close()
            self._cleanup()
        except Exception as error:  # whatever Dask raises while it closes: the result matters more
            logger.warning("job %r could not clean up: %r", self.name, error)
        self.ended = time.time()
        self._settle(bug)

    def _settle(self, bug: Exception | None) -> None:
        outcome = self._outcome
        if bug is not None or outcome is None:
            error = JobError(f"job {self.name!r}: the driver failed: {bug!r}")
            error.__cause__ = bug
            self.future.set_exception(error)
        elif outcome.kind != "finished":
            problem = exception_for(self.name, outcome, self._failures, self._names)
            self.future.set_exception(problem)
        else:
            try:
                results = [cloudpickle.loads(self._results[start]) for start in outcome.starts]
            except Exception as error:  # unpickling runs code of any class
                problem = JobError(f"a result of job {self.name!r} cannot be read here: {error!r}")
                problem.__cause__ = error
                self.future.set_exception(problem)
            else:
                self.future.set_result(results)
