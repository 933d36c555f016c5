"""A rank's visit to the store: it brings one value, and gets those of all ranks.

Whoever waits in a visit can be freed by any thread (:meth:`Visit.leave`): what it waits for is a
socket, which is shut down. Rooms are named after the generation and what is exchanged, so each is
used once.
"""

from __future__ import annotations

import errno
import os
import secrets
import selectors
import socket
from typing import TYPE_CHECKING

from nbelastic.collectives.proof import NONCE_BYTES, PROOF_BYTES, proves
from nbelastic.collectives.store import (
    GREETING,
    LENGTH,
    MAGIC,
    MAX_VALUE_BYTES,
    REPLY,
    VALUES,
    request,
)
from nbelastic.errors import CollectiveError

if TYPE_CHECKING:
    from nbelastic.collectives.communicator import Rendezvous

__all__ = ["Visit", "read"]

# Its address came with the plan, from a rank that was alive a moment ago and had it open.
_REACH_STORE_S = 10.0


class Visit:
    """One exchange between the ranks of a generation.

    Parameters
    ----------
    rendezvous : Rendezvous
        Which ranks meet, and where.
    subject : str, optional
        What about, if there is more than one exchange.
    """

    def __init__(self, rendezvous: Rendezvous, subject: str = "") -> None:
        self._rendezvous = rendezvous
        self._room = f"{rendezvous.job}/{rendezvous.generation}" + (subject and f"/{subject}")
        self._connection: socket.socket | None = None
        self._left = False

    def exchange(self, value: bytes, limit_s: float | None = None) -> list[bytes]:
        """Bring `value`, wait until all ranks have come, and return what each brought.

        Parameters
        ----------
        value : bytes
            What this rank brings.
        limit_s : float, optional
            How long to wait for the others; by default, as long as the rendezvous says.

        Raises
        ------
        CollectiveError
            They could not all be had, or this rank has left.
        """
        its = self._rendezvous
        host, port = its.store
        limit = its.timeout_s if limit_s is None else min(limit_s, its.timeout_s)
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as connection:
                self._reach(connection)
                return self._exchange(connection, value, limit)
        except OSError as error:
            raise CollectiveError(f"no answer from the store at {host}:{port}: {error}") from None
        finally:
            self._connection = None

    def leave(self) -> None:
        """Make a visit under way, or to come, fail."""
        self._left = True
        connection = self._connection
        if connection is not None:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it is closed, or was never established

    def _reach(self, connection: socket.socket) -> None:
        """Connect to the store. A connection can be shut down once it has been asked for."""
        limit = min(self._rendezvous.timeout_s, _REACH_STORE_S)
        connection.setblocking(False)
        code = connection.connect_ex(self._rendezvous.store)
        self._connection = connection
        if self._left:
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

    def _exchange(self, connection: socket.socket, value: bytes, limit: float) -> list[bytes]:
        its = self._rendezvous
        magic, challenge = GREETING.unpack(read(connection, GREETING.size))
        if magic != MAGIC:
            raise CollectiveError("what listens there is no store")
        nonce = secrets.token_bytes(NONCE_BYTES)
        message = request(
            its.secret,
            challenge,
            nonce,
            room=self._room,
            rank=its.rank,
            size=its.size,
            value=value,
        )
        connection.sendall(message)
        connection.settimeout(limit)
        try:
            return _read_reply(connection, its, nonce)
        except TimeoutError:
            raise CollectiveError(f"not all ranks came within {limit:g} s") from None


def _read_reply(connection: socket.socket, rendezvous: Rendezvous, nonce: bytes) -> list[bytes]:
    """Return what each rank brought, once the store has proved that it is the job's."""
    status = read(connection, 1)
    count = rendezvous.size if status == VALUES else 1
    fields = [_read_field(connection) for _ in range(count)]
    reply = status + b"".join(LENGTH.pack(len(each)) + each for each in fields)
    if not proves(read(connection, PROOF_BYTES), rendezvous.secret, REPLY, nonce, reply):
        raise CollectiveError("the store does not belong to this job")
    if status != VALUES:
        raise CollectiveError(fields[0].decode())
    return fields


def _read_field(connection: socket.socket) -> bytes:
    (length,) = LENGTH.unpack(read(connection, LENGTH.size))
    if length > MAX_VALUE_BYTES:
        raise CollectiveError("what listens there is no store")
    return read(connection, length)


def read(connection: socket.socket, length: int) -> bytes:
    """Return exactly so many bytes; raise ``ConnectionResetError`` if they do not come."""
    data = bytearray()
    while len(data) < length:
        piece = connection.recv(length - len(data))
        if not piece:
            raise ConnectionResetError("it hung up")
        data += piece
    return bytes(data)
