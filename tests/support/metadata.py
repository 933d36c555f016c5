"""A metadata service that answers as a cloud's does: over loopback, or in virtual time."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from nbelastic.cluster.worker.notices import POLL_INTERVAL, REQUEST_LIMIT_S, Answer, watch_machine

Reply = tuple[int, dict[str, str], bytes]

ROLES = {
    "aws": "/latest/meta-data/spot/instance-action",
    "google": "/computeMetadata/v1/instance/preempted",
    "azure": "/metadata/scheduledevents",
}
"""What each cloud is asked for notices."""

REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


@dataclass
class FakeMetadata:
    """The service of one cloud: ``aws``, ``google`` or ``azure``."""

    cloud: str
    notice: bytes | None = None  # in force, as the cloud writes it
    advice: bytes | None = None  # AWS's recommendation
    token: str = "first"  # that AWS's wants
    broken: int = 0  # a status that all polls get
    body: bytes | None = None  # what all answers say instead, as a network's login page does
    slow: float = 0.0  # seconds that each answer takes
    clock: float | None = None  # the time that its answers are dated by
    skew: float = 0.0  # seconds by which its clock is ahead of the machine's, in virtual time
    asked: list[tuple[str, int]] = field(default_factory=list)  # path and status of each request
    url: str = ""

    def answer(self, method: str, target: str, headers: Any) -> Reply:
        """Answer a request, by its headers in lower case."""
        path = urlsplit(target).path
        more = {} if self.clock is None else {"date": formatdate(self.clock, usegmt=True)}
        if self.cloud == "google":
            more["metadata-flavor"] = "Google"
        status, body = self._answer(method, path, headers)
        if self.body is not None:
            status, body, more = 200, self.body, {}
        self.asked.append((path, status))
        return status, more, body

    def _answer(self, method: str, path: str, headers: Any) -> tuple[int, bytes]:
        if self.cloud == "aws":
            if path == "/latest/api/token":
                lasts = headers.get("x-aws-ec2-metadata-token-ttl-seconds")
                allowed = lasts and method == "PUT"
                return (200, self.token.encode()) if allowed else (400, b"")
            if headers.get("x-aws-ec2-metadata-token") != self.token:
                return 401, b""
            item = {ROLES["aws"]: self.notice, REBALANCE: self.advice}.get(path)
            return (self.broken or 404, b"no") if item is None else (self.broken or 200, item)
        wanted = ("metadata-flavor", "Google") if self.cloud == "google" else ("metadata", "true")
        if headers.get(wanted[0]) != wanted[1] or method != "GET":
            return 403, b"which header?"
        found = {
            "/computeMetadata/v1/instance/id": b"1",
            "/metadata/instance/compute/name": b"vm-1",
            ROLES["google"]: self.notice or b"FALSE",
            ROLES["azure"]: self.notice or b'{"Events": []}',
        }
        if not path.startswith("/computeMeta" if self.cloud == "google" else "/metadata/"):
            return 404, b"no"
        return (200 if path not in ROLES.values() else self.broken or 200), found[path]


# -- in virtual time -------------------------------------------------------------------------------


class Machine:
    """A machine with the real watch, its cloud's service, and a time that a test lets pass.

    The script says when what happens to the service; ``callable(service)``.
    """

    def __init__(
        self,
        service: FakeMetadata,
        script: Iterable[tuple[float, Callable[[FakeMetadata], object]]] = (),
        start: float = 0.0,
    ) -> None:
        self.service = service
        self.script = sorted(script, key=lambda each: each[0])
        self.now = start
        self.next: float | None = start
        self.dead = False
        self.requests: list[float] = []
        self.told: list[tuple[float, Any, Any]] = []
        self._steps = watch_machine(self._tell, self._find, self._ask, lambda: self.now)

    def _tell(self, risk: Any, notice: Any) -> None:
        assert notice.source.name.lower() == self.service.cloud
        self.told.append((self.now, risk, notice))

    def pass_time(self, until: float) -> None:
        """Let things happen as the script has them."""
        while self.script and self.script[0][0] <= until:
            self.now, act = self.script.pop(0)
            act(self.service)
        self.now = max(until, self.now)

    def run(self, until: float) -> Machine:
        """Have the watch do all that it does until then."""
        while self.next is not None and self.next <= until:
            self.pass_time(self.next)
            goes_on = next(self._steps, "end") is None
            self.next = self.now + POLL_INTERVAL if goes_on else None
        self.pass_time(until)
        return self

    def _find(self) -> str | None:
        return None if self.dead else "http://169.254.169.254"

    def _ask(self, url: str, method: str, path: str, headers: dict[str, str]) -> Answer:
        self.requests.append(self.now)
        if self.dead or self.service.slow > REQUEST_LIMIT_S:
            self.pass_time(self.now + REQUEST_LIMIT_S)
            raise TimeoutError("timed out")
        self.pass_time(self.now + self.service.slow)
        self.service.clock = self.now + self.service.skew
        lower = {name.lower(): value for name, value in headers.items()}
        return Answer(*self.service.answer(method, path, lower))


# -- over loopback ---------------------------------------------------------------------------------


@contextlib.contextmanager
def metadata(cloud: str) -> Iterator[FakeMetadata]:
    """Serve a cloud's metadata until the end."""
    service = FakeMetadata(cloud)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(service.slow)
            lower = {name.lower(): value for name, value in self.headers.items()}
            status, headers, body = service.answer(self.command, self.path, lower)
            with contextlib.suppress(OSError):  # the asker has gone
                self.send_response_only(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        do_PUT = do_GET  # noqa: N815 - http.server's names

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with serving(Handler) as service.url:
        yield service


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve HTTP on loopback by a handler until the end; yield the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# -- notices ---------------------------------------------------------------------------------------


def aws_notice(seconds: float, action: str = "terminate", now: float | None = None) -> bytes:
    """Return EC2's ``instance-action``, some seconds before."""
    at = (time.time() if now is None else now) + seconds
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
    return json.dumps({"action": action, "time": when}).encode()


def azure_events(*resources: str, kind: str = "Preempt", before: str = "", **more: Any) -> bytes:
    """Return Azure's ``scheduledevents`` with one event."""
    event = {
        "EventId": "1",
        "EventStatus": "Scheduled",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": list(resources),
        "NotBefore": before,
        **more,
    }
    return json.dumps({"DocumentIncarnation": 1, "Events": [event]}).encode()


def notice_of(cloud: str, seconds: float, now: float) -> bytes:
    """Return the notice of a cloud that a machine ends in some seconds."""
    if cloud == "aws":
        return aws_notice(seconds, now=now)
    if cloud == "google":
        return b"TRUE"
    return azure_events("vm-1", before=formatdate(now + seconds, usegmt=True))
