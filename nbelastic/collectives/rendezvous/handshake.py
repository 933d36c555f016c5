"""Authentication handshake between processes that know a job's secret.

A job's ranks receive its secret over Dask's connections, and never send it to each other. Each side
proves that it knows the secret with a keyed hash (HMAC, SHA-256) of its message and of a nonce that
the other side has drawn. So no message can be forged, altered or replayed. On the wire, all numbers
in network order::

    server   magic, nonce
    client   length of the body, nonce; body; proof
    server   reply; proof

A connection that the server keeps then carries messages in both directions, each with its length
and a proof of its number and content.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import selectors
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.collectives.communicator import Rendezvous

NONCE_BYTES = 16
PROOF_BYTES = hashlib.sha256().digest_size
MAGIC = b"nbe3"
GREETING = struct.Struct(f"!4s{NONCE_BYTES}s")
LENGTH = struct.Struct("!I")
HEADER = struct.Struct(f"!I{NONCE_BYTES}s")
MAX_BODY_BYTES = 1 << 20

REQUEST_LIMIT_S = 30.0
"""Limit for a connection to send its request. A rank's process may stand still for a while."""

MAX_UNAUTHENTICATED = 128
"""Connections without a complete request at a time."""

_SEND_TIMEOUT_S = 5.0


def _proof(secret: bytes, purpose: str, *parts: bytes) -> bytes:
    """Return the proof that the sender of `parts` for a purpose knows the secret."""
    code = hmac.new(secret, purpose.encode() + b"\0", hashlib.sha256)
    for part in parts:
        code.update(len(part).to_bytes(8, "big"))
        code.update(part)
    return code.digest()


def peer_token(rendezvous: Rendezvous, rank: int) -> bytes:
    """Return the proof by which `rank` identifies itself to its peers in a generation."""
    name = f"{rendezvous.job}/{rendezvous.generation}/{rank}"
    return _proof(rendezvous.secret, "peer", name.encode())


def encode_request(
    secret: bytes, purpose: str, challenge: bytes, nonce: bytes, body: bytes
) -> bytes:
    """Return a client's message: `challenge` is the server's nonce, `nonce` the client's own.

    A server for another `purpose` refuses it.
    """
    message = HEADER.pack(len(body), nonce) + body
    return message + _proof(secret, f"{purpose} request", challenge, message)


def read(connection: socket.socket, length: int) -> bytes:
    """Return exactly `length` bytes; raise ``ConnectionResetError`` if the connection ends."""
    data = bytearray()
    while len(data) < length:
        piece = connection.recv(length - len(data))
        if not piece:
            raise ConnectionResetError("it closed the connection")
        data += piece
    return bytes(data)


class MessageChannel:
    """Messages over a connection after its handshake, numbered in each direction.

    The nonces of both sides are those that no other connection has. The server's end `serves`.
    """

    def __init__(self, secret: bytes, purpose: str, nonces: bytes, *, serves: bool) -> None:
        self._secret = secret
        self._nonces = nonces
        here, there = f"{purpose} from server", f"{purpose} from client"
        self._outward, self._inward = (here, there) if serves else (there, here)
        self._sent = self._taken = 0
        self._received = bytearray()

    def encode(self, body: bytes) -> bytes:
        """Return the next message as it goes over the connection."""
        number, self._sent = self._sent, self._sent + 1
        return LENGTH.pack(len(body)) + body + self._proof(self._outward, number, body)

    def take(self, data: bytes) -> list[bytes]:
        """Return the messages that are complete with `data`.

        Raises ``PermissionError`` if one is malformed, or its sender does not know the secret.
        """
        self._received += data
        bodies: list[bytes] = []
        while len(self._received) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._received)
            end = LENGTH.size + length
            if length > MAX_BODY_BYTES:
                raise PermissionError("the message is too long")
            if len(self._received) < end + PROOF_BYTES:
                break
            body = bytes(self._received[LENGTH.size : end])
            given = bytes(self._received[end : end + PROOF_BYTES])
            if not hmac.compare_digest(given, self._proof(self._inward, self._taken, body)):
                raise PermissionError("the proof is wrong")
            self._taken += 1
            del self._received[: end + PROOF_BYTES]
            bodies.append(body)
        return bodies

    def _proof(self, purpose: str, number: int, body: bytes) -> bytes:
        return _proof(self._secret, purpose, self._nonces, number.to_bytes(8, "big"), body)


