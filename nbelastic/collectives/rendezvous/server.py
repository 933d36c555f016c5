"""Rendezvous server: brings the ranks of a generation together.

Each of its connections is a rank's, for a key: the generation, and what ranks meet for. The first
message says which key, the rank, and the number of ranks. A :class:`~.matcher.Matcher` for each key
decides what becomes of the others. To exchange a value, such as the address it listens on, is one
message of each rank and one back, all that a group needs to form. Why not torch's ``TCPStore``: its
client resolves host names, cannot be interrupted, and does not notice that another rank has died.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass, field

import msgspec

from nbelastic.collectives.rendezvous.handshake import AuthenticatingListener, MessageChannel
from nbelastic.collectives.rendezvous.matcher import Matcher, Message, decode, encode

PURPOSE = "rendezvous"

_CLOSE_TIMEOUT_S = 2.0


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


def _serve(listener: socket.socket, stop: socket.socket, secret: bytes) -> None:
    with listener, stop, AuthenticatingListener(listener, secret, PURPOSE, stop=stop) as clients:
        meetings = _Meetings(clients)
        while (messages := clients.poll()) is not None:
            for connection, body in messages:
                meetings.take(connection, body)


@dataclass
class _Meeting:
    """The connected ranks of a key, and their matcher."""

    key: str
    matcher: Matcher
    ranks: dict[int, MessageChannel] = field(default_factory=dict)


class _Meetings:
    """All meetings of a server, by key. Keys are never reused."""

    def __init__(self, connections: AuthenticatingListener) -> None:
        self._connections = connections
        self._meetings: dict[str, _Meeting] = {}
        self._places: dict[MessageChannel, tuple[_Meeting, int]] = {}
        self._over: set[str] = set()

    def take(self, connection: MessageChannel, body: bytes | None) -> None:
        """Handle a message, or the end of a connection."""
        if body is None:
            self._lose(connection)
        elif connection in self._places:
            meeting, rank = self._places[connection]
            self._send(meeting, meeting.matcher.receive(rank, decode(body)))
        else:
            self._enter(connection, body)

    def _enter(self, connection: MessageChannel, body: bytes) -> None:
        try:
            key, rank, size = msgspec.msgpack.decode(body, type=tuple[str, int, int])
        except msgspec.MsgspecError:
            self._connections.close(connection)
            return
        # The first rank says how many there are; one that disagrees is refused at once.
        meeting = self._meetings.get(key) or _Meeting(key, Matcher(size))
        refusal = meeting.matcher.refusal(rank, size)
        if key in self._over:  # a rank that is late must hear so instead of waiting for others
            refusal = "all its ranks have already joined"
        if refusal:
            with contextlib.suppress(OSError):  # the rank has gone
                connection.send(encode({"do": "refused", "reason": refusal}))
            self._connections.close(connection)
            return
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
        self._connections.close(connection)
        meeting, rank = self._places.pop(connection, (None, 0))
        if meeting is None:
            return
        # The connection is out of the way before the others are told: a send may fail, too.
        del meeting.ranks[rank]
        self._send(meeting, meeting.matcher.lose(rank))
        if meeting.matcher.is_over:
            self._meetings.pop(meeting.key, None)
            self._over.add(meeting.key)
