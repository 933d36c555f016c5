"""Read notices: a machine, or a batch job on it, announces its end.

Nothing here has a connection: a cloud is asked through a function that is given. An answer is no
more trusted than any other text from a network: another cloud's service, a proxy's login page or
anything else may be at the address.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

from nbelastic.messages import Notice, NoticeSource

TOKEN_SECONDS = 21600
"""Seconds for which AWS's token is good: the most that there are."""

GOOGLE_SECONDS = 30.0
"""Seconds between Google's notice and the end of the machine."""

AZURE_ENDS = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy"})
"""Events of Azure with which the processes of a machine end; the others only pause them."""

AZURE_OVER = frozenset({"Completed", "Canceled"})
"""States of Azure's events in which nothing is to come any more."""

MOST_AHEAD = 86400.0
"""Most seconds from a notice to the end of the machine; a later time is an error."""

_TOKEN = re.compile(rb"[!-;=?-~]{1,1024}")
_NAME = re.compile(rb"[\w.()-]{1,128}")
_WORD = re.compile(r"[A-Za-z][A-Za-z _-]{0,39}")


class Unanswered(Exception):
    """The metadata service gave no usable answer; the last known notice stays in force."""


class KeyExpired(Unanswered):
    """The service wants a new key."""


@dataclass(frozen=True)
class Answer:
    """Answer of a metadata service; the names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


Ask = Callable[[str, str, dict[str, str]], Answer]
"""``ask(method, path, headers)`` makes a request, or raises OSError."""

Read = Callable[[bytes, str, float], tuple[Notice, ...]]
"""``read(body, key, now)`` returns the notices in an answer, or raises Unanswered."""


@dataclass(frozen=True)
class Cloud:
    """Metadata service of a cloud: its requests, and how their answers are read."""

    source: NoticeSource
    probe: tuple[str, str, dict[str, str]]  # method, path and headers of the first request
    key: re.Pattern[bytes]  # what its answer has to be; further requests need it as their key
    polls: tuple[tuple[str, Read], ...]  # paths, the more urgent first
    header: tuple[str, str]  # of each poll; an empty value stands for the key
    marks: dict[str, str] = field(default_factory=dict)  # headers that each answer must have
    absent: int = 0  # status that says that there is no notice

    def find_key(self, ask: Ask) -> str | None:
        """Return the key that further requests need; None if this is not the cloud's machine."""
        answer = ask(*self.probe)
        text = answer.body.strip()
        # It may be sent as a header, which may not hold everything.
        ours = answer.status == 200 and self._is_marked(answer) and self.key.fullmatch(text)
        return text.decode("ascii") if ours else None

    def poll(self, ask: Ask, key: str) -> tuple[Notice, ...]:
        """Return the notices in force, or raise Unanswered."""
        found: tuple[Notice, ...] = ()
        for path, read in self.polls:
            try:
                answer = ask("GET", path, {self.header[0]: self.header[1] or key})
                if answer.status == 401 and not self.header[1]:  # a name does not expire
                    raise KeyExpired("the key has expired")
                if answer.status != self.absent:
                    if answer.status != 200 or not self._is_marked(answer):
                        raise Unanswered(f"status {answer.status}, or from another service")
                    found += read(answer.body, key, _date(answer))
            except (OSError, Unanswered):
                if not found:  # a recommendation that cannot be read must not hide a notice
                    raise
        return found

    def _is_marked(self, answer: Answer) -> bool:
        return self.marks.items() <= answer.headers.items()


def read_aws(body: bytes, _: str, now: float) -> tuple[Notice, ...]:
    """Read EC2's ``instance-action``, present from the notice on."""
    data = _json(body)
    try:
        end = datetime.fromisoformat(str(data["time"]).replace("Z", "+00:00"))
        action = data["action"]
        shown = isinstance(action, str) and _WORD.fullmatch(action)  # to people
        return _notices(NoticeSource.AWS, action if shown else "", _seconds(end) - now)
    except (KeyError, ValueError, OverflowError) as error:
        raise Unanswered(f"not a notice: {data!r:.200}") from error


