"""Read notices: a machine, or a batch job on it, says that it will end.

Nothing here has a connection or a clock: a cloud is asked through a function that is given. An
answer is no more trusted than any other text from a network: another cloud's service, a proxy's
login page or anything else may be at the address.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from nbelastic.membership import NoticeSource

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TOKEN_SECONDS = 21600
"""Seconds for which AWS's token is good: the most that there are."""

REBALANCE_POLLS = 6
"""Of so many polls of AWS, one asks for a recommendation instead of a notice."""

FLAVOR = {"Metadata-Flavor": "Google"}
"""The header that Google's service wants, and answers with."""

METADATA = {"Metadata": "true"}
"""The header that Azure's service wants."""

GOOGLE_SECONDS = 30.0
"""Seconds between Google's notice and the end of the machine."""

GOOGLE_HOLD = 60
"""Seconds for which Google's service may hold back its answer until there is news."""

AZURE_ENDS = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy"})
"""Events of Azure with which the processes of a machine end; the others only pause them."""

AZURE_OVER = frozenset({"Completed", "Canceled"})
"""States of Azure's events in which nothing is to come any more."""

MOST_AHEAD = 86400.0
"""Seconds before its end at which a machine says so, at most; a time after that is an error."""

_TOKEN = re.compile(rb"[!-;=?-~]{1,1024}")
_NAME = re.compile(r"[\w.()-]{1,128}")
_WORD = re.compile(r"[A-Za-z][A-Za-z _-]{0,39}")


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
        When, in seconds since the epoch, by this machine's clock; infinite if it is `soft`.
    soft : bool
        The machine is at risk only: it should be left once there is another.
    """

    source: NoticeSource
    action: str
    deadline: float
    soft: bool = False


class Unanswered(Exception):
    """A metadata service gave no answer, or one that means nothing: what was known stays true."""


@dataclass(frozen=True)
class Answer:
    """What a metadata service answers; the names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Ask(Protocol):
    """Function that makes one request."""

    def __call__(
        self, method: str, path: str, headers: dict[str, str], *, hold: float = 0.0
    ) -> Answer:
        """Return the answer, which the service may `hold` back for some seconds.

        Raises
        ------
        OSError
            There is none.
        """


# -- the clouds ------------------------------------------------------------------------------------


class AskedCloud:
    """A cloud's metadata service."""

    source: ClassVar[NoticeSource]

    def found(self, ask: Ask) -> bool:
        """Return whether this machine belongs to the cloud; for one request."""
        raise NotImplementedError

    def poll(self, ask: Ask, clock: Callable[[], float]) -> tuple[Notice, ...]:
        """Return the notices that are in force; for one request.

        Parameters
        ----------
        ask : callable
            Makes the request.
        clock : callable
            Returns the time, in seconds since the epoch. An answer may have been held back.

        Raises
        ------
        Unanswered
            Nothing is known by this answer.
        """
        raise NotImplementedError


class _Aws(AskedCloud):
    """EC2, by version 2 of its metadata service: it wants a token with each request."""

    source = NoticeSource.AWS

    def __init__(self) -> None:
        self._token = ""
        self._polls = 0
        self._notice: tuple[Notice, ...] = ()
        self._advice: tuple[Notice, ...] = ()

    def found(self, ask: Ask) -> bool:
        lasts = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
        answer = ask("PUT", "/latest/api/token", lasts)
        token = answer.body.strip()
        given = answer.status == 200 and _TOKEN.fullmatch(token)
        self._token = token.decode("ascii") if given else ""
        return bool(self._token)

    def poll(self, ask: Ask, clock: Callable[[], float]) -> tuple[Notice, ...]:
        if not self._token:
            self.found(ask)
            raise Unanswered("a new token")
        self._polls += 1
        if self._polls % REBALANCE_POLLS == 2:
            answer = self._get(ask, "events/recommendations/rebalance")
            self._advice = () if answer is None else (read_rebalance(answer.body),)
        else:
            answer = self._get(ask, "spot/instance-action")
            self._notice = () if answer is None else (_dated(answer, clock()),)
        return self._notice + self._advice

    def _get(self, ask: Ask, path: str) -> Answer | None:
        """Return the answer with an item; None where there is no such item."""
        headers = {"X-aws-ec2-metadata-token": self._token}
        answer = ask("GET", f"/latest/meta-data/{path}", headers)
        if answer.status == 404:
            return None
        if answer.status == 401:
            self._token = ""
        return _good(answer)


