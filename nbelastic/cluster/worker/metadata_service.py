"""Connect to the metadata service of the machine, for a limited time each.

Runs in a worker, in the thread of :class:`~.notice_watcher.MetadataPoller`; only
:meth:`MetadataService.stop` is called by the event loop. The service is asked at its own addresses,
so there is no name to look up and no proxy between. Redirections are not followed.
"""

from __future__ import annotations

import http.client
import os
import selectors
import socket
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from .notices import Answer

if TYPE_CHECKING:
    from typing import TypeAlias

Address: TypeAlias = "tuple[str, int]"

ADDRESSES: tuple[Address, ...] = (
    ("169.254.169.254", 80),
    ("fd00:ec2::254", 80),
    ("fd20:ce::254", 80),
)
"""Where each cloud's service is, and those of AWS and Google on a machine without IPv4.

``NBELASTIC_METADATA_URL`` names another for tests.
"""

MOST_BYTES = 1 << 16
"""Most bytes of an answer that are read."""


class LimitedSocket(socket.socket):
    """A socket whose operations must all be over at one time, by the monotonic clock."""

    until = 0.0

    def limit(self) -> None:
        """Let the next operation last until then.

        Raises
        ------
        TimeoutError
            The time is over.
        """
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self.settimeout(left)

    def connect(self, address: Any) -> None:
        """Connect, for as long as there is time."""
        self.limit()
        super().connect(address)

    def sendall(self, *args: Any) -> None:
        """Send all of it, for as long as there is time."""
        self.limit()
        super().sendall(*args)

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        """Receive something, for as long as there is time."""
        self.limit()
        return super().recv_into(*args, **kwargs)


class MetadataService:
    """The metadata service of this machine, if it has any."""

    def __init__(self) -> None:
        self.addresses = _addresses()
        self._lock = threading.Lock()  # between the end of a request, and its interruption
        self._socket: socket.socket | None = None
        self._stopped = False

    def stop(self) -> None:
        """Have the request that is under way fail soon, and all later ones at once."""
        with self._lock:
            self._stopped = True
            if self._socket is not None:
                try:
                    self._socket.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # it is not connected yet: its time is over soon

    def reach(self, seconds: float) -> Address | None:
        """Return the first address that takes a connection, all being tried at once.

        The system connects, so a process that is busy finds the service, too.
        """
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            try:
                for address in self.addresses:
                    _begin(selector, address)
                while selector.get_map():
                    left = until - time.monotonic()
                    done = selector.select(max(left, 0.0))
                    done.sort(key=lambda each: self.addresses.index(each[0].data))
                    for key, _ in done:
                        connected: Any = key.fileobj
                        if connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                            return key.data  # type: ignore[no-any-return]
                        selector.unregister(connected)
                        connected.close()
                    if left <= 0:
                        break
                return None
            finally:
                for key in list(selector.get_map().values()):
                    pending: Any = key.fileobj
                    pending.close()

    def ask(
        self, address: Address, method: str, path: str, headers: dict[str, str], seconds: float
    ) -> Answer:
        """Make a request, which is answered within some seconds, body and all.

        Raises
        ------
        OSError
            There was no answer in time, or none that is one.
        """
        with LimitedSocket(_family(address)) as sock:
            sock.until = time.monotonic() + seconds
            try:
                with self._lock:
                    if self._stopped:
                        raise OSError("it is not asked any more")
                    self._socket = sock
                sock.connect(address)
                connection = http.client.HTTPConnection(*address)
                connection.sock = sock
                connection.request(method, path, headers={**headers, "Connection": "close"})
                with self._lock:
                    if self._stopped:  # before there was a connection that could be shut down
                        raise OSError("it is not asked any more")
                with connection.getresponse() as answer:
                    names = {name.lower(): value for name, value in answer.getheaders()}
                    return Answer(answer.status, names, answer.read(MOST_BYTES))
            except (http.client.HTTPException, ValueError) as error:
                # The error's own text may quote a header, and so a token.
                raise OSError(f"not an answer: {type(error).__name__}") from None
            finally:
                with self._lock:
                    self._socket = None


def _addresses() -> tuple[Address, ...]:
    """Return where the service may be."""
    url = os.environ.get("NBELASTIC_METADATA_URL")
    if not url:
        return ADDRESSES
    try:
        place = urlsplit(url)
        return ((place.hostname, place.port or 80),) if place.hostname else ()
    except ValueError:
        return ()


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET


def _begin(selector: selectors.BaseSelector, address: Address) -> None:
    """Begin to connect to an address, if this machine has a way there."""
    try:
        sock = socket.socket(_family(address))
    except OSError:
        return  # it does not know that kind of addresses
    try:
        sock.setblocking(False)
        sock.connect(address)
    except BlockingIOError:
        pass
    except OSError:
        sock.close()
        return
    selector.register(sock, selectors.EVENT_WRITE, address)