class AuthenticatedClient:
    """The client's side of one handshake, over a connected, blocking socket."""

    def __init__(self, connection: socket.socket, secret: bytes, purpose: str) -> None:
        self._connection = connection
        self._secret = secret
        self._purpose = purpose
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._challenge = b""

    def request(self, body: bytes) -> None:
        """Read the server's greeting and send a request."""
        magic, challenge = GREETING.unpack(read(self._connection, GREETING.size))
        if magic != MAGIC:
            raise ConnectionError("the process that listens there is not part of this nbelastic")
        self._challenge = challenge
        message = encode_request(self._secret, self._purpose, challenge, self._nonce, body)
        self._connection.sendall(message)

    def verifies(self, reply: bytes, given: bytes) -> bool:
        """Return whether `given` proves that the server knows the secret."""
        expected = _proof(self._secret, f"{self._purpose} reply", self._nonce, reply)
        return hmac.compare_digest(given, expected)

    def channel(self) -> MessageChannel:
        """Return the channel of a connection that the server keeps, after its reply."""
        nonces = self._challenge + self._nonce
        return MessageChannel(self._secret, self._purpose, nonces, serves=False)


@dataclass(eq=False)
class ServerConnection:
    """A connection to an :class:`AuthenticatingListener`."""

    sock: socket.socket
    secret: bytes = field(repr=False)
    purpose: str
    since: float = field(default_factory=time.monotonic)
    challenge: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    nonce: bytes = b""
    received: bytearray = field(default_factory=bytearray)
    channel: MessageChannel | None = None  # of a connection that is kept

    def keep(self) -> None:
        """Take messages after the reply, which :meth:`AuthenticatingListener.poll` returns."""
        nonces = self.challenge + self.nonce
        self.channel = MessageChannel(self.secret, self.purpose, nonces, serves=True)

    def send(self, body: bytes) -> None:
        """Send a message over a connection that is kept."""
        assert self.channel is not None
        self.sock.sendall(self.channel.encode(body))

    def reply(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a reply with its proof, and descriptors where the socket can carry them."""
        message += _proof(self.secret, f"{self.purpose} reply", self.nonce, message)
        if descriptors:
            socket.send_fds(self.sock, [message], descriptors)
        else:
            self.sock.sendall(message)

    def take(self, data: bytes) -> bytes | None:
        """Return the request's body once it is complete.

        Raises ``PermissionError`` if it is malformed, or its sender does not know the secret.
        """
        self.received += data
        if len(self.received) < HEADER.size:
            return None
        length, nonce = HEADER.unpack_from(self.received)
        end = HEADER.size + length
        if length > MAX_BODY_BYTES:
            raise PermissionError("the request is too long")
        if len(self.received) < end + PROOF_BYTES:
            return None
        message, given = bytes(self.received[:end]), bytes(self.received[end:])
        expected = _proof(self.secret, f"{self.purpose} request", self.challenge, message)
        if not hmac.compare_digest(given, expected):
            raise PermissionError("the proof is wrong")
        self.nonce = nonce
        self.received.clear()
        return message[HEADER.size :]


class AuthenticatingListener:
    """The server's side of all handshakes at a listening socket, for one thread.

    A client that does not know the secret gets no reply but the end of its connection, and changes
    nothing. Slow ones cost a connection each, for :data:`REQUEST_LIMIT_S`. Beyond
    :data:`MAX_UNAUTHENTICATED` of them the slowest is dropped. The socket `stop` ends :meth:`poll`
    when it becomes readable. `accepts` is whether to greet the process at the other end.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        purpose: str,
        *,
        stop: socket.socket | None = None,
        accepts: Callable[[socket.socket], bool] = lambda _: True,
    ) -> None:
        self._listener = listener
        self._secret = secret
        self._purpose = purpose
        self._stop = stop
        self._accepts = accepts
        self._connections: set[ServerConnection] = set()
        self._unauthenticated: dict[ServerConnection, None] = {}  # the slowest first
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        if stop is not None:
            self._selector.register(stop, selectors.EVENT_READ)

    def __enter__(self) -> AuthenticatingListener:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in list(self._connections):
            self.close(connection)
        self._selector.close()

    def poll(
        self, timeout: float | None = None
    ) -> list[tuple[ServerConnection, bytes | None]] | None:
        """Wait for events, and return those of authenticated clients.

        These are requests, and None for the end of a connection. None alone means to stop.
        """
        events = self._selector.select(self._patience(timeout))
        self._drop_slow_clients()
        requests: list[tuple[ServerConnection, bytes | None]] = []
        for key, _ in events:
            if key.fileobj is self._stop:
                return None
            if key.fileobj is self._listener:
                self._accept()
            elif key.data in self._connections:  # not closed by an event before this one
                self._receive(key.data, requests)
        return requests

    def close(self, connection: ServerConnection) -> None:
        """Close a connection, unless closed: several may end in a :meth:`poll`."""
        if connection in self._connections:
            self.release(connection).close()

    def release(self, connection: ServerConnection) -> socket.socket:
        """Stop listening to a connection and return its socket."""
        self._connections.discard(connection)
        self._unauthenticated.pop(connection, None)
        self._selector.unregister(connection.sock)
        return connection.sock

    def _patience(self, timeout: float | None) -> float | None:
        slowest = next(iter(self._unauthenticated), None)
        if slowest is None:
            return timeout
        left = max(0.0, slowest.since + REQUEST_LIMIT_S - time.monotonic())
        return left if timeout is None else min(left, timeout)

    def _drop_slow_clients(self) -> None:
        now = time.monotonic()
        for connection in list(self._unauthenticated):
            late = now >= connection.since + REQUEST_LIMIT_S
            if not late and len(self._unauthenticated) <= MAX_UNAUTHENTICATED:
                return
            self.close(connection)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return  # the client has gone, or the listener has been shut down
        accepted.settimeout(_SEND_TIMEOUT_S)
        # Two short messages in a row must not wait for 40 ms until the first is acknowledged.
        if accepted.family != getattr(socket, "AF_UNIX", None):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = ServerConnection(accepted, self._secret, self._purpose)
        try:
            if not self._accepts(accepted):
                raise PermissionError
            accepted.sendall(GREETING.pack(MAGIC, connection.challenge))
        except OSError:
            accepted.close()
            return
        self._connections.add(connection)
        self._unauthenticated[connection] = None
        self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _receive(
        self,
        connection: ServerConnection,
        requests: list[tuple[ServerConnection, bytes | None]],
    ) -> None:
        try:
            data = connection.sock.recv(1 << 16)
        except OSError:
            data = b""
        if connection not in self._unauthenticated:
            bodies = _messages(connection, data)
            requests.extend((connection, body) for body in bodies or ())
            if bodies is None:
                self.close(connection)
                requests.append((connection, None))
            return
        try:
            body = connection.take(data) if data else None
        except PermissionError:
            data = b""
        if not data:
            self.close(connection)
        elif body is not None:
            del self._unauthenticated[connection]
            requests.append((connection, body))


def _messages(connection: ServerConnection, data: bytes) -> list[bytes] | None:
    """Return the messages of a kept connection; None ends it, as does a second request."""
    if not data or connection.channel is None:
        return None
    try:
        return connection.channel.take(data)
    except PermissionError:
        return None
