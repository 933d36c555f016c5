"""Client of the rendezvous server, and a check of which servers can be reached."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from typing import TYPE_CHECKING

from nbelastic.collectives.rendezvous.handshake import (
    MAX_BODY_BYTES,
    PROOF_BYTES,
    AuthenticatedClient,
    read,
)
from nbelastic.collectives.rendezvous.server import LENGTH, PURPOSE, VALUES, encode_body
from nbelastic.errors import CollectiveError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.collectives.communicator import Rendezvous

# The server's address came with the plan, from a rank that was alive a moment ago.
_CONNECT_LIMIT_S = 10.0

# A lost packet is sent again after a second.
_PROBE_LIMIT_S = 1.5


class RendezvousClient:
    """One exchange of values between the ranks of a generation; each has a subject of its own."""

    def __init__(self, rendezvous: Rendezvous, subject: str = "") -> None:
        self._rendezvous = rendezvous
        self._key = f"{rendezvous.job}/{rendezvous.generation}" + (subject and f"/{subject}")
        self._connection: socket.socket | None = None
        self._aborted = False

    def exchange(self, value: bytes, limit_s: float | None = None) -> list[bytes]:
        """Send `value`, wait for all ranks, and return the value of each.

        By default the rendezvous' limit holds for that. Raises ``CollectiveError`` if a rank or the
        server is missing, or this rank has aborted.
        """
        its = self._rendezvous
        host, port = its.store
        limit = its.timeout_s if limit_s is None else min(limit_s, its.timeout_s)
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as connection:
                self._connection = connection
                _connect(connection, its, lambda: self._aborted)
                return self._exchange(connection, value, limit)
        except OSError as error:
            raise CollectiveError(
                f"no answer from the rendezvous server at {host}:{port}: {error}"
            ) from None
        finally:
            self._connection = None

    def abort(self) -> None:
        """Fail the exchange, under way or to come. Any thread may call it."""
        self._aborted = True
        connection = self._connection
        if connection is not None:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it is closed, or was never established

    def _exchange(self, connection: socket.socket, value: bytes, limit: float) -> list[bytes]:
        its = self._rendezvous
        client = AuthenticatedClient(connection, its.secret, PURPOSE)
        client.request(encode_body(self._key, its.rank, its.size, value))
        connection.settimeout(limit)
        try:
            return self._read_reply(connection, client)
        except TimeoutError:
            raise CollectiveError(f"not all ranks joined within {limit:g} s") from None

    def _read_reply(self, connection: socket.socket, client: AuthenticatedClient) -> list[bytes]:
        status = read(connection, 1)
        count = self._rendezvous.size if status == VALUES else 1
        fields = [_read_field(connection) for _ in range(count)]
        reply = status + b"".join(LENGTH.pack(len(each)) + each for each in fields)
        if not client.verifies(reply, read(connection, PROOF_BYTES)):
            raise CollectiveError("the rendezvous server does not belong to this job")
        if status != VALUES:
            raise CollectiveError(fields[0].decode())
        return fields


def open_connection(rendezvous: Rendezvous) -> socket.socket:
    """Return a new connection to the rendezvous server."""
    family = socket.AF_INET6 if ":" in rendezvous.store[0] else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        _connect(connection, rendezvous, lambda: False)
    except BaseException:
        connection.close()
        raise
    return connection


def _connect(
    connection: socket.socket, rendezvous: Rendezvous, is_aborted: Callable[[], bool]
) -> None:
    """Connect to the server, without blocking: only then can an abort shut the socket down."""
    limit = min(rendezvous.timeout_s, _CONNECT_LIMIT_S)
    connection.setblocking(False)
    code = connection.connect_ex(rendezvous.store)
    if is_aborted():
        raise CollectiveError("this rank has left")
    if code == errno.EINPROGRESS:
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_WRITE)
            if not selector.select(limit):
                raise TimeoutError("timed out")
        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code != 0:
        raise OSError(code, os.strerror(code))
    connection.settimeout(limit)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _read_field(connection: socket.socket) -> bytes:
    (length,) = LENGTH.unpack(read(connection, LENGTH.size))
    if length > MAX_BODY_BYTES:
        raise CollectiveError("the rendezvous server's reply is malformed")
    return read(connection, length)


def unreachable(addresses: Sequence[tuple[str, int]], limit_s: float = _PROBE_LIMIT_S) -> list[int]:
    """Return the indices of `addresses` that accept no connection.

    All are tried at the same time. Nothing is sent; a server drops such a connection.
    """
    silent = set(range(len(addresses)))
    deadline = time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        for index, address in enumerate(addresses):
            _begin_probe(selector, index, address)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                selector.unregister(key.fileobj)
                index, connection = key.data
                with connection:
                    if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                        silent.discard(index)
        for key in list(selector.get_map().values()):
            key.data[1].close()
    return sorted(silent)


def _begin_probe(selector: selectors.BaseSelector, index: int, address: tuple[str, int]) -> None:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        connection.connect(address)
    except BlockingIOError:
        pass  # under way
    except OSError:
        connection.close()  # no route, or refused at once
        return
    selector.register(connection, selectors.EVENT_WRITE, (index, connection))
