"""Watch for notices: of the machine, of the own batch job, and by signals.

Runs in a worker: :class:`NoticeWatcher` in its event loop, :class:`MachineWatch` in a thread of its
own, which only the agent has that the scheduler has chosen for its host.

A metadata service has fixed addresses, so there is no name to look up. Proxies are bypassed and
redirections not followed: what is at the end of either is not this machine's service.
"""

from __future__ import annotations

import http.client
import logging
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil
from msgspec.structs import replace

from nbelastic.messages import Notice, NoticeSource, WatchOrder

from .notices import CLOUDS, Answer, Ask, Cloud, KeyExpired, Unanswered, batch_job_end
from .signals import leave_on_user_signals

if TYPE_CHECKING:
    from tornado.ioloop import IOLoop

logger = logging.getLogger(__name__)

HOSTS = ("169.254.169.254", "fd00:ec2::254", "fd20:ce::254")
"""Host of each cloud's service, and those of AWS and Google on a machine without IPv4.

``NBELASTIC_METADATA_URL`` names another service for tests.
"""

CONNECT_LIMIT_S = 0.2
"""Seconds for a connection: the service is next to the machine."""

REQUEST_LIMIT_S = 2.0
"""Seconds that the service may be silent within a request."""

MOST_BYTES = 1 << 16
"""Most bytes of an answer that are read."""

MOST_PROBES = 9
"""How often a service is looked for that takes connections and does not answer."""

POLL_INTERVAL = 5.0
"""Seconds from the answer of a service to the next request."""

SAME = 2.0
"""Seconds by which a deadline must come nearer to be news."""

BATCH_SECONDS = 120.0
"""Seconds before the end of a batch job's time at which its workers are left."""

SIGNAL_SECONDS = 60.0
"""Seconds from a signal until the end: what SLURM's ``--signal`` and SGE's ``-notify`` give."""


def find_service() -> str | None:
    """Return the URL of the metadata service; None where nothing takes a connection."""
    given = os.environ.get("NBELASTIC_METADATA_URL")
    urls = [given] if given else [f"http://{f'[{h}]' if ':' in h else h}" for h in HOSTS]
    for url in urls:
        with suppress(OSError, ValueError):
            place = urlsplit(url)
            address = (place.hostname or "", place.port or 80)
            socket.create_connection(address, CONNECT_LIMIT_S).close()
            return url
    return None


def ask_service(url: str, method: str, path: str, headers: dict[str, str]) -> Answer:
    """Make a request; raise OSError without a valid answer."""
    place = urlsplit(url)
    service = http.client.HTTPConnection(place.netloc, timeout=REQUEST_LIMIT_S)
    try:
        with closing(service):
            service.request(method, path, headers=headers)
            answer = service.getresponse()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, names, answer.read(MOST_BYTES))
    except (http.client.HTTPException, ValueError) as error:
        # The error's own text may quote a header, and so a token.
        raise OSError(f"not an answer: {type(error).__name__}") from None


