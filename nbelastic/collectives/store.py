"""Where the ranks of a generation meet before they are connected: a store that one of them opens.

Each rank brings one value, the address it listens on, and gets those of all ranks once the last has
come. That is one message to the store and one back, and all that a group needs to form.

Why not torch's ``TCPStore``: its client looks up the name of whatever it connects to, and where the
name server does not answer, forming takes five seconds instead of five milliseconds; it cannot be
interrupted; and it does not tell the others that a rank which had come has died.

One thread serves all connections. It owns the listening socket, the connections and the rooms;
:class:`Store` shares nothing with it but one end of a socket pair, whose closing ends it. So there
are no locks, and closing never waits for a connection.

Both sides prove that they know the job's secret (:mod:`nbelastic.collectives.proof`). Who does not
gets no answer but the end of the connection, and has changed nothing. Strangers who stay silent or
dawdle cost a connection each, for :data:`STRANGER_LIMIT_S`; beyond :data:`MOST_STRANGERS` the one
who has dawdled longest goes.

On the wire, all numbers in network order::

    greeting   magic, nonce of the store
    request    length of room, rank, size, length of value, nonce of the rank; room; value; proof
    reply      0, then for each rank the length of its value and the value; proof
               or 1, then the length of a message and the message; proof
"""

from __future__ import annotations

import secrets
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass, field

from nbelastic.collectives.proof import NONCE_BYTES, PROOF_BYTES, proof, proves

__all__ = ["ERROR", "GREETING", "LENGTH", "MAGIC", "REPLY", "REQUEST", "VALUES", "Store"]
__all__ += ["MAX_VALUE_BYTES", "request"]

MAGIC = b"nbe2"
GREETING = struct.Struct(f"!4s{NONCE_BYTES}s")
REQUEST = struct.Struct(f"!HIII{NONCE_BYTES}s")
LENGTH = struct.Struct("!I")
VALUES, ERROR = b"\0", b"\1"
ASK, REPLY = "store request", "store reply"
MAX_VALUE_BYTES = 1 << 20

STRANGER_LIMIT_S = 30.0
"""How long a connection may take to bring its request. A rank's process may stand still a while."""

MOST_STRANGERS = 128
"""Connections without a complete request at a time."""

_MAX_ROOM_BYTES = 1024
_REPLY_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 2.0


def request(
    secret: bytes, challenge: bytes, nonce: bytes, *, room: str, rank: int, size: int, value: bytes
) -> bytes:
    """Return the message that brings `value` to `room`.

    Parameters
    ----------
    secret : bytes
        The job's.
    challenge : bytes
        The store's nonce.
    nonce : bytes
        The rank's.
    """
    name = room.encode()
    message = REQUEST.pack(len(name), rank, size, len(value), nonce) + name + value
    return message + proof(secret, ASK, challenge, message)


