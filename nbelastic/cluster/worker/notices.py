"""Read notices: a machine, or a batch job on it, says that it will end.

Nothing here has a connection or a clock: a cloud is asked through a function that is given. An
answer is no more trusted than any other text from a network.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from nbelastic.membership import NoticeSource

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeAlias

__all__ = [
    "SOURCES",
    "Answer",
    "AskedCloud",
    "Notice",
    "Unanswered",
    "batch_job_end",
    "read_aws",
    "read_azure",
    "read_google",
]

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


@dataclass(frozen=True)
class Notice:
    """A machine will go, or a batch job on it will end.

    Attributes
    ----------
    source : NoticeSource
        Who says so.
    action : str
        What will happen, in the source's own word.
    deadline : float
        When, in seconds since the epoch.
    """

    source: NoticeSource
    action: str
    deadline: float


class Unanswered(Exception):
    """A metadata service gave no answer, or one that means nothing: what was known stays true."""


@dataclass(frozen=True)
class Answer:
    """What a metadata service answers; the names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


Ask: TypeAlias = "Callable[[str, str, dict[str, str]], Answer]"
"""``ask(method, path, headers)`` returns an answer, or raises ``OSError``."""


# -- the clouds ------------------------------------------------------------------------------------


class AskedCloud:
    """A cloud's metadata service."""

    def found(self, ask: Ask) -> bool:
        """Return whether this machine belongs to the cloud; for one request."""
        raise NotImplementedError

    def poll(self, ask: Ask, now: float) -> Notice | None:
        """Return the notice that is in force; for one request.

        Raises
        ------
        Unanswered
            Nothing is known by this answer.
        """
        raise NotImplementedError


class Aws(AskedCloud):
    """EC2, by version 2 of its metadata service: it wants a token with each request."""

    def __init__(self) -> None:
        self._token = ""

    def found(self, ask: Ask) -> bool:
        lasts = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
        answer = ask("PUT", "/latest/api/token", lasts)
        token = answer.body.decode("ascii", "replace").strip()
        self._token = token if answer.status == 200 and token.isprintable() else ""
        return bool(self._token)

    def poll(self, ask: Ask, now: float) -> Notice | None:
        if not self._token:
            self.found(ask)
            raise Unanswered("a new token")
        path = "/latest/meta-data/spot/instance-action"
        answer = ask("GET", path, {"X-aws-ec2-metadata-token": self._token})
        if answer.status == 404:
            return None
        if answer.status == 401:
            self._token = ""
        return read_aws(_body(answer))


class Google(AskedCloud):
    """Compute Engine."""

    def found(self, ask: Ask) -> bool:
        answer = ask("GET", "/computeMetadata/v1/instance/id", FLAVOR)
        return answer.status == 200 and answer.headers.get("metadata-flavor") == "Google"

    def poll(self, ask: Ask, now: float) -> Notice | None:
        answer = ask("GET", "/computeMetadata/v1/instance/preempted", FLAVOR)
        return read_google(_body(answer), now)


class Azure(AskedCloud):
    """Azure's virtual machines; events of a whole scale set reach each of them."""

    def __init__(self) -> None:
        self._name = ""

    def found(self, ask: Ask) -> bool:
        path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        answer = ask("GET", path, METADATA)
        self._name = answer.body.decode("utf-8", "replace") if answer.status == 200 else ""
        return bool(self._name)

    def poll(self, ask: Ask, now: float) -> Notice | None:
        answer = ask("GET", "/metadata/scheduledevents?api-version=2020-07-01", METADATA)
        return read_azure(_body(answer), self._name, now)


SOURCES: tuple[type[AskedCloud], ...] = (Aws, Google, Azure)
"""The clouds that are asked, in this order."""


def _body(answer: Answer) -> bytes:
    if answer.status != 200:
        raise Unanswered(f"status {answer.status}")
    return answer.body


def read_aws(body: bytes) -> Notice:
    """Read EC2's ``instance-action``, which is there from the notice on."""
    data = _json(body)
    try:
        text = str(data["time"])
        time = datetime.fromisoformat(text.replace("Z", "+00:00"))
        return Notice(NoticeSource.AWS, str(data["action"])[:40], _seconds(time))
    except (KeyError, ValueError, OverflowError) as error:
        raise Unanswered(f"not a notice: {data!r:.200}") from error


def read_google(body: bytes, now: float) -> Notice | None:
    """Read Compute Engine's ``preempted``."""
    text = body.strip().upper()
    if text not in (b"TRUE", b"FALSE"):
        raise Unanswered(f"not a notice: {body!r:.200}")
    if text == b"FALSE":
        return None
    return Notice(NoticeSource.GOOGLE, "preempt", now + GOOGLE_SECONDS)


def read_azure(body: bytes, name: str, now: float) -> Notice | None:
    """Read Azure's ``scheduledevents``, as far as they are about the machine of this name.

    An event that has started has no time any more: it is due `now`.
    """
    data = _json(body)
    try:
        found = [
            Notice(NoticeSource.AZURE, event["EventType"], _not_before(event, now))
            for event in data["Events"]
            if event["EventType"] in AZURE_ENDS and name in event["Resources"]
        ]
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise Unanswered(f"not events: {data!r:.200}") from error
    return min(found, key=lambda notice: notice.deadline, default=None)


def _not_before(event: Mapping[str, Any], now: float) -> float:
    text = event.get("NotBefore") or ""
    return _seconds(parsedate_to_datetime(text)) if text else now


def _json(body: bytes) -> Mapping[str, Any]:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Unanswered(f"not JSON: {body!r:.200}") from error
    if not isinstance(data, dict):
        raise Unanswered(f"not an object: {data!r:.200}")
    return data


def _seconds(time: datetime) -> float:
    return (time if time.tzinfo else time.replace(tzinfo=timezone.utc)).timestamp()


# -- batch systems ---------------------------------------------------------------------------------


def batch_job_end(environ: Mapping[str, str], started: float) -> Notice | None:
    """Return when the time of this process's batch job is over, if it is in one that says so.

    Parameters
    ----------
    environ : mapping of str to str
        The environment of the process.
    started : float
        When the process was started, in seconds since the epoch. PBS gives a length only; it runs
        since somewhat earlier.
    """
    end = _number(environ.get("SLURM_JOB_END_TIME"))
    if end is not None:
        return Notice(NoticeSource.SLURM, "end", end)
    length = _number(environ.get("PBS_WALLTIME"))
    return None if length is None else Notice(NoticeSource.PBS, "end", started + length)


def _number(text: str | None) -> float | None:
    """Return a positive number; None where there is none, as for a job without a limit."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None
