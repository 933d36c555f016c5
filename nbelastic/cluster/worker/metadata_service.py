"""Ask the metadata service of the machine, in the thread of its poller.

The service has fixed addresses, so there is no name to look up. Proxies are bypassed and
redirections not followed: what is at the end of either is not this machine's service.
"""

from __future__ import annotations

import http.client
import os
import socket
import urllib.request
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from .notices import Answer

HOSTS = ("169.254.169.254", "fd00:ec2::254", "fd20:ce::254")
"""Host of each cloud's service, and those of AWS and Google on a machine without IPv4.

``NBELASTIC_METADATA_URL`` names another service for tests.
"""

CONNECT_LIMIT_S = 0.2
"""Seconds for a connection: the service is next to the machine."""

REQUEST_LIMIT_S = 2.0
"""Seconds that the service may be silent within a request."""

MOST_BYTES = 1 << 16
"""Most bytes of an answer that are read."""


class _AnyStatus(urllib.request.HTTPErrorProcessor):
    """Returns answers of any status, and so follows no redirection."""

    def http_response(self, request: Any, response: Any) -> Any:
        return response


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _AnyStatus)


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
    """Make a request; raise OSError if there is no answer, or none that is one."""
    request = urllib.request.Request(url + path, method=method, headers=headers)
    try:
        with _opener.open(request, timeout=REQUEST_LIMIT_S) as answer:
            names = {name.lower(): value for name, value in answer.headers.items()}
            return Answer(answer.status, names, answer.read(MOST_BYTES))
    except (http.client.HTTPException, ValueError) as error:
        # The error's own text may quote a header, and so a token.
        raise OSError(f"not an answer: {type(error).__name__}") from None