class _Google(AskedCloud):
    """Compute Engine. Its service holds back its answer until there is news."""

    source = NoticeSource.GOOGLE

    def __init__(self) -> None:
        self._etag = ""

    def found(self, ask: Ask) -> bool:
        answer = ask("GET", "/computeMetadata/v1/instance/id", FLAVOR)
        return answer.status == 200 and answer.headers.get("metadata-flavor") == "Google"

    def poll(self, ask: Ask, clock: Callable[[], float]) -> tuple[Notice, ...]:
        path, hold = "/computeMetadata/v1/instance/preempted", 0.0
        if self._etag:
            hold = GOOGLE_HOLD
            path += f"?wait_for_change=true&timeout_sec={GOOGLE_HOLD}&last_etag={self._etag}"
        self._etag = ""  # after an error the next answer comes at once
        answer = ask("GET", path, FLAVOR, hold=hold)
        if answer.headers.get("metadata-flavor") != "Google":
            raise Unanswered("not from Google's service")
        notice = read_google(_good(answer).body, clock())
        etag = answer.headers.get("etag", "")
        self._etag = etag if re.fullmatch(r"[0-9A-Za-z]{1,64}", etag) else ""
        return () if notice is None else (notice,)


class _Azure(AskedCloud):
    """Azure's virtual machines; events of a whole scale set reach each of them."""

    source = NoticeSource.AZURE

    def __init__(self) -> None:
        self._name = ""

    def found(self, ask: Ask) -> bool:
        path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        answer = ask("GET", path, METADATA)
        name = answer.body.decode("utf-8", "replace").strip()
        self._name = name if answer.status == 200 and _NAME.fullmatch(name) else ""
        return bool(self._name)

    def poll(self, ask: Ask, clock: Callable[[], float]) -> tuple[Notice, ...]:
        answer = ask("GET", "/metadata/scheduledevents?api-version=2020-07-01", METADATA)
        now = clock()
        ahead = _ahead(answer, now)
        notice = read_azure(_good(answer).body, self._name, now + ahead)
        return () if notice is None else (_by_own_clock(notice, ahead, now),)


SOURCES: tuple[type[AskedCloud], ...] = (_Aws, _Google, _Azure)
"""The clouds that are asked, in this order."""


def _good(answer: Answer) -> Answer:
    if answer.status != 200:
        raise Unanswered(f"status {answer.status}")
    return answer


def _ahead(answer: Answer, now: float) -> float:
    """Return how many seconds the service's clock is ahead of this machine's."""
    try:
        return _seconds(parsedate_to_datetime(answer.headers["date"])) - now
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return 0.0  # it does not tell


def _dated(answer: Answer, now: float) -> Notice:
    """Return EC2's notice, with its time by this machine's clock."""
    return _by_own_clock(read_aws(answer.body), _ahead(answer, now), now)


def _by_own_clock(notice: Notice, ahead: float, now: float) -> Notice:
    """Return a notice with its time by this machine's clock.

    Raises
    ------
    Unanswered
        No machine says so this early.
    """
    deadline = notice.deadline - ahead
    if deadline > now + MOST_AHEAD:
        raise Unanswered(f"not a notice: {deadline - now:.0f} s ahead")
    return replace(notice, deadline=deadline)


def read_aws(body: bytes) -> Notice:
    """Read EC2's ``instance-action``, which is there from the notice on."""
    data = _json(body)
    try:
        text = str(data["time"])
        time = datetime.fromisoformat(text.replace("Z", "+00:00"))
        return Notice(NoticeSource.AWS, _word(data["action"]), _seconds(time))
    except (KeyError, ValueError, OverflowError) as error:
        raise Unanswered(f"not a notice: {data!r:.200}") from error


def read_rebalance(body: bytes) -> Notice:
    """Read EC2's recommendation to leave a machine that is at risk."""
    data = _json(body)
    if not isinstance(data.get("noticeTime"), str):
        raise Unanswered(f"not a recommendation: {data!r:.200}")
    return Notice(NoticeSource.AWS, "rebalance", math.inf, soft=True)


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
            if event["EventType"] in AZURE_ENDS
            and event.get("EventStatus") not in AZURE_OVER
            and _names(event["Resources"], name)
        ]
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise Unanswered(f"not events: {data!r:.200}") from error
    return min(found, key=lambda notice: notice.deadline, default=None)


def _names(resources: Any, name: str) -> bool:
    """Return whether the machine is among an event's resources."""
    if not isinstance(resources, list):
        raise TypeError("not a list of machines")
    return name.casefold() in (str(each).casefold() for each in resources)


def _not_before(event: Mapping[str, Any], now: float) -> float:
    text = event.get("NotBefore") or ""
    return _seconds(parsedate_to_datetime(text)) if text else now


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
