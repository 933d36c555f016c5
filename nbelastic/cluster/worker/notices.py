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
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

from nbelastic.messages import NoticeReport, NoticeSource

TOKEN_SECONDS = 21600
"""Seconds for which AWS's token is good: the most that there are."""

FLAVOR = {"Metadata-Flavor": "Google"}
"""The header that Google's service wants, and answers with."""

METADATA = {"Metadata": "true"}
"""The header that Azure's service wants."""

GOOGLE_SECONDS = 30.0
"""Seconds between Google's notice and the end of the machine."""

AZURE_ENDS = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy"})
"""Events of Azure with which the processes of a machine end; the others only pause them."""

AZURE_OVER = frozenset({"Completed", "Canceled"})
"""States of Azure's events in which nothing is to come any more."""

MOST_AHEAD = 86400.0
"""Most seconds from a notice to the end of the machine; a later time is an error."""

_TOKEN = re.compile(rb"[!-;=?-~]{1,1024}")
_NAME = re.compile(r"[\w.()-]{1,128}", re.ASCII)
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


@dataclass(frozen=True)
class Cloud:
    """A cloud's metadata service, as two functions.

    ``probe(ask)`` returns the key that later requests need, or None if this is not its machine.
    ``poll(ask, key)`` returns the notices in force, or raises Unanswered.
    """

    source: NoticeSource
    probe: Callable[[Ask], str | None]
    poll: Callable[[Ask, str], tuple[NoticeReport, ...]]


# -- AWS: version 2 of its service, which wants a token with each request --------------------------


def probe_aws(ask: Ask) -> str | None:
    """Return a token of EC2's service."""
    lasts = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
    answer = ask("PUT", "/latest/api/token", lasts)
    token = answer.body.strip()
    # It is sent as a header, which may not hold everything.
    return token.decode("ascii") if answer.status == 200 and _TOKEN.fullmatch(token) else None


def poll_aws(ask: Ask, token: str) -> tuple[NoticeReport, ...]:
    """Return EC2's notice and its recommendation, as far as there are any."""
    answer = _aws_item(ask, token, "spot/instance-action")
    found = () if answer is None else (read_aws(answer.body, _date(answer)),)
    try:
        advice = _aws_item(ask, token, "events/recommendations/rebalance")
        return found if advice is None else (*found, read_rebalance(advice.body))
    except (OSError, Unanswered):
        if found:  # a recommendation that cannot be read must not hide a notice
            return found
        raise


def _aws_item(ask: Ask, token: str, path: str) -> Answer | None:
    """Return the answer with an item; None where there is no such item."""
    answer = ask("GET", f"/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": token})
    if answer.status == 401:
        raise KeyExpired("the token has expired")
    return None if answer.status == 404 else _good(answer)


def read_aws(body: bytes, now: float) -> NoticeReport:
    """Read EC2's ``instance-action``, which is there from the notice on."""
    data = _json(body)
    try:
        end = datetime.fromisoformat(str(data["time"]).replace("Z", "+00:00"))
        return _report(NoticeSource.AWS, _word(data["action"]), _seconds(end) - now)
    except (KeyError, ValueError, OverflowError) as error:
        raise Unanswered(f"not a notice: {data!r:.200}") from error


def read_rebalance(body: bytes) -> NoticeReport:
    """Read EC2's recommendation to leave a machine that is at risk."""
    data = _json(body)
    if not isinstance(data.get("noticeTime"), str):
        raise Unanswered(f"not a recommendation: {data!r:.200}")
    return NoticeReport(NoticeSource.AWS, "rebalance", 0.0, host=True, soft=True)


# -- Google ----------------------------------------------------------------------------------------


def probe_google(ask: Ask) -> str | None:
    """Return an empty key if this is a machine of Compute Engine."""
    answer = ask("GET", "/computeMetadata/v1/instance/id", FLAVOR)
    ours = answer.status == 200 and answer.headers.get("metadata-flavor") == "Google"
    return "" if ours else None


