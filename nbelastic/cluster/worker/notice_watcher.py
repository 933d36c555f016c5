"""Watch for notices: of the machine, of the own batch job, and by signals.

Runs in a worker: :class:`NoticeWatcher` in its event loop, :class:`MetadataPoller` in a thread of
its own, which only the agent has that the scheduler has chosen for its host. The machine's are at
its cloud's metadata service. That is looked for once, for PROBE_LIMIT seconds in all, and is then
asked at most once in POLL_INTERVAL seconds.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import threading
import time
from typing import TYPE_CHECKING, Protocol

import psutil

from nbelastic.cluster.wire import NoticeReport, WatchOrder
from nbelastic.membership import NoticeSource

from .metadata_service import MetadataService
from .notices import SOURCES, Unanswered, batch_job_end
from .signals import leave_on_user_signals

if TYPE_CHECKING:
    from collections.abc import Callable

    from tornado.ioloop import IOLoop

    from .metadata_service import Address
    from .notices import Answer, Ask, AskedCloud, Notice

logger = logging.getLogger(__name__)

PROBE_LIMIT = 0.2
"""Seconds in which a service is to be found, whatever is at the address; it is next to the machine.

Where something takes connections but does not answer in time, it is looked at again.
"""

MOST_PROBES = 9
"""How often a service is looked for that takes connections and does not answer.

Each time it has twice as long, up to :data:`REQUEST_LIMIT`.
"""

REQUEST_LIMIT = 2.0
"""Seconds that a service has for an answer, once it was found."""

POLL_INTERVAL = 5.0
"""Seconds from the answer of a service to the next request."""

SAME = 2.0
"""Seconds by which a deadline must come nearer to be news."""

BATCH_SECONDS = 120.0
"""Seconds before the end of a batch job's time at which its workers are left."""

SIGNAL_SECONDS = 60.0
"""Seconds from a signal until the end: what SLURM's ``--signal`` and SGE's ``-notify`` give."""

STOP_GRACE = REQUEST_LIMIT + 0.5
"""Seconds that a closing worker waits for the thread."""


class Service(Protocol):
    """What is needed of :class:`~.metadata_service.MetadataService`."""

    def reach(self, seconds: float) -> Address | None:
        """Return the address at which there is one."""

    def ask(
        self, address: Address, method: str, path: str, headers: dict[str, str], seconds: float
    ) -> Answer:
        """Make a request."""


