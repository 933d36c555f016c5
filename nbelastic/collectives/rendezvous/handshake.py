"""Authentication handshake between processes that know a job's secret.

A job's ranks receive its secret over Dask's connections, and never send it to each other. Each
message has a keyed hash (HMAC, SHA-256) of its direction, its number, its content and a nonce that
each side has drawn. So no message can be forged, altered or replayed. On the wire, all numbers in
network order::

    server   magic, nonce
    client   nonce
    both     length of a message, the message, its proof; again and again
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbelastic.collectives.communicator import Rendezvous

NONCE_BYTES = 16
PROOF_BYTES = hashlib.sha256().digest_size
MAGIC = b"nbe5"
GREETING = struct.Struct(f"!4s{NONCE_BYTES}s")
LENGTH = struct.Struct("!I")
MAX_BODY_BYTES = 1 << 20  # of a client's message. That of a server has those of all clients

REQUEST_LIMIT_S = 30.0
"""Limit for a connection's first message. A rank's process may stand still for a while."""

MAX_UNAUTHENTICATED = 128  # connections without a complete message at a time

_SEND_TIMEOUT_S = 5.0


def _proof(secret: bytes, purpose: str, *parts: bytes) -> bytes:
    """Return the proof that the sender of `parts` for a purpose knows the secret."""
    # With lengths, so that no two lists of parts give the same bytes.
    framed = [part for each in parts for part in (len(each).to_bytes(8, "big"), each)]
    return hmac.digest(secret, b"".join((purpose.encode(), b"\0", *framed)), "sha256")


def peer_token(rendezvous: Rendezvous, rank: int) -> bytes:
    """Return the proof by which `rank` identifies itself to its peers in a generation."""
    name = f"{rendezvous.job}/{rendezvous.generation}/{rank}"
    return _proof(rendezvous.secret, "peer", name.encode())


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
    """Messages over a connection, numbered in each direction.

    No other connection has both sides' nonces. The server's end `serves`, and has only its own
    nonce at first: the client's comes with the first message.
    """

    def __init__(
        self, connection: socket.socket, secret: bytes, purpose: str, nonces: bytes, *, serves: bool
    ) -> None:
        self.connection = connection
        self.since = time.monotonic()
        self.nonces = nonces
        self._secret = secret
        # A message that is sent back to its sender must prove nothing.
        here, there = f"{purpose} from server", f"{purpose} from client"
        self._outward, self._inward = (here, there) if serves else (there, here)
        self._limit = MAX_BODY_BYTES if serves else 1 << 31
        # A client's nonce goes with its first message, which saves a packet.
        self._preamble = b"" if serves else nonces[NONCE_BYTES:]
        self._sent = self._taken = 0
        self._received = bytearray()
        self._bodies: deque[bytes] = deque()

    def send(self, body: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a message, with descriptors where the socket can carry them."""
        proof = self._proof(self._outward, self._sent, body)
        message, self._preamble = self._preamble + LENGTH.pack(len(body)) + body + proof, b""
        self._sent += 1
        if descriptors:
            socket.send_fds(self.connection, [message], descriptors)
        else:
            self.connection.sendall(message)

    def receive(self) -> bytes:
        """Wait for a message."""
        while not self._bodies:
            data = self.connection.recv(1 << 16)
            if not data:
                raise ConnectionResetError("it closed the connection")
            self._bodies.extend(self.take(data))
        return self._bodies.popleft()

    @property
    def has_received(self) -> bool:
        """Whether :meth:`receive` would return at once."""
        return bool(self._bodies)

    def take(self, data: bytes) -> list[bytes]:
        """Return the messages that are complete with `data`.

        Raises ``PermissionError`` if one is malformed, or its sender does not know the secret.
        """
        missing = 2 * NONCE_BYTES - len(self.nonces)
        self.nonces, data = self.nonces + data[:missing], data[missing:]
        self._received += data
        bodies: list[bytes] = []
        while len(self._received) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._received)
            end = LENGTH.size + length
            if length > self._limit:  # before the proof: a stranger could fill the memory
                raise PermissionError("the message is too long")
            if len(self._received) < end + PROOF_BYTES:
                break
            body = bytes(self._received[LENGTH.size : end])
            given = bytes(self._received[end : end + PROOF_BYTES])
            # Compared in constant time: how much of a guess was right must not show.
            if not hmac.compare_digest(given, self._proof(self._inward, self._taken, body)):
                raise PermissionError("the proof is wrong")
            self._taken += 1
            del self._received[: end + PROOF_BYTES]
            bodies.append(body)
        return bodies

    def _proof(self, purpose: str, number: int, body: bytes) -> bytes:
        return _proof(self._secret, purpose, self.nonces, number.to_bytes(8, "big"), body)