class MachineWatch(threading.Thread):
    """Thread to find the metadata service of a machine and to poll it, step by step.

    It ends when it is stopped, or has found that there is no service. ``tell(risk, notice)`` is
    called with the first answer, and whenever either changes; what is not in force is revoked: an
    earlier watch may have told of it. A notice in force hides a risk. `find`, `ask` and `clock` are
    the service and the clock, which tests replace.
    """

    def __init__(
        self,
        tell: Callable[[Notice, Notice], None],
        find: Callable[[], str | None] = find_service,
        ask: Callable[[str, str, str, dict[str, str]], Answer] = ask_service,
        clock: Callable[[], float] = time.monotonic,
        interval: float = POLL_INTERVAL,
    ) -> None:
        super().__init__(name="nbelastic-notices", daemon=True)
        self._tell = tell
        self._find = find
        self._ask_at = ask
        self._clock = clock
        self._interval = interval
        self._stopping = threading.Event()
        self._probes = 0
        self._cloud: Cloud | None = None
        self._ask: Ask | None = None
        self._key: str | None = None
        self._told: tuple[Notice, Notice] | None = None
        self._deadline = 0.0  # of the notice in it, by `clock`

    def stop(self) -> None:
        """Make the thread end with the request that is under way."""
        self._stopping.set()

    def run(self) -> None:
        wait, well = 0.0, True
        while not self._stopping.wait(wait):
            wait = self._interval
            try:
                if not self.step():
                    return
            except Exception:  # one answer that nothing here expects must not end the watch
                if well:
                    logger.exception("an answer about notices of this machine cannot be read")
                well = False

    def step(self) -> bool:
        """Look for the service, or poll it; return whether to go on."""
        if self._cloud is None or self._ask is None:
            return self._probe()
        try:
            if self._key is None:
                self._key = self._cloud.find_key(self._ask)
            if self._key is None:
                raise Unanswered("no new key")
            self._take(self._cloud, self._cloud.poll(self._ask, self._key))
        except (OSError, Unanswered) as error:  # silence revokes nothing
            if isinstance(error, KeyExpired):
                self._key = None
            logger.debug("no answer about notices: %s", error)
        return True

    def _probe(self) -> bool:
        self._probes += 1
        url = self._find()
        if url is None:
            return False
        self._ask, silent = partial(self._ask_at, url), False
        for cloud in CLOUDS:
            try:
                self._key = cloud.find_key(self._ask)
            except OSError:  # what takes connections there may be starting
                silent = True
                continue
            if self._key is not None:
                self._cloud = cloud
                return True
        return silent and self._probes < MOST_PROBES

    def _take(self, cloud: Cloud, found: tuple[Notice, ...]) -> None:
        """Report the notices in force, if changed."""
        none = Notice(cloud.source, host=True, revoked=True)
        notice = next((each for each in found if not each.soft), none)
        risks = found if notice.revoked else ()
        risk = next((each for each in risks if each.soft), replace(none, soft=True))
        deadline = self._clock() + notice.seconds
        known = none if self._told is None else self._told[1]
        if not (notice.revoked or known.revoked) and deadline > self._deadline - SAME:
            # More time is no news, and some sources give each time as much.
            notice, deadline = known, self._deadline
        if (risk, notice) != self._told:
            self._told, self._deadline = (risk, notice), deadline
            self._tell(risk, notice)


class NoticeWatcher:
    """Watches as the scheduler orders; `shield` makes the worker's nanny survive signals."""

    def __init__(
        self,
        loop: IOLoop,
        send: Callable[[Notice], None],
        shield: Callable[[bool], object] = bool,
    ) -> None:
        self._loop = loop
        self._send = send
        self._shield = shield
        self._watch: MachineWatch | None = None
        self._timer: object | None = None
        self._stop_handling: Callable[[], None] | None = None
        self._closed = False

    def apply(self, order: WatchOrder) -> None:
        """Watch for what the scheduler orders, and for nothing else."""
        if self._closed:
            return  # an order that has come while the worker closes
        if order.host and self._watch is None:
            self._watch = MachineWatch(partial(self._loop.add_callback, self._report))
            self._watch.start()
        elif not order.host and self._watch is not None:
            self._watch.stop()
            self._watch = None
        if order.on and self._stop_handling is None:
            self._stop_handling = leave_on_user_signals(
                partial(self._loop.add_callback, self._report_signal)
            )
            self._shield(True)
            end = batch_job_end(os.environ, _started())
            if end is not None and end[1] > time.time():  # else of an earlier job's environment
                delay = max(end[1] - time.time() - BATCH_SECONDS, 0.0)
                self._timer = self._loop.call_later(delay, self._end_batch_job, *end)
        elif not order.on and self._stop_handling is not None:
            self._stop_handling()
            self._stop_handling = None
            self._shield(False)
            if self._timer is not None:
                self._loop.remove_timeout(self._timer)
            self._timer = None

    def close(self) -> None:
        """Watch for nothing any more."""
        self.apply(WatchOrder())
        self._closed = True

    def _report(self, *notices: Notice) -> None:
        for notice in notices:
            self._send(notice)

    # -- the own batch job, and signals ------------------------------------------------------------

    def _end_batch_job(self, source: NoticeSource, end: float) -> None:
        self._send(Notice(source, "end", max(end - time.time(), 0.0)))

    def _report_signal(self, name: str) -> None:
        end = batch_job_end(os.environ, _started())
        left = -1.0 if end is None else end[1] - time.time()
        seconds = min(left, SIGNAL_SECONDS) if left > 0 else SIGNAL_SECONDS
        self._send(Notice(NoticeSource.SIGNAL, name, seconds))


def _started() -> float:
    """Return the start time of this process, or of its nanny if earlier."""
    parent = multiprocessing.parent_process()
    processes = [None] if parent is None else [None, parent.pid]
    found = []
    for pid in processes:
        try:
            found.append(float(psutil.Process(pid).create_time()))
        except psutil.Error:
            pass  # it is gone
    return min(found, default=time.time())
