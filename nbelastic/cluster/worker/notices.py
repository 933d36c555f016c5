"""Read and watch for notices: a machine, or a batch job on it, announces its end.

An answer is no more trusted than any other text from a network: another cloud's service, a proxy's
login page or anything else may be at the address. What reads it has no connection: it asks through
a function that is given.

:class:`NoticeWatcher` runs in a worker's event loop, :func:`watch_machine` in a thread of its own,
which only the agent has that the scheduler has chosen for its host. A metadata service has fixed
addresses, so there is no name to look up. Proxies are bypassed and redirections not followed: what
is at the end of either is not this machine's service.
"""

from __future__ import annotations

import http.client
import logging
import math
import multiprocessing
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import psutil
from msgspec.structs import replace

from nbelastic.messages import Notice, NoticeSource, WatchOrder

if TYPE_CHECKING:
    from tornado.ioloop import IOLoop

logger = logging.getLogger(__name__)

TOKEN_SECONDS = 21600  # for which AWS's token is good: the most that there are
GOOGLE_SECONDS = 30.0  # between Google's notice and the end of the machine
MOST_AHEAD = 86400.0  # from any notice to the end of the machine; a later time is an error

AZURE_ENDS = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy"})
"""Events of Azure with which the processes of a machine end; the others only pause them."""

AZURE_OVER = frozenset({"Completed", "Canceled"})
"""States of Azure's events in which nothing is to come any more."""

_WORD = re.compile(r"[A-Za-z][A-Za-z _-]{0,39}")


class Answer(NamedTuple):
    """Answer of a metadata service; the names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


Ask = Callable[[str, str, dict[str, str]], Answer]
"""``ask(method, path, headers)`` makes a request, or raises OSError."""

Read = Callable[[bytes, str, float], Notice | None]
"""``read(body, key, now)`` returns the notice in an answer; any error: it is no cloud's answer."""


@dataclass(frozen=True)
class Cloud:
    """Metadata service of a cloud: its requests, and how their answers are read."""

    source: NoticeSource
    probe: tuple[str, str, dict[str, str]]  # method, path and headers of the first request
    key: str  # pattern of its answer, without which further requests are refused
    polls: Mapping[str, Read]  # by path, the more urgent first
    header: tuple[str, str]  # of each poll; an empty value stands for the key
    marks: Mapping[str, str]  # headers that each answer must have
    absent: int = 0  # status that says that there is no notice

    def find_key(self, ask: Ask) -> str | None:
        """Return the key that further requests need; None if this is not the cloud's machine."""
        answer = ask(*self.probe)
        # It may be sent as a header, which may not hold everything.
        text = answer.body.strip().decode("ascii", "replace")
        ours = answer.status == 200 and self._is_marked(answer) and re.fullmatch(self.key, text)
        return text if ours else None

    def poll(self, ask: Ask, key: str) -> list[Notice]:
        """Return the notices in force; OSError: the service gave no usable answer."""
        found: list[Notice] = []
        for path, read in self.polls.items():
            answer = None
            try:
                answer = ask("GET", path, {self.header[0]: self.header[1] or key})
                if answer.status == 200 and self._is_marked(answer):
                    notice = read(answer.body, key, _date(answer))
                    found += [notice] if notice else []
                elif answer.status != self.absent:
                    raise OSError("refused, or from another service")
            except Exception as error:  # a body may be any text
                if not found:  # a recommendation that cannot be read must not hide a notice
                    raise OSError(f"no notice: {error!r:.100}, in {answer!r:.200}") from error
        return found

    def _is_marked(self, answer: Answer) -> bool:
        return self.marks.items() <= answer.headers.items()


class _Action(msgspec.Struct):
    time: datetime
    action: Any


class _Event(msgspec.Struct, rename="pascal"):
    event_type: str
    resources: list[str]
    event_status: str = ""
    not_before: str = ""


class _Events(msgspec.Struct, rename="pascal"):
    events: list[_Event]


def _aws(body: bytes, _: str, now: float) -> Notice:
    """Read EC2's ``instance-action``, present from the notice on."""
    found = msgspec.json.decode(body, type=_Action)
    shown = isinstance(found.action, str) and _WORD.fullmatch(found.action)  # to people
    return _notice(NoticeSource.AWS, found.action if shown else "", _seconds(found.time) - now)


def _rebalance(body: bytes, *_: object) -> Notice:
    """Read EC2's recommendation to leave a machine that is at risk."""
    if "noticeTime" not in msgspec.json.decode(body):
        raise ValueError("no recommendation")
    return Notice(NoticeSource.AWS, "rebalance", host=True, soft=True)


def _google(body: bytes, *_: object) -> Notice | None:
    """Read Compute Engine's ``preempted``."""
    notice = _notice(NoticeSource.GOOGLE, "preempt", GOOGLE_SECONDS)
    return {b"TRUE": notice, b"FALSE": None}[body.strip().upper()]


