"""Where the ranks of a generation meet before they are connected: a store that one of them opens.

Each rank brings one value, the address it listens on, and gets those of all ranks once the last has
come. That is one message to the store and one back, and all that a group needs to form.

Why not torch's ``TCPStore``: its client looks up the name of whatever it connects to, and where the
name server does not answer, forming takes five seconds instead of five milliseconds; it cannot be
interrupted; and it does not tell the others that a rank which had come has died.

One thread serves all connections. It owns the listening socket, the connections and the rooms;
:class:`Store` shares nothing with it but one end of a socket pair, whose closing ends it. So there
are no locks, and closing never waits for a connection.

On the wire, all numbers in network order::

    request    magic, length of room, rank, size, length of value; room; value
    reply      0, then for each rank the length of its value and the value
               or 1, then the length of a message and the message
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from dataclasses import dataclass, field

__all__ = ["ERROR", "LENGTH", "REQUEST", "VALUES", "Store", "request"]

REQUEST = struct.Struct("!4sHIII")
LENGTH = struct.Struct("!I")
VALUES, ERROR = b"\0", b"\1"

_MAGIC = b"nbe1"
_MAX_ROOM_BYTES = 1024
_MAX_VALUE_BYTES = 1 << 20
_REPLY_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 2.0


def request(room: str, rank: int, size: int, value: bytes) -> bytes:
    """Return the message that brings `value` to `room`."""
    name = room.encode()
    return REQUEST.pack(_MAGIC, len(name), rank, size, len(value)) + name + value


class Store:
    """A store, open until :meth:`close`.

    Parameters
    ----------
    bind : str
        Address of the interface to listen on, and on no other.

    Attributes
    ----------
    address : tuple of (str, int)
        Where ranks find it.
    """

    def __init__(self, bind: str) -> None:
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
            target=_serve, args=(listener, other_end), name="nbelastic-store", daemon=True
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
    received: bytearray = field(default_factory=bytearray)
    room: _Room | None = None
    rank: int = -1
    value: bytes = b""


def _serve(listener: socket.socket, lifeline: socket.socket) -> None:
    with selectors.DefaultSelector() as selector, listener, lifeline:
        rooms = _Rooms(selector)
        selector.register(listener, selectors.EVENT_READ)
        selector.register(lifeline, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is lifeline:
                    rooms.close()
                    return
                if key.fileobj is listener:
                    rooms.admit(listener)
                else:
                    rooms.hear(key.data)


class _Rooms:
    """What the serving thread does with its connections."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._rooms: dict[bytes, _Room] = {}
        self._guests: set[_Guest] = set()

    def admit(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.settimeout(_REPLY_TIMEOUT_S)
        guest = _Guest(connection)
        self._guests.add(guest)
        self._selector.register(connection, selectors.EVENT_READ, guest)

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
        magic, room_bytes, rank, size, value_bytes = REQUEST.unpack_from(guest.received)
        if magic != _MAGIC or room_bytes > _MAX_ROOM_BYTES or value_bytes > _MAX_VALUE_BYTES:
            self._forget(guest)
            return
        start = REQUEST.size + room_bytes
        if len(guest.received) < start + value_bytes:
            return
        room = self._rooms.setdefault(bytes(guest.received[REQUEST.size : start]), _Room(size))
        guest.rank, guest.value = rank, bytes(guest.received[start : start + value_bytes])
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
        if guest in self._guests:
            text = message.encode()
            self._answer(guest, ERROR + LENGTH.pack(len(text)) + text)

    def _answer(self, guest: _Guest, reply: bytes) -> None:
        try:
            guest.connection.sendall(reply)
        except OSError:
            pass  # it is gone, and nobody waits for it here
        self._forget(guest)

    def _forget(self, guest: _Guest) -> None:
        self._guests.discard(guest)
        self._selector.unregister(guest.connection)
        guest.connection.close()
