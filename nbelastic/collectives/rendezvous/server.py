"""Rendezvous server: brings the ranks of a generation together.

Each of its connections is a rank's, for a key: the generation, and what ranks meet for. The first
message says which key, the rank, and the number of ranks. A :class:`~.matcher.Matcher` for each key
decides what becomes of the others. To exchange a value, such as the address it listens on, is one
message of each rank and one back, all that a group needs to form. Why not torch's ``TCPStore``: its
client resolves host names, cannot be interrupted, and does not notice that another rank has died.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import threading
from dataclasses import dataclass, field

import msgspec

from nbelastic.collectives.rendezvous.handshake import (
    GREETING,
    MAGIC,
    NONCE_BYTES,
    MessageChannel,
)
from nbelastic.collectives.rendezvous.matcher import Matcher, Message, decode, encode

MAX_STRANGERS = 128  # connections without a complete message at a time

_CLOSE_TIMEOUT_S = 2.0

_SEND_TIMEOUT_S = 5.0


class RendezvousServer:
    """A rendezvous server at the interface `bind`, open until :meth:`close`.

    One thread serves all connections. It shares nothing with this object but the other end of a
    socket pair, whose closing ends it. So there are no locks, and closing waits for no connection.
    Ranks that do not know the secret are refused.
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
        self._stop, other_end = socket.socketpair()
        arguments = listener, other_end, secret
        self._thread = threading.Thread(
            target=_serve, args=arguments, name="nbelastic-rendezvous", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening and refuse the waiting ranks. Idempotent."""
        self._stop.close()
        self._thread.join(_CLOSE_TIMEOUT_S)  # it may be sending to a stopped rank, for longer

    def __del__(self) -> None:
        stop = getattr(self, "_stop", None)
        if stop is not None:
            stop.close()  # without a join: a destructor must not wait


@dataclass
class _Meeting:
    """The connected ranks of a key, and their matcher."""

    key: str
    matcher: Matcher
    ranks: dict[int, MessageChannel] = field(default_factory=dict)


def _serve(listener: socket.socket, stop: socket.socket, secret: bytes) -> None:
    with listener, stop, selectors.DefaultSelector() as selector:
        for each in (listener, stop):
            selector.register(each, selectors.EVENT_READ)
        with contextlib.closing(_Clients(secret, selector)) as clients:
            while True:
                for key, _ in selector.select():
                    if key.fileobj is stop:
                        return
                    if key.fileobj is listener:
                        clients.accept(listener)
                    else:
                        clients.read(key.data)


class _Clients:
    """The connections of a server, and the meetings of their ranks by key. Keys are never reused.

    A client that does not know the secret gets no reply but the end of its connection, and changes
    nothing. Of silent ones, which cost a connection each, the oldest is dropped beyond
    :data:`MAX_STRANGERS`.
    """

    def __init__(self, secret: bytes, selector: selectors.BaseSelector) -> None:
        self._secret = secret
        self._selector = selector
        self._strangers: dict[MessageChannel, None] = {}  # without a message, the oldest first
        self._places: dict[MessageChannel, tuple[_Meeting, int]] = {}
        self._meetings: dict[str, _Meeting] = {}
        self._over: set[str] = set()

    def accept(self, listener: socket.socket) -> None:
        """Greet a client."""
        try:
            accepted, _ = listener.accept()
        except OSError:
            return  # it has gone
        accepted.settimeout(_SEND_TIMEOUT_S)  # a rank that reads nothing must not stop all
        # Two short messages in a row must not wait for 40 ms until the first is acknowledged.
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection = MessageChannel(accepted, self._secret, nonce, serves=True)
        try:
            accepted.sendall(GREETING.pack(MAGIC, nonce))
        except OSError:
            accepted.close()
            return
        self._strangers[connection] = None
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        if len(self._strangers) > MAX_STRANGERS:
            self._lose(next(iter(self._strangers)))

    def read(self, connection: MessageChannel) -> None:
        """Handle what has come on a connection, unless an event before this one has closed it."""
        if connection not in self._strangers and connection not in self._places:
            return
        try:
            data = connection.connection.recv(1 << 16)
            bodies = connection.take(data) if data else None
        except OSError:  # a reset is an end like any other, and so is a wrong proof
            bodies = None
        if bodies is None:
            self._lose(connection)
            return
        for body in bodies:
            if connection in self._places:
                meeting, rank = self._places[connection]
                self._send(meeting, meeting.matcher.receive(rank, decode(body)))
            elif connection in self._strangers:
                self._enter(connection, body)

    def _enter(self, connection: MessageChannel, body: bytes) -> None:
        try:
            key, rank, size = msgspec.msgpack.decode(body, type=tuple[str, int, int])
        except msgspec.MsgspecError:
            self._lose(connection)
            return
        # The first rank says how many there are; one that disagrees is refused at once.
        meeting = self._meetings.get(key) or _Meeting(key, Matcher(size))
        refusal = meeting.matcher.refusal(rank, size)
        if key in self._over:  # a rank that is late must hear so instead of waiting for others
            refusal = "all its ranks have already joined"
        if refusal:
            with contextlib.suppress(OSError):  # the rank has gone
                connection.send(encode({"do": "refused", "reason": refusal}))
            self._lose(connection)
            return
        del self._strangers[connection]
        self._meetings[key] = meeting
        meeting.ranks[rank] = connection
        self._places[connection] = meeting, rank
        # Others may have begun operations, or have gone, before this rank was connected.
        self._send(meeting, [(rank, message) for message in meeting.matcher.connected(rank)])

    def _send(self, meeting: _Meeting, messages: list[tuple[int, Message]]) -> None:
        for rank, message in messages:
            connection = meeting.ranks.get(rank)
            if connection is None:
                continue  # it has gone, and its generation ends
            try:
                connection.send(encode(message))
            except OSError:
                self._lose(connection)

    def _lose(self, connection: MessageChannel) -> None:
        """Close a connection, and tell the other ranks: they would wait for ever."""
        self._selector.unregister(connection.connection)  # while the descriptor is open
        connection.connection.close()
        self._strangers.pop(connection, None)
        meeting, rank = self._places.pop(connection, (None, 0))
        if meeting is None:
            return
        # The connection is out of the way before the others are told: a send may fail, too.
        del meeting.ranks[rank]
        self._send(meeting, meeting.matcher.lose(rank))
        if meeting.matcher.is_over:
            self._meetings.pop(meeting.key, None)
            self._over.add(meeting.key)

    def close(self) -> None:
        """Close all connections."""
        for connection in (*self._strangers, *self._places):
            connection.connection.close()
