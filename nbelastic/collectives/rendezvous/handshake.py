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
import socket
import struct
from collections import deque

NONCE_BYTES = 16
PROOF_BYTES = hashlib.sha256().digest_size
MAGIC = b"nbe6"
GREETING = struct.Struct(f"!4s{NONCE_BYTES}s")
LENGTH = struct.Struct("!I")
MAX_BODY_BYTES = 1 << 20  # of a client's message. That of a server has those of all clients


def proof(secret: bytes, purpose: str, *parts: bytes) -> bytes:
    """Return the proof that the sender of `parts` for a purpose knows the secret."""
    # With lengths, so that no two lists of parts give the same bytes.
    framed = [part for each in parts for part in (len(each).to_bytes(8, "big"), each)]
    return hmac.digest(secret, b"".join((purpose.encode(), b"\0", *framed)), "sha256")


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
        self, connection: socket.socket, secret: bytes, nonces: bytes, *, serves: bool
    ) -> None:
        self.connection = connection
        self.nonces = nonces
        self._secret = secret
        # A message that is sent back to its sender must prove nothing.
        here, there = "from server", "from client"
        self._outward, self._inward = (here, there) if serves else (there, here)
        self._limit = MAX_BODY_BYTES if serves else 1 << 31
        # A client's nonce goes with its first message, which saves a packet.
        self._preamble = b"" if serves else nonces[NONCE_BYTES:]
        self._sent = self._taken = 0
        self._received = bytearray()
        self._bodies: deque[bytes] = deque()

    def send(self, body: bytes) -> None:
        """Send a message."""
        proof = self._proof(self._outward, self._sent, body)
        message, self._preamble = self._preamble + LENGTH.pack(len(body)) + body + proof, b""
        self._sent += 1
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
        return proof(self._secret, purpose, self.nonces, number.to_bytes(8, "big"), body)


def open_channel(connection: socket.socket, secret: bytes) -> MessageChannel:
    """Return the client's end of a channel over a connected, blocking socket."""
    magic, challenge = GREETING.unpack(read(connection, GREETING.size))
    if magic != MAGIC:
        raise ConnectionError("the process that listens there is not part of this nbelastic")
    nonces = challenge + secrets.token_bytes(NONCE_BYTES)
    return MessageChannel(connection, secret, nonces, serves=False)
