"""The driver: the thread that feeds the membership machine and says what is decided.

One thread per job, ``nbelastic-driver-NAME``, started by :meth:`Driver.start` and ended by the
machine's ``End``. It owns the machine, the link and the embedded cluster if there is one.

Messages from the cluster come in on the event loop of the Dask client, calls of the user in any
thread; both only put something on the queue. The driver's thread takes one thing at a time, hands
it to the machine, tells the scheduler so (a *step* of its journal: there a copy of the machine
comes to the same effects and carries them out), and publishes what others may see (status,
history, logs) under a lock. Nothing else is shared, so nothing waits for anything but the queue.

If the connection is lost, the scheduler's copy carries on; when it is back, the driver attaches
again and takes over what has become of the job. If another kernel has attached meanwhile, it ends.

Everything is bounded: a look at the queue takes half a second at most, the machine always names a
deadline, a lost connection is given up by the client, and closing the link has a timeout.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from nbelastic.errors import ClusterLost
from nbelastic.membership import (
    ClusterGone,
    End,
    Event,
    Machine,
    Outcome,
    RankFailed,
    RankReturned,
    SlotGone,
    Stage,
    Tick,
    View,
    from_dict,
    pack_event,
    unpack_event,
    view,
)

from .books import Books
from .clock import LiveClock
from .outcome import settle

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbelastic.cluster import Link, Message

    from .options import Options

__all__ = ["Driver"]

logger = logging.getLogger(__name__)

LONGEST_WAIT = 0.5
"""Seconds between two looks at the clock and at the connection."""

CHANCE = random.Random().random
"""The driver's own random numbers: a user's kernel keeps the ones it has seeded."""


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
        chance: Callable[[], float] = CHANCE,
    ) -> None:
        self.name = name
        self.books = Books()
        self.ended: float | None = None
        self.future: Future[list[Any]] = Future()
        self.chaos: Callable[[Message], None] | None = None
        self._options = options
        self._cleanup = cleanup
        self._machine = Machine(options.limits())
        self._clock = LiveClock() if clock is None else clock
        self._inbox: Inbox = queue.SimpleQueue() if inbox is None else inbox
        self._chance = chance
        self._lock = threading.Lock()
        self._slots: dict[int, str] = {}
        self._wishes: list[Event] = []
        self._seq = 0
        self._detached = self._away = False
        self._now = 0.0
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
        self._wishes.append(event)
        self._inbox.put(event)

    def receive(self, message: Message) -> None:
        """Put a message from the cluster on the queue. Called in the client's event loop."""
        if message["do"] != "harm":
            self._inbox.put(message)
        elif self.chaos is not None:
            self.chaos(message)

    def order(self, do: str, **fields: Any) -> None:
        """Send ranks something that has nothing to do with membership. For ``nbelastic.chaos``."""
        if self._link is not None:
            self._link.order(do, **fields)

    def pause(self, over: threading.Event, seconds: float) -> None:
        """Have the thread stand still until an event, or so long. For ``nbelastic.chaos``."""
        if self._link is not None:
            epoch = self._link.epoch
            self._inbox.put({"do": "pause", "epoch": epoch, "over": over, "seconds": seconds})

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread to end."""
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(timeout)

    # -- what others may see -------------------------------------------------------------------

    def view(self) -> View:
        """Return what the machine looks like now."""
        with self._lock:
            return view(self._machine, self._now)

    @property
    def detached(self) -> bool:
        """Whether another kernel drives it now."""
        return self._detached

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
        while self._outcome is None and not self._detached:
            deadline = self._machine.deadline()
            wait = LONGEST_WAIT
            if deadline is not None:
                wait = min(max(deadline - self._now, 0.0), wait)
            item: Event | Message | None
            try:
                item = self._inbox.get(timeout=wait)
            except queue.Empty:
                item = self._look_at_connection()
            if isinstance(item, Event):
                self._step(item)
            elif item is not None:
                self._take(item)

    def _step(self, event: Event, seq: int = 0) -> None:
        """Have the machine decide, and say so; `seq` is the event's number if it has one."""
        assert self._link is not None
        with self._lock:
            self._now, chance = self._clock.now(), self._chance()
            effects = self._machine.handle(event, self._now, chance)
            roster = self._machine.roster
            size = 0 if roster.ended else roster.counted.present
        outcome = next((each.outcome for each in effects if isinstance(each, End)), None)
        if outcome is not None and isinstance(event, Tick) and not self._is_over():
            return
        if isinstance(event, ClusterGone):
            outcome = self._machine.roster.outcome  # it may have been known, and not told
        self._link.step(self._now, chance, seq, None if seq else pack_event(event))
        for effect in effects:  # the scheduler carries them out
            self.books.note_effect(effect, size)
        self._outcome = outcome or self._outcome

    def _is_over(self) -> bool:
        """Return whether an end that only time has brought holds.

        Not if the connection was lost, and the scheduler has gone on without this driver.
        """
        assert self._link is not None
        machine = self._machine
        if self._link.drives():
            return True
        self._attach_again()
        return self._machine is machine and not self._away and not self._detached

    def _look_at_connection(self) -> Event | None:
        assert self._link is not None
        status, was_away = self._link.status, self._away
        self._away = status == "connecting"
        if status == "running" and was_away:
            self._attach_again()  # before anything is decided by what was known then
        elif status == "running":
            return Tick()
        if status in ("running", "connecting"):
            if self._away:  # time does not count until it is clear what has become of the job
                self._clock.set(self._now)
            return None
        return ClusterGone(f"the Dask client is {status}; {self._afterlife()}")

    def _afterlife(self) -> str:
        return (
            f"if its scheduler lives, the job goes on there for up to {self._options.lease:g} s: "
            f"nbelastic.attach({self.name!r}, cluster=...) takes it over"
        )

    # -- taking a job over ---------------------------------------------------------------------

    def adopt(self, packed: Mapping[str, Any]) -> None:
        """Take over a job as the scheduler has it; see :meth:`Link.attach`."""
        with self._lock:
            self._machine = from_dict(packed["machine"])
            self._now = self._machine.roster.now
        self._clock.set(self._now)
        self._seq = packed["seq"]
        self._outcome = self._machine.roster.outcome if self._machine.deadline() is None else None
        self.books.adopt(packed["started"], packed["archive"])

    def _attach_again(self) -> None:
        """Take the job over again: the connection was lost, and is back."""
        assert self._link is not None
        try:
            packed = self._link.attach()
        except ClusterLost:
            self._away = True  # look again; the connection may be gone again
            return
        problem = packed.get("problem")
        if problem == "taken":
            self._detached = True
        elif problem:
            self._step(ClusterGone("the scheduler was restarted, or has given the job up"))
        else:
            self.adopt(packed)
            for wish in self._wishes:
                self._inbox.put(wish)

    def _take(self, message: Message) -> None:
        """Take in a message from the cluster, unless it was meant for a driver before."""
        assert self._link is not None
        do = message["do"]
        if message["epoch"] != self._link.epoch:
            return
        if do == "stale":
            self._attach_again()
        elif do == "event":
            self._take_event(message)
        elif do == "granted":
            self._begin(message["start"], message["slot"], message["place"])
        elif do == "output":
            self.books.note_output(message["start"], message["text"])
        elif do == "vitals":
            members = self._machine.roster.members()
            self.books.note_vitals(message["vitals"], [rank.start for rank in members])
        elif do == "refused":
            self.books.note("refused", worker=message["worker"], detail=message["reason"])
        elif do == "pause":
            message["over"].wait(message["seconds"])

    def _take_event(self, message: Message) -> None:
        if message["seq"] <= self._seq:
            return  # said twice
        self._seq = message["seq"]
        event = unpack_event(message["event"])
        if isinstance(event, (RankReturned, RankFailed)):
            self.books.note_attachment(type(event).__name__, event.start, message["attachment"])
        elif isinstance(event, SlotGone):
            self._forget_slot(event.slot)
        self._step(event, self._seq)

    # -- tasks ---------------------------------------------------------------------------------

    def _begin(self, start: int, slot: dict[str, str], place: dict[str, int]) -> None:
        """Start a rank whose slot was granted, unless it has been given up meanwhile."""
        rank = self._machine.roster.ranks.get(start)
        if self._link is None or rank is None or rank.stage != Stage.STARTING:
            return
        self._slots[start] = slot["id"]
        self._link.submit(
            start,
            slot,
            place,
            resources=self._options.resources,
            operation_timeout_s=self._options.stall_timeout * 1.5 + 30.0,
            backend=self._options.backend,
            checkpoint=self._options.checkpoints(),
            state_bytes=self.books.gauges.state_bytes() if self._machine.roster.ran else None,
        )

    def _forget_slot(self, slot: str) -> None:
        """Let go of tasks pinned to a worker that is gone: Dask would keep them for ever."""
        assert self._link is not None
        for start, at in list(self._slots.items()):
            if at == slot:
                self._slots.pop(start)
                self._link.forget(start)

    # -- the end -------------------------------------------------------------------------------

    def _finish(self, bug: Exception | None) -> None:
        """Take everything down, then let the user know."""
        try:
            if self._link is not None and self._detached:
                self._link.detach()
            elif self._link is not None:
                self._link.close()
            self._cleanup()
        except Exception as error:  # whatever Dask raises while it closes: the result matters more
            logger.warning("job %r could not clean up: %r", self.name, error)
        self.ended = time.time()
        settle(self.future, self.name, self.books, self._outcome, bug, detached=self._detached)
