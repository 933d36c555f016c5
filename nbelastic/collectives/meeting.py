"""A rank's visit to the store, in the shape in which Gloo asks for it.

Gloo's constructor sets one key, this rank's address, and then waits for those of the others.
:class:`Meeting` turns that into the one exchange that :mod:`nbelastic.collectives.store` offers.
It is used by the thread that constructs the group; :meth:`Meeting.leave`, which any thread may
call, makes it fail at once.
"""

from __future__ import annotations

import secrets
import socket
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import Store as TorchStore

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
    from collections.abc import Sequence
    from datetime import timedelta

    from nbelastic.collectives.communicator import Rendezvous

__all__ = ["Meeting"]

# Its address came with the plan, from a rank that was alive a moment ago and had it open.
_REACH_STORE_S = 10.0


class Meeting(TorchStore):
    """A store for one group.

    Parameters
    ----------
    rendezvous : Rendezvous
        Which ranks meet, and where.

    Attributes
    ----------
    addresses : list of bytes
        What each rank brought, in Gloo's encoding; empty until all have come.
    failure : str or None
        Why they could not all be had; Gloo's own exception wraps it beyond recognition.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__()
        self.addresses: list[bytes] = []
        self.failure: str | None = None
        self._rendezvous = rendezvous
        self._own = b""
        self._connection: socket.socket | None = None
        self._left = False

    def set(self, _key: str, value: bytes) -> None:  # type: ignore[override]
        """Take in this rank's address."""
        self._own = bytes(value)

    def wait(self, _keys: Sequence[str], _timeout: timedelta | None = None) -> None:
        """Wait for all ranks, whichever Gloo asks for, and as long as the rendezvous says."""
        if self.addresses:
            return
        try:
            self.addresses = self._meet()
        except CollectiveError as error:
            self.failure = str(error)
            raise

    def get(self, key: str) -> bytes:
        """Return the address of the rank that `key` ends in."""
        self.wait([key])
        return self.addresses[int(key.rpartition("/")[2])]

    def leave(self) -> None:
        """Make a visit under way, or to come, fail."""
        self._left = True
        connection = self._connection
        if connection is not None:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it is closed, or was never established

    def _meet(self) -> list[bytes]:
        its = self._rendezvous
        host, port = its.store
        try:
            limit = min(its.timeout_s, _REACH_STORE_S)
            with socket.create_connection(its.store, timeout=limit) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return self._exchange(connection)
        except OSError as error:
            raise CollectiveError(f"no answer from the store at {host}:{port}: {error}") from None
        finally:
            self._connection = None

    def _exchange(self, connection: socket.socket) -> list[bytes]:
        its = self._rendezvous
        self._connection = connection
        if self._left:
            raise CollectiveError("this rank has left")
        magic, challenge = GREETING.unpack(_read(connection, GREETING.size))
        if magic != MAGIC:
            raise CollectiveError("what listens there is no store")
        nonce = secrets.token_bytes(NONCE_BYTES)
        message = request(
            its.secret,
            challenge,
            nonce,
            room=f"{its.job}/{its.generation}",
            rank=its.rank,
            size=its.size,
            value=self._own,
        )
        connection.sendall(message)
        connection.settimeout(its.timeout_s)
        try:
            return _read_reply(connection, its, nonce)
        except TimeoutError:
            raise CollectiveError(f"not all ranks came within {its.timeout_s:g} s") from None


def _read_reply(connection: socket.socket, rendezvous: Rendezvous, nonce: bytes) -> list[bytes]:
    """Return what each rank brought, once the store has proved that it is the job's."""
    status = _read(connection, 1)
    count = rendezvous.size if status == VALUES else 1
    fields = [_read_field(connection) for _ in range(count)]
    reply = status + b"".join(LENGTH.pack(len(each)) + each for each in fields)
    if not proves(_read(connection, PROOF_BYTES), rendezvous.secret, REPLY, nonce, reply):
        raise CollectiveError("the store does not belong to this job")
    if status != VALUES:
        raise CollectiveError(fields[0].decode())
    return fields


def _read_field(connection: socket.socket) -> bytes:
    (length,) = LENGTH.unpack(_read(connection, LENGTH.size))
    if length > MAX_VALUE_BYTES:
        raise CollectiveError("what listens there is no store")
    return _read(connection, length)


def _read(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        piece = connection.recv(length - len(data))
        if not piece:
            raise ConnectionResetError("it hung up")
        data += piece
    return bytes(data)