class MachineWatch:
    """Finds the metadata service of a machine, and asks it, one step after the other.

    Parameters
    ----------
    service : Service
        Makes the requests.
    tell : callable
        ``tell(source, notice, soft)`` is called with the first answer, and whenever the notice in
        force changes, or that the machine is at risk (`soft`). None: there is none (any more).
    clock, wall : callable
        Return the time, the one by a clock that never goes back, the other since the epoch.
    """

    def __init__(
        self,
        service: Service,
        tell: Callable[[NoticeSource, Notice | None, Notice | None], None],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._service = service
        self._tell = tell
        self._clock = clock
        self._wall = wall
        self._probes = 0
        self._cloud: AskedCloud | None = None
        self._address: Address | None = None
        self._answered = False
        self._notice: Notice | None = None
        self._soft: Notice | None = None

    def step(self) -> bool:
        """Look for the service, or ask it; return whether there is anything more to do."""
        if self._cloud is None or self._address is None:
            return self._probe()
        try:
            notices = self._cloud.poll(self._ask_within(REQUEST_LIMIT), self._wall)
        except (OSError, Unanswered) as error:  # silence revokes nothing
            logger.debug("no answer about notices: %s", error)
        else:
            self._take(self._cloud.source, notices)
        return True

    def _probe(self) -> bool:
        limit = max(min(PROBE_LIMIT * 2**self._probes, REQUEST_LIMIT), PROBE_LIMIT)
        until = self._clock() + limit
        self._probes += 1
        self._address = self._service.reach(PROBE_LIMIT)
        if self._address is None:
            return False
        silent = False
        for kind in SOURCES:
            cloud = kind()
            try:
                if cloud.found(self._ask_within(until - self._clock())):
                    self._cloud = cloud
                    return True
            except OSError:
                silent = True
        return silent and self._probes < MOST_PROBES

    def _ask_within(self, seconds: float) -> Ask:
        until, address = self._clock() + seconds, self._address

        def ask(method: str, path: str, headers: dict[str, str], *, hold: float = 0.0) -> Answer:
            left = until + hold - self._clock()
            if left <= 0 or address is None:
                raise TimeoutError("timed out")
            return self._service.ask(address, method, path, headers, left)

        return ask

    def _take(self, source: NoticeSource, notices: tuple[Notice, ...]) -> None:
        """Tell what is in force, if that is new."""
        firm = [notice for notice in notices if not notice.soft]
        notice = min(firm, key=lambda each: each.deadline, default=None)
        soft = next((each for each in notices if each.soft), None)
        known = self._notice
        if notice is not None and known is not None and notice.deadline > known.deadline - SAME:
            notice = known  # more time is no news, and some sources give each time as much
        if (notice, soft) != (known, self._soft) or not self._answered:
            self._notice, self._soft, self._answered = notice, soft, True
            self._tell(source, notice, soft)


class MetadataPoller:
    """A thread that watches the machine, until it has found that there is no service.

    Parameters
    ----------
    tell : callable
        That of :class:`MachineWatch`, called in the thread.
    interval : float
        Seconds between two requests.
    """

    def __init__(
        self,
        tell: Callable[[NoticeSource, Notice | None, Notice | None], None],
        interval: float = POLL_INTERVAL,
    ) -> None:
        self._interval = interval
        self._stopping = threading.Event()
        self._service = MetadataService()
        self._watch = MachineWatch(self._service, tell)
        self._thread = threading.Thread(target=self._run, name="nbelastic-notices", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the thread runs: until it is stopped, or has found no service."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Have the thread end soon, also in the middle of a request."""
        self._stopping.set()
        self._service.stop()

    def _run(self) -> None:
        wait, well = 0.0, True
        while not self._stopping.wait(wait):
            wait = self._interval
            try:
                if not self._watch.step():
                    return
            except Exception:  # one answer that nothing here expects must not end the watch
                if well:
                    logger.exception("an answer about notices of this machine cannot be read")
                well = False


class NoticeWatcher:
    """Watches as the scheduler orders, and reports to it.

    Parameters
    ----------
    loop : IOLoop
        The worker's event loop, which calls all but the constructor of :class:`MetadataPoller`.
    send : callable
        ``send(report)`` sends a report to the scheduler; called in the event loop.
    shield : callable, optional
        ``shield(on)`` has the worker's nanny survive signals, or not any more.
    """

    def __init__(
        self,
        loop: IOLoop,
        send: Callable[[NoticeReport], None],
        shield: Callable[[bool], object] = bool,
    ) -> None:
        self._loop = loop
        self._send = send
        self._shield = shield
        self._poller: MetadataPoller | None = None
        self._stopped: list[MetadataPoller] = []
        self._timer: object | None = None
        self._heed_signals: Callable[[], None] | None = None
        self._closed = False

    def heed(self, order: WatchOrder) -> None:
        """Watch for what the scheduler orders, and for nothing else."""
        if self._closed:
            return  # an order that has come while the worker closes
        if order.host and self._poller is None:
            self._poller = MetadataPoller(self._hand_over)
        elif not order.host and self._poller is not None:
            self._poller.stop()
            self._stopped = [*filter(_runs, self._stopped), self._poller]
            self._poller = None
        if order.on and self._heed_signals is None:
            self._heed_signals = leave_on_user_signals(self._signalled)
            self._shield(True)
            self._await_batch_job()
        elif not order.on and self._heed_signals is not None:
            self._heed_signals()
            self._heed_signals = None
            self._shield(False)
            if self._timer is not None:
                self._loop.remove_timeout(self._timer)
            self._timer = None

    def close(self) -> None:
        """Watch for nothing any more."""
        self.heed(WatchOrder())
        self._closed = True

    async def stopped(self) -> None:
        """Wait for threads that were told to stop, for a while."""
        for _ in range(int(STOP_GRACE / 0.05)):
            if not any(map(_runs, self._stopped)):
                break
            await asyncio.sleep(0.05)

    # -- the machine -------------------------------------------------------------------------------

    def _hand_over(self, source: NoticeSource, notice: Notice | None, soft: Notice | None) -> None:
        self._loop.add_callback(self._report, source, notice, soft)

    def _report(self, source: NoticeSource, notice: Notice | None, soft: Notice | None) -> None:
        """Report what is in force, and what is not, which an earlier watcher may have reported."""
        advised = soft is not None and notice is None
        action = "" if soft is None else soft.action
        self._send(NoticeReport(source, action, 0.0, host=True, revoked=not advised, soft=True))
        if notice is None:
            self._send(NoticeReport(source, "", 0.0, host=True, revoked=True))
        else:
            self._send(NoticeReport(source, notice.action, _left(notice), host=True))

    # -- the own batch job, and signals ------------------------------------------------------------

    def _await_batch_job(self) -> None:
        end = batch_job_end(os.environ, _started())
        left = -1.0 if end is None else end.deadline - time.time()
        if end is not None and left > 0:  # else the environment is that of an earlier job
            delay = max(left - BATCH_SECONDS, 0.0)
            self._timer = self._loop.call_later(delay, self._end_batch_job, end)

    def _end_batch_job(self, end: Notice) -> None:
        self._send(NoticeReport(end.source, end.action, _left(end), host=False))

    def _signalled(self, name: str) -> None:
        """Have the event loop report a signal; called in its handler."""
        self._loop.add_callback(self._report_signal, name)

    def _report_signal(self, name: str) -> None:
        end = batch_job_end(os.environ, _started())
        left = SIGNAL_SECONDS if end is None else min(_left(end) or SIGNAL_SECONDS, SIGNAL_SECONDS)
        self._send(NoticeReport(NoticeSource.SIGNAL, name, left, host=False))


def _left(notice: Notice) -> float:
    """Return how many seconds are left, by the clock of this machine."""
    return max(notice.deadline - time.time(), 0.0)


def _runs(poller: MetadataPoller) -> bool:
    return poller.running


def _started() -> float:
    """Return when this process, or the nanny that has started it, was started."""
    parent = multiprocessing.parent_process()
    processes = [None] if parent is None else [None, parent.pid]
    found = []
    for pid in processes:
        try:
            found.append(float(psutil.Process(pid).create_time()))
        except psutil.Error:
            pass  # it is gone
    return min(found, default=time.time())