def poll_google(ask: Ask, _: str) -> tuple[NoticeReport, ...]:
    """Return Compute Engine's notice."""
    answer = ask("GET", "/computeMetadata/v1/instance/preempted", FLAVOR)
    if answer.headers.get("metadata-flavor") != "Google":
        raise Unanswered("not from Google's service")
    return read_google(_good(answer).body)


def read_google(body: bytes) -> tuple[NoticeReport, ...]:
    """Read Compute Engine's ``preempted``."""
    text = body.strip().upper()
    if text not in (b"TRUE", b"FALSE"):
        raise Unanswered(f"not a notice: {body!r:.200}")
    if text == b"FALSE":
        return ()
    return (_report(NoticeSource.GOOGLE, "preempt", GOOGLE_SECONDS),)


# -- Azure: the events of a whole scale set reach each of its machines -----------------------------


def probe_azure(ask: Ask) -> str | None:
    """Return the name of this machine in Azure."""
    path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    answer = ask("GET", path, METADATA)
    name = answer.body.decode("utf-8", "replace").strip()
    return name if answer.status == 200 and _NAME.fullmatch(name) else None


def poll_azure(ask: Ask, name: str) -> tuple[NoticeReport, ...]:
    """Return Azure's first event that ends this machine."""
    answer = ask("GET", "/metadata/scheduledevents?api-version=2020-07-01", METADATA)
    return read_azure(_good(answer).body, name, _date(answer))


def read_azure(body: bytes, name: str, now: float) -> tuple[NoticeReport, ...]:
    """Read Azure's ``scheduledevents``, as far as they are about the machine of this name.

    An event that has started has no time any more: it is due `now`.
    """
    data = _json(body)
    try:
        found = [
            _report(NoticeSource.AZURE, event["EventType"], _not_before(event, now) - now)
            for event in data["Events"]
            if event["EventType"] in AZURE_ENDS
            and event.get("EventStatus") not in AZURE_OVER
            and _names(event["Resources"], name)
        ]
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise Unanswered(f"not events: {data!r:.200}") from error
    return tuple(sorted(found, key=lambda each: each.seconds)[:1])


def _names(resources: Any, name: str) -> bool:
    """Return whether the machine is among an event's resources."""
    if not isinstance(resources, list):
        raise TypeError("not a list of machines")
    return name.casefold() in (str(each).casefold() for each in resources)


def _not_before(event: Mapping[str, Any], now: float) -> float:
    text = event.get("NotBefore") or ""
    return _seconds(parsedate_to_datetime(text)) if text else now


def _report(source: NoticeSource, action: str, seconds: float) -> NoticeReport:
    if seconds > MOST_AHEAD:
        raise Unanswered(f"not a notice: {seconds:.0f} s ahead")
    return NoticeReport(source, action, max(seconds, 0.0), host=True)


def _good(answer: Answer) -> Answer:
    if answer.status != 200:
        raise Unanswered(f"status {answer.status}")
    return answer


def _date(answer: Answer) -> float:
    """Return the service's time of an answer, or this machine's if it has none.

    A notice is in time by the service's own clock, so this machine's may be wrong.
    """
    try:
        return _seconds(parsedate_to_datetime(answer.headers["date"]))
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return time.time()


def _word(value: Any) -> str:
    """Return a word that is shown to people; empty for anything else."""
    return value if isinstance(value, str) and _WORD.fullmatch(value) else ""


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


CLOUDS = (
    Cloud(NoticeSource.AWS, probe_aws, poll_aws),
    Cloud(NoticeSource.GOOGLE, probe_google, poll_google),
    Cloud(NoticeSource.AZURE, probe_azure, poll_azure),
)
"""The clouds that are asked, in this order."""


# -- batch systems ---------------------------------------------------------------------------------


def batch_job_end(environ: Mapping[str, str], started: float) -> tuple[NoticeSource, float] | None:
    """Return when the time of this process's batch job is over, if it is in one that says so.

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