def open_channel(connection: socket.socket, secret: bytes, purpose: str) -> MessageChannel:
    """Return the client's end of a channel over a connected, blocking socket."""
    magic, challenge = GREETING.unpack(read(connection, GREETING.size))
    if magic != MAGIC:
        raise ConnectionError("the process that listens there is not part of this nbelastic")
    nonces = challenge + secrets.token_bytes(NONCE_BYTES)
    return MessageChannel(connection, secret, purpose, nonces, serves=False)


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
        self._connections: set[MessageChannel] = set()
        self._unauthenticated: dict[MessageChannel, None] = {}  # the slowest first
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
    ) -> list[tuple[MessageChannel, bytes | None]] | None:
        """Wait for events, and return those of authenticated clients.

        These are messages, and None for the end of a connection. None alone means to stop.
        """
        # Woken by the limit of the slowest stranger, too: no thread of its own watches for that.
        events = self._selector.select(self._patience(timeout))
        self._drop_slow_clients()
        requests: list[tuple[MessageChannel, bytes | None]] = []
        for key, _ in events:
            if key.fileobj is self._stop:
                return None
            if key.fileobj is self._listener:
                self._accept()
            elif key.data in self._connections:  # not closed by an event before this one
                requests += self._receive(key.data)
        return requests

    def close(self, connection: MessageChannel) -> None:
        """Close a connection, unless closed: several may end in a :meth:`poll`."""
        if connection in self._connections:
            self._connections.discard(connection)
            self._unauthenticated.pop(connection, None)
            self._selector.unregister(connection.connection)  # while the descriptor is open
            connection.connection.close()

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
                return  # those behind it are younger
            self.close(connection)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return  # the client has gone, or the listener has been shut down
        accepted.settimeout(_SEND_TIMEOUT_S)  # a rank that reads nothing must not stop all
        # Two short messages in a row must not wait for 40 ms until the first is acknowledged.
        if accepted.family != getattr(socket, "AF_UNIX", None):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = MessageChannel(
            accepted, self._secret, self._purpose, secrets.token_bytes(NONCE_BYTES), serves=True
        )
        try:
            if not self._accepts(accepted):
                raise PermissionError  # an OSError, so it is closed below
            accepted.sendall(GREETING.pack(MAGIC, connection.nonces))
        except OSError:
            accepted.close()
            return
        self._connections.add(connection)
        self._unauthenticated[connection] = None
        self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _receive(self, connection: MessageChannel) -> list[tuple[MessageChannel, bytes | None]]:
        try:
            data = connection.connection.recv(1 << 16)
            bodies = connection.take(data) if data else None
        except OSError:  # a reset is an end like any other, and so is a wrong proof
            bodies = None
        if bodies is None:
            # A stranger's end concerns no rank; that of a rank ends what it waits for.
            known = connection not in self._unauthenticated
            self.close(connection)
            return [(connection, None)] if known else []
        if bodies:
            self._unauthenticated.pop(connection, None)
        return [(connection, body) for body in bodies]
