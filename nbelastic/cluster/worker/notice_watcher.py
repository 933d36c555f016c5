"""Watch for notices: of the machine, of the own batch job, and by signals.

Runs in a worker: :class:`NoticeWatcher` in its event loop, :func:`watch_machine` in a thread of its
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
from collections.abc import Callable, Iterator
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

MOST_BYTES = 1 << 16  # of an answer that are read
MOST_PROBES = 9  # of a service that takes connections and does not answer

# Limits, in seconds.
CONNECT_LIMIT_S = 0.2  # for a connection: the service is next to the machine
REQUEST_LIMIT_S = 2.0  # that the service may be silent within a request
POLL_INTERVAL = 5.0  # from the answer of a service to the next request
SAME = 2.0  # by which a deadline must come nearer to be news
BATCH_SECONDS = 120.0  # before the end of a batch job's time, when its workers are left
SIGNAL_SECONDS = 60.0  # to the end: what SLURM's ``--signal`` and SGE's ``-notify`` give


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


def watch_machine(
    tell: Callable[[Notice, Notice], None],
    find: Callable[[], str | None] = find_service,
    ask_at: Callable[[str, str, str, dict[str, str]], Answer] = ask_service,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[None]:
    """Find the metadata service of this machine and poll it; pause at each ``yield``.

    It ends when there is no service. ``tell(risk, notice)`` is called with the first answer, and
    whenever either changes; what is not in force is revoked: an earlier watch may have told of it.
    A notice in force hides a risk.
    """
    for _ in range(MOST_PROBES):
        if (url := find()) is None:
            return
        ask = partial(ask_at, url)
        cloud, key, silent = _probe(ask)
        if cloud is not None or not silent:
            break
        yield
    if cloud is None:
        return
    none = Notice(cloud.source, host=True, revoked=True)
    risk, notice, deadline = none, none, 0.0  # no risk is like this, so the first answer is told
    while True:
        try:
            if key is None and (key := cloud.find_key(ask)) is None:
                raise Unanswered("no new key")
            found = cloud.poll(ask, key)
        except OSError as error:  # silence revokes nothing
            if isinstance(error, KeyExpired):
                key = None
            logger.debug("no answer about notices: %s", error)
        else:
            before = risk, notice
            latest = next((each for each in found if not each.soft), none)
            end = clock() + latest.seconds
            # More time is no news, and some sources give each time as much.
            if latest.revoked or notice.revoked or end <= deadline - SAME:
                notice, deadline = latest, end
            risks = [each for each in found if each.soft and notice.revoked]
            risk = risks[0] if risks else replace(none, soft=True)
            if before != (risk, notice):
                tell(risk, notice)
        yield


def _probe(ask: Ask) -> tuple[Cloud | None, str | None, bool]:
    """Return the cloud of this machine with its key, and whether one gave no answer."""
    silent = False
    for cloud in CLOUDS:
        try:
            key = cloud.find_key(ask)
        except OSError:  # what takes connections there may be starting
            silent = True
        else:
            if key is not None:
                return cloud, key, False
    return None, None, silent


def _watch(stopping: threading.Event, tell: Callable[[Notice, Notice], None]) -> None:
    for _ in watch_machine(tell):
        if stopping.wait(POLL_INTERVAL):
            return


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
        self._stopping: threading.Event | None = None  # of the thread
        self._timer: object | None = None
        self._stop_handling: Callable[[], None] | None = None
        self._closed = False

    def apply(self, order: WatchOrder) -> None:
        """Watch for what the scheduler orders, and for nothing else."""
        if self._closed:
            return  # an order that has come while the worker closes
        if order.host and self._stopping is None:
            self._stopping = threading.Event()
            args = (self._stopping, partial(self._loop.add_callback, self._report))
            name = "nbelastic-notices"
            threading.Thread(target=_watch, args=args, name=name, daemon=True).start()
        elif not order.host and self._stopping is not None:
            self._stopping.set()
            self._stopping = None
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

    def _end_batch_job(self, source: NoticeSource, end: float) -> None:
        self._send(Notice(source, "end", max(end - time.time(), 0.0)))

    def _report_signal(self, name: str) -> None:
        end = batch_job_end(os.environ, _started())
        left = 0.0 if end is None else end[1] - time.time()
        seconds = min(left, SIGNAL_SECONDS) if left > 0 else SIGNAL_SECONDS
        self._send(Notice(NoticeSource.SIGNAL, name, seconds))


def _started() -> float:
    """Return the start time of this process, or of its nanny if earlier."""
    parent, found = multiprocessing.parent_process(), [time.time()]
    for pid in (None, parent and parent.pid):
        with suppress(psutil.Error):  # it is gone
            found.append(float(psutil.Process(pid).create_time()))
    return min(found)
