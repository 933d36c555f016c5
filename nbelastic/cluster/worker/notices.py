"""Read notices: a machine, or a batch job on it, announces its end.

Nothing here has a connection: a cloud is asked through a function that is given. An answer is no
more trusted than any other text from a network: another cloud's service, a proxy's login page or
anything else may be at the address.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import msgspec

from nbelastic.messages import Notice, NoticeSource

TOKEN_SECONDS = 21600  # for which AWS's token is good: the most that there are
GOOGLE_SECONDS = 30.0  # between Google's notice and the end of the machine
MOST_AHEAD = 86400.0  # from any notice to the end of the machine; a later time is an error

AZURE_ENDS = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy"})
"""Events of Azure with which the processes of a machine end; the others only pause them."""

AZURE_OVER = frozenset({"Completed", "Canceled"})
"""States of Azure's events in which nothing is to come any more."""

_WORD = re.compile(r"[A-Za-z][A-Za-z _-]{0,39}")


class Unanswered(OSError):
    """The metadata service gave no usable answer; the last known notice stays in force."""


class KeyExpired(Unanswered):
    """The service wants a new key."""


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
        """Return the notices in force, or raise OSError."""
        found: list[Notice] = []
        for path, read in self.polls.items():
            try:
                answer = ask("GET", path, {self.header[0]: self.header[1] or key})
                if answer.status == 401:
                    raise KeyExpired("the key has expired")
                if answer.status == self.absent:
                    continue
                if answer.status != 200 or not self._is_marked(answer):
                    raise Unanswered(f"status {answer.status}, or from another service")
                try:
                    notice = read(answer.body, key, _date(answer))
                except Exception as error:  # it may be any text
                    raise Unanswered(f"not a notice: {answer.body!r:.200}") from error
            except OSError:
                if not found:  # a recommendation that cannot be read must not hide a notice
                    raise
            else:
                found += [notice] if notice else []
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
        with contextlib.suppress(ValueError):  # as of a job without a limit
            if 0.0 < (seconds := float(environ.get(name, ""))) < math.inf:
                return source, since + seconds
    return None
