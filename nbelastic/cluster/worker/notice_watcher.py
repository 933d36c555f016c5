"""Watch for notices, of the machine and of the own batch job.

Runs in a worker: :class:`NoticeWatcher` in its event loop, :class:`MetadataPoller` in a thread of
its own, which only the agent has that the scheduler has chosen for its host. The machine's are at
its cloud's metadata service, which is asked at its link-local address, never through a proxy, and
at most once in POLL_INTERVAL seconds.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import multiprocessing
import os
import socket
import threading
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil

from nbelastic.cluster.wire import NoticeReport, WatchOrder

from .notices import SOURCES, Answer, Unanswered, batch_job_end

if TYPE_CHECKING:
    from collections.abc import Callable

    from tornado.ioloop import IOLoop

    from .notices import AskedCloud, Notice

__all__ = ["MetadataPoller", "NoticeWatcher"]

logger = logging.getLogger(__name__)

METADATA_URL = "http://169.254.169.254"
"""Where each cloud's metadata service is; ``NBELASTIC_METADATA_URL`` names another for tests."""

PROBE_LIMIT = 0.2
"""Seconds that a service has to answer to be found; it is on the machine itself, or next to it."""

REQUEST_LIMIT = 2.0
"""Seconds that a service has for an answer, once it was found."""

POLL_INTERVAL = 5.0
"""Seconds from the answer of a service to the next request."""

MOST_BYTES = 1 << 16
"""Most bytes of an answer that are read."""

BATCH_SECONDS = 120.0
"""Seconds before the end of a batch job's time at which its workers are left."""

STOP_GRACE = REQUEST_LIMIT + 0.5
"""Seconds that a closing worker waits for the thread."""


class MetadataPoller:
    """A thread that asks the metadata service of the machine, if there is one.

    Parameters
    ----------
    tell : callable
        ``tell(notice)`` is called in the thread for a notice, and with None when it is revoked.
    interval : float
        Seconds between two requests.
    """

    def __init__(
        self, tell: Callable[[Notice | None], None], interval: float = POLL_INTERVAL
    ) -> None:
        self._tell = tell
        self._interval = interval
        self._stopping = threading.Event()
        self._connection: http.client.HTTPConnection | None = None
        place = urlsplit(os.environ.get("NBELASTIC_METADATA_URL") or METADATA_URL)
        self._place = place.hostname or "", place.port or 80
        self._thread = threading.Thread(target=self._run, name="nbelastic-notices", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the thread runs: until it is stopped, or has found no service."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Have the thread end soon, also in the middle of a request."""
        self._stopping.set()
        connection = self._connection
        sock = None if connection is None else connection.sock
        try:
            if sock is not None:
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is closed already

    def _run(self) -> None:
        try:
            cloud = self._find()
            if cloud is not None:
                self._poll(cloud)
        except Exception:  # the thread must not end without a word
            logger.exception("notices of this machine are not watched for any more")

    def _find(self) -> AskedCloud | None:
        def ask(method: str, path: str, headers: dict[str, str]) -> Answer:
            return self._ask(method, path, headers, PROBE_LIMIT)

        for kind in SOURCES:
            cloud = kind()
            try:
                if not self._stopping.is_set() and cloud.found(ask):
                    return cloud
            except OSError:
                pass  # no such service
        return None

    def _poll(self, cloud: AskedCloud) -> None:
        def ask(method: str, path: str, headers: dict[str, str]) -> Answer:
            return self._ask(method, path, headers, REQUEST_LIMIT)

        known = None
        while not self._stopping.wait(self._interval):
            try:
                notice = cloud.poll(ask, time.time())
            except (OSError, Unanswered) as error:  # silence revokes nothing
                logger.debug("no answer about notices: %s", error)
                continue
            if (notice is None) != (known is None):
                known = notice
                self._tell(notice)

    def _ask(self, method: str, path: str, headers: dict[str, str], limit: float) -> Answer:
        connection = http.client.HTTPConnection(*self._place, timeout=limit)
        self._connection = connection
        try:
            connection.request(method, path, headers={**headers, "Connection": "close"})
            answer = connection.getresponse()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, names, answer.read(MOST_BYTES))
        except http.client.HTTPException as error:
            raise OSError(f"not an answer: {error!r}") from error
        finally:
            self._connection = None
            connection.close()


class NoticeWatcher:
    """Watches as the scheduler orders, and reports to it.

    Parameters
    ----------
    loop : IOLoop
        The worker's event loop, which calls all but the constructor of :class:`MetadataPoller`.
    send : callable
        ``send(report)`` sends a report to the scheduler; called in the event loop.
    """

    def __init__(self, loop: IOLoop, send: Callable[[NoticeReport], None]) -> None:
        self._loop = loop
        self._send = send
        self._poller: MetadataPoller | None = None
        self._stopped: list[MetadataPoller] = []
        self._timer: object | None = None
        self._last: Notice | None = None

    def heed(self, order: WatchOrder) -> None:
        """Watch for what the scheduler orders, and for nothing else."""
        if order.host and self._poller is None:
            self._poller = MetadataPoller(self._hand_over)
        elif not order.host and self._poller is not None:
            self._poller.stop()
            self._stopped = [*filter(_runs, self._stopped), self._poller]
            self._poller = None
        if order.on and self._timer is None:
            self._await_batch_job()
        elif not order.on and self._timer is not None:
            self._loop.remove_timeout(self._timer)
            self._timer = None

    async def stopped(self) -> None:
        """Wait for threads that were told to stop, for a while."""
        for _ in range(int(STOP_GRACE / 0.05)):
            if not any(map(_runs, self._stopped)):
                break
            await asyncio.sleep(0.05)

    def _hand_over(self, notice: Notice | None) -> None:
        self._loop.add_callback(self._report, notice)

    def _report(self, notice: Notice | None) -> None:
        shown = notice or self._last
        if shown is None:
            return
        self._last = notice
        left = max(shown.deadline - time.time(), 0.0)
        revoked = notice is None
        self._send(NoticeReport(shown.source, shown.action, left, host=True, revoked=revoked))

    def _await_batch_job(self) -> None:
        end = batch_job_end(os.environ, _started())
        left = -1.0 if end is None else end.deadline - time.time()
        if end is not None and left > 0:  # else the environment is that of an earlier job
            delay = max(left - BATCH_SECONDS, 0.0)
            self._timer = self._loop.call_later(delay, self._end_batch_job, end)

    def _end_batch_job(self, end: Notice) -> None:
        left = max(end.deadline - time.time(), 0.0)
        self._send(NoticeReport(end.source, end.action, left, host=False))


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
