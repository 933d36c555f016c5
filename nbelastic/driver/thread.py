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
from collections.abc import Callable, MutableMapping
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

from nbelastic import messages as m
from nbelastic.cluster import JobClient
from nbelastic.driver.kernel_log import KernelLog
from nbelastic.driver.options import Options
from nbelastic.driver.outcome import abandon, settle
from nbelastic.elastic.ranks.timeline import join_parts
from nbelastic.errors import ClusterLost
from nbelastic.membership import TICK, Machine, Phase, Stage, reasons, unpack_machine, view
from nbelastic.status import JobStatus

logger = logging.getLogger(__name__)

SETTLING_S = 5.0  # seconds in which a driver has carried out what it has adopted

# Most seconds that count between two looks at the clock. A laptop sleeps, a cell holds the
# interpreter for a minute: then many messages wait, and no deadline may pass before they are read.
MOST_COUNTED = 2.0

CHANCE = random.Random().random  # own numbers: a user's kernel keeps the ones it has seeded


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
        inbox: Any = None,  # a ``queue.SimpleQueue``, or a test's
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = CHANCE,
    ) -> None:
        self.name = name
        self.log = KernelLog()
        self.ended: float | None = None
        self.future: Future[list[Any]] = Future()
        self.chaos: Callable[[m.FaultReport], None] | None = None
        self.variables: MutableMapping[str, Any] = {}  # of the function, here
        self.options = options
        self.job_client: JobClient  # from its start on
        self._cleanup = cleanup
        self._machine = Machine(options.limits())
        self._clock = clock
        self._inbox = queue.SimpleQueue() if inbox is None else inbox
        self._chance = chance
        self._lock = threading.Lock()
        self._slots: dict[int, str] = {}
        self._wishes: list[m.Event] = []
        self._seq = 0
        self.detached = self._away = False
        self._now, self._looked = 0.0, clock()  # the job's time, and the last look at the clock
        self._outcome: m.Outcome | None = None
        self._thread = threading.Thread(
            target=self.run, name=f"nbelastic-driver-{name}", daemon=True
        )
        self.future.set_running_or_notify_cancel()

    def start(self, job_client: JobClient) -> None:
        """Start the thread; from here on it owns the client."""
        self.job_client = job_client
        self._thread.start()

    def tell(self, event: m.Event) -> None:
        """Put an event of the user on the queue."""
        self._wishes.append(event)
        self._inbox.put(event)
        if self.ended is not None and isinstance(event, m.StopRequested):
            abandon(self.future, self.name, event)  # the thread has ended

    def receive(self, message: m.ToDriver) -> None:
        """Put a message from the cluster on the queue. Called in the client's event loop."""
        if not isinstance(message.message, m.FaultReport):
            self._inbox.put(message)
        elif self.chaos is not None:
            self.chaos(message.message)

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the thread, between two events. For ``nbelastic.chaos``."""
        self._inbox.put(function)

    # -- for all threads -----------------------------------------------------------------------

    def view(self) -> JobStatus:
        """Return the part of the job's status that its machine knows."""
        with self._lock:
            status = view(self._machine, self.log.metrics.of_rank)
            why = reasons(self._machine, self._now)
        return replace(status, reason="; ".join(map(self.log.in_words, why)))

    @property
    def away(self) -> bool:
        """Whether the connection to the scheduler is lost, and may come back."""
        return self._away and self._outcome is None

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
            item: m.Event | m.ToDriver | Callable[[], object] | None
            try:
                item = self._inbox.get(timeout=TICK)
            except queue.Empty:
                item = self._look_at_connection()
            if isinstance(item, m.Event):
                self._step(item)
            elif isinstance(item, m.ToDriver):
                if item.epoch == self.job_client.epoch:
                    self._take(item.message)
            elif item is not None:
                item()

    def _step(self, event: m.Event, seq: int = 0) -> None:
        """Make the machine decide, and send the step; `seq` is the event's number, 0 without."""
        with self._lock:
            looked, self._looked, chance = self._looked, self._clock(), self._chance()
            self._now += min(self._looked - looked, MOST_COUNTED)
            effects = self._machine.handle(event, self._now, chance)
            size = self._machine.roster.size
        outcome = next((each.outcome for each in effects if isinstance(each, m.End)), None)
        if outcome is not None and isinstance(event, m.Tick) and not self._is_over():
            return
        if isinstance(event, m.ClusterGone):
            outcome = self._machine.roster.outcome  # it may have been known, and not published
        self.job_client.step(self._now, chance, seq, None if seq else event)
        for effect in effects:  # the scheduler carries them out
            self.log.note_effect(effect, size, event)
        self._outcome = outcome or self._outcome

    def _is_over(self) -> bool:
        """Return whether an end by time holds: not if the scheduler has gone on alone."""
        machine = self._machine
        if self.job_client.drives():
            return True
        self._attach_again()
        return self._machine is machine and not self._away and not self.detached

    def _look_at_connection(self) -> m.Event | None:
        status, was_away = self.job_client.status, self._away
        self._away = status == "connecting"
        if status == "running" and was_away:
            self._attach_again()  # before anything is decided by what was known then
        elif status == "running":
            return m.Tick()
        if status in ("running", "connecting"):
            if self._away:  # time does not count until it is clear what has become of the job
                self._looked = self._clock()
            return None
        return m.ClusterGone(
            f"the Dask client is {status}; if its scheduler lives, the job goes on there for up to "
            f"{self.options.lease:g} s: nbelastic.attach({self.name!r}, cluster=...) takes it over"
        )

    # -- taking a job over ---------------------------------------------------------------------

    def adopt(self, handover: m.JobHandover) -> None:
        """Take over a job as the scheduler has it; see :meth:`JobClient.attach`."""
        with self._lock:
            self._machine = unpack_machine(handover.machine)
            self._now = self._machine.roster.now
        self._looked = self._clock()
        self._seq = handover.seq
        roster = self._machine.roster
        self._outcome = roster.outcome if roster.phase == Phase.ENDED else None
        self.log.adopt(handover.started, handover.log)

    def settle(self) -> None:
        """Wait for the known end of a job that was already over at its adoption."""
        if self._outcome is not None:
            wait([self.future], SETTLING_S)

    def _attach_again(self) -> None:
        try:
            answer = self.job_client.attach()
        except ClusterLost:
            self._away = True  # look again; the connection may be gone again
            return
        if isinstance(answer, m.JobHandover):
            self.adopt(answer)
            for wish in self._wishes:
                self._inbox.put(wish)
        elif answer.problem == "taken":
            self.detached = True
        else:
            self._step(m.ClusterGone("the scheduler was restarted, or has given the job up"))

    def _take(self, message: m.Message) -> None:
        if isinstance(message, m.DriverReplaced):
            self._attach_again()
        elif isinstance(message, m.JobEvent):
            self._take_event(message)
        elif isinstance(message, m.SlotGranted):
            self._begin(message)
        elif isinstance(message, m.RankOutput):
            if message.gap:
                self.log.note_gap(message.start)
            self.log.note_output(message.start, message.text)
        elif isinstance(message, m.TelemetryBatch):
            members = self._machine.roster.members()
            self.log.note_telemetry(message.ranks, [rank.start for rank in members])

    def _take_event(self, message: m.JobEvent) -> None:
        if message.seq <= self._seq:
            return  # sent twice
        self._seq = message.seq
        self.log.note_event(message.event, message.result, message.error)
        if isinstance(message.event, m.SlotGone):
            for start, at in list(self._slots.items()):
                if at == message.event.slot:  # Dask would keep tasks pinned to it for ever
                    self._slots.pop(start)
                    self.job_client.forget(start)
        self._step(message.event, self._seq)

    # -- tasks ---------------------------------------------------------------------------------

    def _begin(self, granted: m.SlotGranted) -> None:
        start, roster = granted.start, self._machine.roster
        rank = roster.ranks.get(start)
        if rank is None or rank.stage != Stage.STARTING:
            return
        self._slots[start] = granted.slot.id
        spec = self.options.rank_spec(
            self.name,
            self.job_client.uid,
            start,
            granted.place,
            self.log.metrics.state_bytes() if roster.ran else None,
        )
        self.job_client.submit(spec, granted.slot, self.options.resources)

    # -- the end -------------------------------------------------------------------------------

    def _finish(self, bug: BaseException | None) -> None:
        """Take everything down, then let the user know."""
        try:
            if bug is not None:
                logger.error("the driver of job %r failed", self.name, exc_info=bug)
            if self.detached:
                self.job_client.detach()
            else:
                self.job_client.close()
            if self.options.timeline is not None and not self.detached:
                self._write_timeline(self.options.timeline)
            self._cleanup()
        except BaseException as error:  # whatever Dask raises: the result matters more
            logger.warning("job %r could not clean up: %r", self.name, error)
        self.ended = self.log.elapsed
        settle(self.future, self.name, self.log, self._outcome, bug, detached=self.detached)

    def _write_timeline(self, path: str) -> None:
        try:
            if join_parts(path, self.job_client.uid):
                return
            problem = "no rank has written its part: all workers and the kernel must see the path"
        except OSError as error:
            problem = f"it cannot be written: {error}"
        self.log.note(m.Record("warning", detail=f"there is no timeline at {path}\n{problem}"))