def read_rebalance(body: bytes, *_: object) -> tuple[Notice, ...]:
    """Read EC2's recommendation to leave a machine that is at risk."""
    data = _json(body)
    if not isinstance(data.get("noticeTime"), str):
        raise Unanswered(f"not a recommendation: {data!r:.200}")
    return (Notice(NoticeSource.AWS, "rebalance", host=True, soft=True),)


def read_google(body: bytes, *_: object) -> tuple[Notice, ...]:
    """Read Compute Engine's ``preempted``."""
    text = body.strip().upper()
    if text not in (b"TRUE", b"FALSE"):
        raise Unanswered(f"not a notice: {body!r:.200}")
    return _notices(NoticeSource.GOOGLE, "preempt", GOOGLE_SECONDS) if text == b"TRUE" else ()


def read_azure(body: bytes, name: str, now: float) -> tuple[Notice, ...]:
    """Read Azure's ``scheduledevents``: the first event that ends the machine of this name.

    The events of a whole scale set reach each of its machines. An event that has started has no
    time any more: it is due `now`.
    """
    data = _json(body)
    try:
        found = [
            _notices(
                NoticeSource.AZURE,
                event["EventType"],
                _seconds(parsedate_to_datetime(at)) - now if (at := event.get("NotBefore")) else 0,
            )
            for event in data["Events"]
            if event["EventType"] in AZURE_ENDS
            and event.get("EventStatus") not in AZURE_OVER
            and _names(event["Resources"], name)
        ]
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise Unanswered(f"not events: {data!r:.200}") from error
    return min(found, key=lambda each: each[0].seconds, default=())


def _names(resources: Any, name: str) -> bool:
    """Return whether the machine is among an event's resources."""
    if not isinstance(resources, list):
        raise TypeError("not a list of machines")
    return name.casefold() in (str(each).casefold() for each in resources)


def _notices(source: NoticeSource, action: str, seconds: float) -> tuple[Notice, ...]:
    if seconds > MOST_AHEAD:
        raise Unanswered(f"not a notice: {seconds:.0f} s ahead")
    return (Notice(source, action, max(seconds, 0.0), host=True),)


def _date(answer: Answer) -> float:
    """Return the service's time of an answer, or this machine's if it has none.

    A notice is in time by the service's own clock, so this machine's may be wrong.
    """
    try:
        return _seconds(parsedate_to_datetime(answer.headers["date"]))
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return time.time()


def _json(body: bytes) -> Mapping[str, Any]:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Unanswered(f"not JSON: {body!r:.200}") from error
    if not isinstance(data, dict):
        raise Unanswered(f"not an object: {data!r:.200}")
    return data


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
        key=_TOKEN,
        polls=(
            (f"{_AWS}/spot/instance-action", read_aws),
            (f"{_AWS}/events/recommendations/rebalance", read_rebalance),
        ),
        header=(_TOKEN_HEADER, ""),
        absent=404,
    ),
    Cloud(
        NoticeSource.GOOGLE,
        probe=("GET", f"{_GOOGLE}/id", dict([_FLAVOR])),
        key=re.compile(rb"[!-~]*"),
        polls=((f"{_GOOGLE}/preempted", read_google),),
        header=_FLAVOR,
        marks={"metadata-flavor": "Google"},
    ),
    Cloud(
        NoticeSource.AZURE,
        probe=("GET", _AZURE_NAME, dict([_METADATA])),
        key=_NAME,
        polls=(("/metadata/scheduledevents?api-version=2020-07-01", read_azure),),
        header=_METADATA,
    ),
)
"""The clouds that are asked, in this order."""


# -- batch systems ---------------------------------------------------------------------------------


def batch_job_end(environ: Mapping[str, str], started: float) -> tuple[NoticeSource, float] | None:
    """Return source and end time of this process's batch job, if known.

    Both times are in seconds since the epoch; `started` is that of this process. PBS gives a length
    only, which counts from somewhat earlier.
    """
    end = _number(environ.get("SLURM_JOB_END_TIME"))
    if end is not None:
        return NoticeSource.SLURM, end
    length = _number(environ.get("PBS_WALLTIME"))
    return None if length is None else (NoticeSource.PBS, started + length)


def _number(text: str | None) -> float | None:
    """Return a positive number; None where there is none, as for a job without a limit."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None