def _azure(body: bytes, name: str, now: float) -> Notice | None:
    """Read Azure's ``scheduledevents``: the first event that ends the machine of this name.

    The events of a whole scale set reach each of its machines. An event that has started has no
    time any more: it is due `now`.
    """
    found = [
        _notice(
            NoticeSource.AZURE,
            event.event_type,
            _seconds(parsedate_to_datetime(event.not_before)) - now if event.not_before else 0.0,
        )
        for event in msgspec.json.decode(body, type=_Events).events
        if event.event_type in AZURE_ENDS
        and event.event_status not in AZURE_OVER
        and name.casefold() in map(str.casefold, event.resources)
    ]
    return min(found, key=lambda each: each.seconds, default=None)


def _notice(source: NoticeSource, action: str, seconds: float) -> Notice:
    if seconds > MOST_AHEAD:
        raise ValueError(f"{seconds:.0f} s ahead")
    return Notice(source, action, max(seconds, 0.0), host=True)


def _date(answer: Answer) -> float:
    """Return the service's time of an answer, or this machine's if it has none.

    A notice is in time by the service's own clock, so this machine's may be wrong.
    """
    try:
        return _seconds(parsedate_to_datetime(answer.headers["date"]))
    except (LookupError, TypeError, ValueError, OverflowError):
        return time.time()


def _seconds(moment: datetime) -> float:
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


_TOKEN_HEADER = "X-aws-ec2-metadata-token"
_AWS, _GOOGLE = "/latest/meta-data", "/computeMetadata/v1/instance"
_AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_FLAVOR, _METADATA = ("Metadata-Flavor", "Google"), ("Metadata", "true")

CLOUDS = (
    Cloud(
        NoticeSource.AWS,
        probe=("PUT", "/latest/api/token", {f"{_TOKEN_HEADER}-ttl-seconds": str(TOKEN_SECONDS)}),
        key="[!-;=?-~]{1,1024}",
        polls={
            f"{_AWS}/spot/instance-action": _aws,
            f"{_AWS}/events/recommendations/rebalance": _rebalance,
        },
        header=(_TOKEN_HEADER, ""),
        marks={},
        absent=404,
    ),
    Cloud(
        NoticeSource.GOOGLE,
        probe=("GET", f"{_GOOGLE}/id", dict([_FLAVOR])),
        key="[!-~]*",
        polls={f"{_GOOGLE}/preempted": _google},
        header=_FLAVOR,
        marks={"metadata-flavor": "Google"},
    ),
    Cloud(
        NoticeSource.AZURE,
        probe=("GET", _AZURE_NAME, dict([_METADATA])),
        key=r"[\w.()-]{1,128}",
        polls={"/metadata/scheduledevents?api-version=2020-07-01": _azure},
        header=_METADATA,
        marks={},
    ),
)
"""The clouds that are asked, in this order."""


def batch_job_end(environ: Mapping[str, str], started: float) -> tuple[NoticeSource, float] | None:
    """Return source and end time of the batch job of a process that was started then, if known."""
    for name, source, since in (
        ("SLURM_JOB_END_TIME", NoticeSource.SLURM, 0.0),
        ("PBS_WALLTIME", NoticeSource.PBS, started),  # its length, from somewhat earlier
    ):
        with suppress(ValueError):  # as of a job without a limit
            if 0.0 < (seconds := float(environ.get(name, ""))) < math.inf:
                return source, since + seconds
    return None


# -- watching --------------------------------------------------------------------------------------

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
                raise OSError("no new key")
            found = cloud.poll(ask, key)
        except OSError as error:  # silence revokes nothing, and the key may have expired
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
    """Watches as the scheduler orders."""

    def __init__(self, loop: IOLoop, send: Callable[[Notice], None]) -> None:
        self._loop = loop
        self._send = send
        self._stopping: threading.Event | None = None  # of the thread
        self._batch_end: object = None  # the timer for the end of a batch job
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
        if order.on and self._batch_end is None:
            end = batch_job_end(os.environ, _started())
            if end is not None and end[1] > time.time():  # else of an earlier job's environment
                delay = max(end[1] - time.time() - BATCH_SECONDS, 0.0)
                self._batch_end = self._loop.call_later(delay, self._end_batch_job, *end)
        elif not order.on and self._batch_end is not None:
            self._loop.remove_timeout(self._batch_end)
            self._batch_end = None

    def close(self) -> None:
        """Watch for nothing any more."""
        self.apply(WatchOrder())
        self._closed = True

    def _report(self, *notices: Notice) -> None:
        for notice in notices:
            self._send(notice)

    def _end_batch_job(self, source: NoticeSource, end: float) -> None:
        self._send(Notice(source, "end", max(end - time.time(), 0.0)))


def _started() -> float:
    """Return the start time of this process, or of its nanny if earlier."""
    parent, found = multiprocessing.parent_process(), [time.time()]
    for pid in (None, parent and parent.pid):
        with suppress(psutil.Error):  # it is gone
            found.append(float(psutil.Process(pid).create_time()))
    return min(found)
