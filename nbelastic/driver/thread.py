"""Drive a job: feed its membership machine, and send each decision.

One thread of the kernel per job, ``nbelastic-driver-NAME``, started by :meth:`Driver.start` and
ended by the machine's ``End``. It owns the machine, the job's client and the embedded cluster.
:class:`Driver` explains its queue and its limits.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nbelastic.driver.loggers import MetricsLogger
from nbelastic.driver.outcome import abandon, settle
from nbelastic.driver.records import KernelLog
from nbelastic.elastic.ranks.timeline import join_parts
from nbelastic.errors import ClusterLost
from nbelastic.membership import JobView, Machine, Stage, unpack_machine, view
from nbelastic.messages import (
    KERNEL,
    ClusterGone,
    DriverReplaced,
    End,
    Event,
    FaultReport,
    JobEvent,
    JobHandover,
    Outcome,
    RankNote,
    RankOutput,
    Record,
    SlotGone,
    SlotGranted,
    StopRequested,
    TelemetryBatch,
    Tick,
    ToDriver,
    WorkerRefused,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, MutableMapping

    from nbelastic.cluster import JobClient
    from nbelastic.driver.options import Options
    from nbelastic.messages import FaultOrder, Message

logger = logging.getLogger(__name__)

SETTLING_S = 5.0
"""Seconds in which a driver has carried out what it has adopted."""

LONGEST_WAIT = 0.5
"""Seconds between two checks of the clock and the connection."""

CLOSED_FOR_GOOD = (
    "Dask's cluster has closed worker {names} for good\n"
    "A worker had been lost, and none of its name was there some seconds later "
    "(distributed.deploy.lost-worker-timeout), so the cluster starts none any more.\n"
    "cluster.scale(n), with the number of workers that there should be, starts it again. "
    'dask.config.set({{"distributed.deploy.lost-worker-timeout": "1 hour"}}) prevents this.'
)

CHANCE = random.Random().random
"""The driver's own random numbers: a user's kernel keeps the ones it has seeded."""


@dataclass(frozen=True)
class _Pause:
    """An order to stand still until an event, or so many seconds."""

    over: threading.Event
    seconds: float


class Inbox(Protocol):
    """A queue of events and messages: :class:`queue.SimpleQueue`, or a test's replacement."""

    def put(self, item: Event | ToDriver | _Pause, /) -> None:
        """Add an item. Any thread may do that."""

    def get(self, *, timeout: float) -> Event | ToDriver | _Pause:
        """Return the next item, or raise ``queue.Empty`` after `timeout` seconds."""