class Store:
    """A store, open until :meth:`close`.

    Parameters
    ----------
    bind : str
        Address of the interface to listen on, and on no other.
    secret : bytes
        The job's; ranks that do not know it are turned away.

    Attributes
    ----------
    address : tuple of (str, int)
        Where ranks find it.
    """

    def __init__(self, bind: str, secret: bytes = b"") -> None:
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((bind, 0))
            listener.listen(128)
        except OSError:
            listener.close()
            raise
        self.address: tuple[str, int] = (bind, listener.getsockname()[1])
        self._lifeline, other_end = socket.socketpair()
        self._thread = threading.Thread(
            target=_serve,
            args=(listener, other_end, secret),
            name="nbelastic-store",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening and turn away whoever waits. Idempotent."""
        self._lifeline.close()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def __del__(self) -> None:
        lifeline = getattr(self, "_lifeline", None)
        if lifeline is not None:
            lifeline.close()


@dataclass
class _Room:
    """The ranks of one generation that have come, until all have."""

    size: int
    guests: dict[int, _Guest] = field(default_factory=dict)
    over: str | None = None


@dataclass(eq=False)
class _Guest:
    """A connection, and what has arrived over it."""

    connection: socket.socket
    since: float
    challenge: bytes
    received: bytearray = field(default_factory=bytearray)
    nonce: bytes = b""
    room: _Room | None = None
    rank: int = -1
    value: bytes = b""


def _serve(listener: socket.socket, lifeline: socket.socket, secret: bytes) -> None:
    with selectors.DefaultSelector() as selector, listener, lifeline:
        rooms = _Rooms(selector, secret)
        selector.register(listener, selectors.EVENT_READ)
        selector.register(lifeline, selectors.EVENT_READ)
        while True:
            events = selector.select(rooms.patience())
            rooms.lose_patience()
            for key, _ in events:
                if key.fileobj is lifeline:
                    rooms.close()
                    return
                if key.fileobj is listener:
                    rooms.admit(listener)
                else:
                    rooms.hear(key.data)


class _Rooms:
    """What the serving thread does with its connections."""

    def __init__(self, selector: selectors.BaseSelector, secret: bytes) -> None:
        self._selector = selector
        self._secret = secret
        self._rooms: dict[bytes, _Room] = {}
        self._guests: set[_Guest] = set()
        self._strangers: dict[_Guest, None] = {}  # the longest there first

    def patience(self) -> float | None:
        """Return how long to wait for events."""
        first = next(iter(self._strangers), None)
        if first is None:
            return None
        return max(0.0, first.since + STRANGER_LIMIT_S - time.monotonic())

    def lose_patience(self) -> None:
        """Part with strangers that are too slow, or too many."""
        now = time.monotonic()
        for guest in list(self._strangers):
            late = now >= guest.since + STRANGER_LIMIT_S
            if not late and len(self._strangers) <= MOST_STRANGERS:
                return
            self._forget(guest)

    def admit(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.settimeout(_REPLY_TIMEOUT_S)
        guest = _Guest(connection, time.monotonic(), secrets.token_bytes(NONCE_BYTES))
        self._guests.add(guest)
        self._strangers[guest] = None
        self._selector.register(connection, selectors.EVENT_READ, guest)
        try:
            connection.sendall(GREETING.pack(MAGIC, guest.challenge))
        except OSError:
            self._forget(guest)

    def hear(self, guest: _Guest) -> None:
        if guest not in self._guests:
            return  # dismissed by an event of the same round
        try:
            data = guest.connection.recv(1 << 16)
        except OSError:
            data = b""
        guest.received += data
        if not data:
            self._lose(guest)
        elif guest.room is None:
            self._read(guest)

    def close(self) -> None:
        for guest in list(self._guests):
            self._dismiss(guest, "the store was closed")

    def _read(self, guest: _Guest) -> None:
        """Seat the guest once its request is complete; part with one that speaks nonsense."""
        if len(guest.received) < REQUEST.size:
            return
        room_bytes, rank, size, value_bytes, nonce = REQUEST.unpack_from(guest.received)
        if room_bytes > _MAX_ROOM_BYTES or value_bytes > MAX_VALUE_BYTES:
            self._forget(guest)
            return
        start = REQUEST.size + room_bytes
        end = start + value_bytes
        if len(guest.received) < end + PROOF_BYTES:
            return
        message, given = bytes(guest.received[:end]), bytes(guest.received[end:])
        if not proves(given, self._secret, ASK, guest.challenge, message):
            self._forget(guest)
            return
        self._strangers.pop(guest)
        room = self._rooms.setdefault(message[REQUEST.size : start], _Room(size))
        guest.rank, guest.nonce, guest.value = rank, nonce, message[start:]
        self._seat(guest, room, size)

    def _seat(self, guest: _Guest, room: _Room, size: int) -> None:
        if room.over is not None:
            self._dismiss(guest, room.over)
        elif room.size != size or guest.rank >= size:
            self._dismiss(guest, f"rank {guest.rank} of {size} in a generation of {room.size}")
        elif guest.rank in room.guests:
            self._dismiss(guest, f"rank {guest.rank} has come before")
        else:
            guest.room = room
            room.guests[guest.rank] = guest
            if len(room.guests) == room.size:
                self._complete(room)

    def _complete(self, room: _Room) -> None:
        guests = [room.guests[rank] for rank in range(room.size)]
        room.over = "all its ranks have come before"
        room.guests = {}
        reply = VALUES + b"".join(LENGTH.pack(len(each.value)) + each.value for each in guests)
        for guest in guests:
            self._answer(guest, reply)

    def _lose(self, guest: _Guest) -> None:
        """Tell the others that a rank which had come is gone: they wait in vain."""
        room = guest.room
        self._forget(guest)
        if room is not None and room.over is None:
            room.over = f"rank {guest.rank} left before all had come"
            for other in list(room.guests.values()):
                self._dismiss(other, room.over)
            room.guests = {}

    def _dismiss(self, guest: _Guest, message: str) -> None:
        if guest in self._strangers:
            self._forget(guest)
        elif guest in self._guests:
            text = message.encode()
            self._answer(guest, ERROR + LENGTH.pack(len(text)) + text)

    def _answer(self, guest: _Guest, reply: bytes) -> None:
        try:
            seal = proof(self._secret, REPLY, guest.nonce, reply)
            guest.connection.sendall(reply + seal)
        except OSError:
            pass  # it is gone, and nobody waits for it here
        self._forget(guest)

    def _forget(self, guest: _Guest) -> None:
        self._guests.discard(guest)
        self._strangers.pop(guest, None)
        self._selector.unregister(guest.connection)
        guest.connection.close()
