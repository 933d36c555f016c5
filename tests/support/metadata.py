"""A metadata service on loopback, which answers as a cloud's does, by a script."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


class FakeMetadata:
    """The service of one cloud: ``aws``, ``google`` or ``azure``.

    Attributes
    ----------
    notice : bytes or None
        The notice in force, as the cloud writes it.
    token : str
        The token that AWS's wants.
    broken : int
        A status that all polls get; 0 for none.
    slow : float
        Seconds that each answer takes.
    asked : list of (str, int)
        Path and status of each request.
    """

    def __init__(self, cloud: str) -> None:
        self.cloud = cloud
        self.notice: bytes | None = None
        self.token = "first"
        self.broken = 0
        self.slow = 0.0
        self.asked: list[tuple[str, int]] = []
        self.url = ""

    def answer(self, method: str, path: str, headers: Any) -> tuple[int, bytes]:
        path = path.partition("?")[0]
        if self.cloud == "aws":
            if path == "/latest/api/token" and method == "PUT":
                lasts = headers.get("X-aws-ec2-metadata-token-ttl-seconds")
                return (200, self.token.encode()) if lasts else (400, b"")
            if headers.get("X-aws-ec2-metadata-token") != self.token:
                return 401, b""
            if path == "/latest/meta-data/spot/instance-action" and self.notice is not None:
                return self.broken or 200, self.notice
        elif self.cloud == "google" and headers.get("Metadata-Flavor") == "Google":
            if path == "/computeMetadata/v1/instance/id":
                return 200, b"1"
            if path == "/computeMetadata/v1/instance/preempted":
                return self.broken or 200, self.notice or b"FALSE"
        elif self.cloud == "azure" and headers.get("Metadata") == "true":
            if path == "/metadata/instance/compute/name":
                return 200, b"vm-1"
            if path == "/metadata/scheduledevents":
                return self.broken or 200, self.notice or b'{"Events": []}'
        return self.broken or 404, b"no"


def handler_of(service: FakeMetadata) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(service.slow)
            status, body = service.answer(self.command, self.path, self.headers)
            service.asked.append((self.path.partition("?")[0], status))
            with contextlib.suppress(OSError):  # the asker has gone
                self.send_response(status)
                if service.cloud == "google":
                    self.send_header("Metadata-Flavor", "Google")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        do_PUT = do_GET  # noqa: N815 - http.server's names

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    return Handler


@contextlib.contextmanager
def metadata(cloud: str) -> Iterator[FakeMetadata]:
    """Serve a cloud's metadata until the end."""
    service = FakeMetadata(cloud)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(service))
    service.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def aws_notice(seconds: float, action: str = "terminate") -> bytes:
    """Return EC2's ``instance-action``, some seconds before."""
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))
    return json.dumps({"action": action, "time": when}).encode()


def azure_events(*resources: str, kind: str = "Preempt", before: str = "") -> bytes:
    """Return Azure's ``scheduledevents`` with one event."""
    event = {
        "EventId": "1",
        "EventStatus": "Scheduled",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": list(resources),
        "NotBefore": before,
    }
    return json.dumps({"DocumentIncarnation": 1, "Events": [event]}).encode()