class LiveClock:
    """A clock that stands still while its owner could not listen.

    A laptop sleeps, a cell holds the interpreter for a minute: afterwards many messages wait to be
    read, and no deadline may pass before they are. So between two looks at the clock at most
    `most` seconds count, and its owner looks more often than that while it listens.
    """

    def __init__(self, most: float = 2.0, source: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._source = source
        self._last = source()
        self._now = 0.0

    def set(self, now: float) -> None:
        """Make the clock show `now`."""
        self._last, self._now = self._source(), now

    def now(self) -> float:
        """Return seconds since the clock was made, pauses left out."""
        last, self._last = self._last, self._source()
        self._now += min(self._last - last, self._most)
        return self._now


class Driver:
    """Runs one job. Made and started by ``fit``.

    Messages from the cluster come in on the event loop of the Dask client, calls of the user in any
    thread; both only put something on the queue. The driver's thread takes one item at a time and
    hands it to the machine. It sends a *step* of its journal to the scheduler, where a copy of the
    machine comes to the same effects and carries them out. It publishes status, history and logs
    under a lock. Nothing else is shared, so nothing waits for anything but the queue.

    If the connection is lost, the scheduler's copy carries on. When it is back, the driver attaches
    again and takes over the present state of the job. If another kernel has attached meanwhile, it
    ends.

    Everything is bounded: a wait for the queue takes half a second at most, the machine always
    names a deadline, the client gives up a lost connection, and closing it has a timeout.
    """

    def __init__(
        self,
        name: str,
        options: Options,
        cleanup: Callable[[], None],
        *,
        inbox: Inbox | None = None,
        clock: LiveClock | None = None,
        chance: Callable[[], float] = CHANCE,
    ) -> None:
        self.name = name
        self.log = KernelLog(name)
        self.ended: float | None = None
        self.future: Future[list[Any]] = Future()
        self.chaos: Callable[[FaultReport], None] | None = None
        self.owns_cluster = False
        self.variables: MutableMapping[str, Any] = {}  # of the function, here
        self.free_workers: frozenset[str] | None = None
        self.options = options
        self._cleanup = cleanup
        self._machine = Machine(options.limits())
        self._clock = LiveClock() if clock is None else clock
        self._inbox: Inbox = queue.SimpleQueue() if inbox is None else inbox
        self._chance = chance
        self._lock = threading.Lock()
        self._slots: dict[int, str] = {}
        self._wishes: list[Event] = []
        self._seen_workers: set[Any] = set()
        self._closed_workers: set[Any] = set()
        self._look_at = 0.0
        self._seq = 0
        self._loggers: list[MetricsLogger] = []
        self.detached = self._away = False
        self._now = 0.0
        self._outcome: Outcome | None = None
        self._job_client: JobClient | None = None
        self._thread = threading.Thread(
            target=self.run, name=f"nbelastic-driver-{name}", daemon=True
        )
        self.future.set_running_or_notify_cancel()

    def start(self, job_client: JobClient) -> None:
        """Start the thread; from here on it owns the client."""
        self.adopt_client(job_client)
        self._thread.start()

    def adopt_client(self, job_client: JobClient) -> None:
        """Take over a client, where :meth:`run` is called in another thread."""
        self._job_client = job_client

    def tell(self, event: Event) -> None:
        """Put an event of the user on the queue."""
        self._wishes.append(event)
        self._inbox.put(event)
        if self.ended is not None and isinstance(event, StopRequested):
            abandon(self.future, self.name, event)  # the thread has ended

    def receive(self, message: ToDriver) -> None:
        """Put a message from the cluster on the queue. Called in the client's event loop."""
        if not isinstance(message.message, FaultReport):
            self._inbox.put(message)
        elif self.chaos is not None:
            self.chaos(message.message)

    def inject(
        self, starts: Iterable[int], faults: tuple[FaultOrder, ...], drop: tuple[int, ...]
    ) -> None:
        """Send faults to ranks. For ``nbelastic.chaos``."""
        if self._job_client is not None:
            self._job_client.inject(starts, faults, drop)

    def pause(self, over: threading.Event, seconds: float) -> None:
        """Stop the thread until an event, or for some seconds. For ``nbelastic.chaos``."""
        self._inbox.put(_Pause(over, seconds))

    def log_to(self, target: Any) -> None:
        """Send metrics to a logger from now on."""
        self._loggers.append(MetricsLogger(self, target))

    def note_logged(self, name: str, sent: tuple[int, int], rows: int) -> None:
        """Keep in the history how far a logger has come, for a kernel that takes over."""
        if (sent, rows) != self.log.logged_to(name) and rows:
            figures = dict(
                zip(("commit", "number", "rows"), map(float, (*sent, rows)), strict=True)
            )
            self._inbox.put(RankNote(KERNEL, "logged", name, figures))

    def finish_loggers(self) -> None:
        """Wait until loggers have all metrics, after the end."""
        while self._loggers:
            self._loggers.pop().finish()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread to end."""
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(timeout)

    # -- for all threads -----------------------------------------------------------------------

    def view(self) -> JobView:
        """Return a view of the machine."""
        with self._lock:
            return view(self._machine, self._now)

    @property
    def away(self) -> bool:
        """Whether the connection to the scheduler is lost, and may come back."""
        return self._away and self._outcome is None

    @property
    def outlives_kernel(self) -> bool:
        """Whether its scheduler runs elsewhere, where the job goes on without this process."""
        return self._job_client is None or not self._job_client.is_local

    # -- the thread ----------------------------------------------------------------------------

    def run(self) -> None:
        """Run the job to its end. What the thread does."""
        bug = None
        try:
            self._loop()
        except BaseException as error:  # a bug: the job must not hang, and its user must know
            bug = error
        self._finish(bug)

    def _loop(self) -> None:
        while self._outcome is None and not self.detached:
            deadline = self._machine.deadline()
            self._look_at_workers()
            wait = LONGEST_WAIT
            if deadline is not None:
                wait = min(max(deadline - self._now, 0.0), wait)
            item: Event | ToDriver | _Pause | None
            try:
                item = self._inbox.get(timeout=wait)
            except queue.Empty:
                item = self._look_at_connection()
            if isinstance(item, Event):
                self._step(item)
            elif isinstance(item, _Pause):
                item.over.wait(item.seconds)
            elif item is not None:
                assert self._job_client is not None
                if item.epoch == self._job_client.epoch:
                    self._take(item.message)

    def _step(self, event: Event, seq: int = 0) -> None:
        """Make the machine decide, and send the step; `seq` is the event's number, 0 without."""
        assert self._job_client is not None
        with self._lock:
            self._now, chance = self._clock.now(), self._chance()
            effects = self._machine.handle(event, self._now, chance)
            roster = self._machine.roster
            size = 0 if roster.ended else roster.counted.present
        outcome = next((each.outcome for each in effects if isinstance(each, End)), None)
        if outcome is not None and isinstance(event, Tick) and not self._is_over():
            return
        if isinstance(event, ClusterGone):
            outcome = self._machine.roster.outcome  # it may have been known, and not published
        self._job_client.step(self._now, chance, seq, None if seq else event)
        for effect in effects:  # the scheduler carries them out
            self.log.note_effect(effect, size, event)
        self._outcome = outcome or self._outcome

    def _is_over(self) -> bool:
        """Return whether an end that only time has brought holds.

        Not if the connection was lost, and the scheduler has gone on without this driver.
        """
        assert self._job_client is not None
        machine = self._machine
        if self._job_client.drives():
            return True
        self._attach_again()
        return self._machine is machine and not self._away and not self.detached

    def _look_at_connection(self) -> Event | None:
        assert self._job_client is not None
        status, was_away = self._job_client.status, self._away
        self._away = status == "connecting"
        if status == "running" and was_away:
            self._attach_again()  # before anything is decided by what was known then
        elif status == "running":
            return Tick()
        if status in ("running", "connecting"):
            if self._away:  # time does not count until it is clear what has become of the job
                self._clock.set(self._now)
            return None
        return ClusterGone(
            f"the Dask client is {status}; if its scheduler lives, the job goes on there for up to "
            f"{self.options.lease:g} s: nbelastic.attach({self.name!r}, cluster=...) takes it over"
        )

    def _look_at_workers(self) -> None:
        """Each second, look for workers that Dask's cluster has closed for good."""
        now = self.log.elapsed
        if self._job_client is None or now < self._look_at:
            return
        self._look_at = now + 1.0
        closed = set(self._job_client.closed_workers(self._seen_workers))
        new, self._closed_workers = closed - self._closed_workers, closed
        if new and self.owns_cluster:
            self._job_client.start_again()
        elif new:
            names = ", ".join(sorted(map(str, new)))
            self.log.note(Record("warning", detail=CLOSED_FOR_GOOD.format(names=names)))

    # -- taking a job over ---------------------------------------------------------------------

    def adopt(self, handover: JobHandover) -> None:
        """Take over a job as the scheduler has it; see :meth:`JobClient.attach`."""
        with self._lock:
            self._machine = unpack_machine(handover.machine)
            self._now = self._machine.roster.now
        self._clock.set(self._now)
        self._seq = handover.seq
        self._outcome = self._machine.roster.outcome if self._machine.deadline() is None else None
        self.log.adopt(handover.started, handover.log)

    def settle(self) -> None:
        """Wait for the known end of a job that was already over at its adoption."""
        if self._outcome is not None:
            wait([self.future], SETTLING_S)

    def _attach_again(self) -> None:
        """Take the job over again: the connection was lost, and is back."""
        assert self._job_client is not None
        try:
            answer = self._job_client.attach()
        except ClusterLost:
            self._away = True  # look again; the connection may be gone again
            return
        if isinstance(answer, JobHandover):
            self.adopt(answer)
            for wish in self._wishes:
                self._inbox.put(wish)
        elif answer.problem == "taken":
            self.detached = True
        else:
            self._step(ClusterGone("the scheduler was restarted, or has given the job up"))

    def _take(self, message: Message) -> None:
        """Take in a message from the cluster that is meant for this driver."""
        if isinstance(message, DriverReplaced):
            self._attach_again()
        elif isinstance(message, JobEvent):
            self._take_event(message)
        elif isinstance(message, SlotGranted):
            self._begin(message)
        elif isinstance(message, RankOutput):
            if message.gap:
                self.log.note_gap(message.start)
            self.log.note_output(message.start, message.text)
        elif isinstance(message, TelemetryBatch):
            members = self._machine.roster.members()
            self.log.note_telemetry(message.ranks, [rank.start for rank in members])
        elif isinstance(message, WorkerRefused):
            self.log.note(Record("refused", worker=message.worker, detail=message.reason))

    def _take_event(self, message: JobEvent) -> None:
        if message.seq <= self._seq:
            return  # sent twice
        self._seq = message.seq
        self.log.note_event(message.event, message.result, message.error)
        if isinstance(message.event, SlotGone):
            assert self._job_client is not None
            for start, at in list(self._slots.items()):
                if at == message.event.slot:  # Dask would keep tasks pinned to it for ever
                    self._slots.pop(start)
                    self._job_client.forget(start)
        self._step(message.event, self._seq)

    # -- tasks ---------------------------------------------------------------------------------

    def _begin(self, granted: SlotGranted) -> None:
        """Start a rank whose slot was granted, unless it has been given up meanwhile."""
        start, roster = granted.start, self._machine.roster
        rank = roster.ranks.get(start)
        if self._job_client is None or rank is None or rank.stage != Stage.STARTING:
            return
        self._slots[start] = granted.slot.id
        spec = self.options.rank_spec(
            self.name,
            self._job_client.uid,
            start,
            granted.place,
            self.log.metrics.state_bytes() if roster.ran else None,
        )
        self._job_client.submit(spec, granted.slot, self.options.resources)

    # -- the end -------------------------------------------------------------------------------

    def _finish(self, bug: BaseException | None) -> None:
        """Take everything down, then let the user know."""
        try:
            if bug is not None:
                logger.error("the driver of job %r failed", self.name, exc_info=bug)
            if self._job_client is not None and self.detached:
                self._job_client.detach()
            elif self._job_client is not None:
                self._job_client.close()
                self.free_workers = self._job_client.free_workers
            if self.options.timeline is not None and not self.detached:
                self._write_timeline(self.options.timeline)
            self._cleanup()
        except BaseException as error:  # whatever Dask raises: the result matters more
            logger.warning("job %r could not clean up: %r", self.name, error)
        self.ended = self.log.elapsed
        settle(self.future, self.name, self.log, self._outcome, bug, detached=self.detached)

    def _write_timeline(self, path: str) -> None:
        assert self._job_client is not None
        try:
            if join_parts(path, self._job_client.uid):
                return
            problem = "no rank has written its part: all workers and the kernel must see the path"
        except OSError as error:
            problem = f"it cannot be written: {error}"
        self.log.note(Record("warning", detail=f"there is no timeline at {path}\n{problem}"))
