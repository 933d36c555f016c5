"""Rendezvous server: exchanges one value between all ranks of a generation.

Each rank sends one value, such as the address it listens on, and receives those of all ranks when
the last one has sent its own. One message to the server and one back is all that a group needs to
form. Why not torch's ``TCPStore``: its client resolves host names, cannot be interrupted, and does
not notice that another rank has died.

A request's body is: length of the key, rank, size; key; value. A reply is ``0`` and, for each rank,
the length of its value and the value; or ``1``, the length of a message and the message.
"""

from __future__ import annotations

import socket
import struct
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbelastic.collectives.rendezvous.handshake import LENGTH, AuthenticatingListener
from nbelastic.collectives.rendezvous.matcher import Matcher, decode, encode

if TYPE_CHECKING:
    from nbelastic.collectives.rendezvous.handshake import ServerConnection

__all__ = ["ERROR", "LENGTH", "MATCHING", "PURPOSE", "VALUES", "RendezvousServer", "encode_body"]

PURPOSE = "rendezvous"
MATCHING = "/matching"
"""Ends the keys of connections that are kept, for :mod:`nbelastic.collectives.rendezvous.matcher`.
"""
BODY = struct.Struct("!HII")
VALUES, ERROR = b"\0", b"\1"

_CLOSE_TIMEOUT_S = 2.0


def encode_body(key: str, rank: int, size: int, value: bytes) -> bytes:
    """Return the body of a request that sends `value` under `key`."""
    name = key.encode()
    return BODY.pack(len(name), rank, size) + name + value


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
        self._thread = threading.Thread(
            target=_serve,
            args=(listener, other_end, secret),
            name="nbelastic-rendezvous",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening and refuse the waiting ranks. Idempotent."""
        self._stop.close()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def __del__(self) -> None:
        stop = getattr(self, "_stop", None)
        if stop is not None:
            stop.close()


def _serve(listener: socket.socket, stop: socket.socket, secret: bytes) -> None:
    with (
        listener,
        stop,
        AuthenticatingListener(listener, secret, PURPOSE, stop=stop) as connections,
    ):
        exchanges, matchings = _Exchanges(connections), _Matchings(connections)
        while (requests := connections.poll()) is not None:
            for connection, body in requests:
                if matchings.takes(connection, body):
                    continue
                if body is None:
                    exchanges.lose(connection)
                else:
                    exchanges.join(connection, body)
        exchanges.close()


@dataclass
class _Exchange:
    """The values sent under one key, until all ranks have sent theirs.

    `values` has the connection and value of each rank that waits; `over` is why no more ranks can
    join.
    """

    size: int
    values: dict[int, tuple[ServerConnection, bytes]] = field(default_factory=dict)
    over: str | None = None


class _Exchanges:
    """All exchanges of a server, by key. Keys are never reused."""

    def __init__(self, connections: AuthenticatingListener) -> None:
        self._connections = connections
        self._exchanges: dict[bytes, _Exchange] = {}
        self._waiting: dict[ServerConnection, tuple[_Exchange, int]] = {}

    def join(self, connection: ServerConnection, body: bytes) -> None:
        """Take the value of a rank, and reply to all ranks after the last value."""
        if len(body) < BODY.size:
            self._connections.close(connection)
            return
        key_bytes, rank, size = BODY.unpack_from(body)
        start = BODY.size + key_bytes
        key, value = body[BODY.size : start], body[start:]
        exchange = self._exchanges.setdefault(key, _Exchange(size))
        if exchange.over is not None:
            self._refuse(connection, exchange.over)
        elif exchange.size != size or rank >= size:
            self._refuse(connection, f"rank {rank} of {size} in a generation of {exchange.size}")
        elif rank in exchange.values:
            self._refuse(connection, f"rank {rank} has already joined")
        else:
            exchange.values[rank] = connection, value
            self._waiting[connection] = exchange, rank
            if len(exchange.values) == size:
                self._complete(exchange)

    def lose(self, connection: ServerConnection) -> None:
        """Refuse the other ranks of an exchange after one has gone: they would wait for ever."""
        if connection in self._waiting:
            exchange, rank = self._waiting.pop(connection)
            del exchange.values[rank]
            self._end(exchange, f"rank {rank} left before all had joined")

    def close(self) -> None:
        """Refuse all waiting ranks."""
        for connection in list(self._waiting):
            self._refuse(connection, "the rendezvous server was closed")

    def _complete(self, exchange: _Exchange) -> None:
        values = [exchange.values[rank][1] for rank in range(exchange.size)]
        reply = VALUES + b"".join(LENGTH.pack(len(value)) + value for value in values)
        for connection, _ in exchange.values.values():
            self._reply(connection, reply)
        exchange.over, exchange.values = "all its ranks have already joined", {}

    def _end(self, exchange: _Exchange, reason: str) -> None:
        for connection, _ in exchange.values.values():
            self._refuse(connection, reason)
        exchange.over, exchange.values = reason, {}

    def _refuse(self, connection: ServerConnection, reason: str) -> None:
        text = reason.encode()
        self._reply(connection, ERROR + LENGTH.pack(len(text)) + text)

    def _reply(self, connection: ServerConnection, reply: bytes) -> None:
        self._waiting.pop(connection, None)
        try:
            connection.reply(reply)
        except OSError:
            pass  # the rank has gone
        self._connections.close(connection)


class _Matchings:
    """The matchings of operations, for each generation with any."""

    def __init__(self, connections: AuthenticatingListener) -> None:
        self._connections = connections
        self._matchers: dict[bytes, Matcher] = {}
        self._ranks: dict[bytes, dict[int, ServerConnection]] = {}
        self._places: dict[ServerConnection, tuple[bytes, int]] = {}

    def takes(self, connection: ServerConnection, body: bytes | None) -> bool:
        """Handle a message for a matching; return whether it was such."""
        place = self._places.get(connection)
        if place is not None:
            if body is None:
                self._lose(connection)
            else:
                self._receive(*place, body)
            return True
        if body is None or len(body) < BODY.size:
            return False
        key_bytes, rank, size = BODY.unpack_from(body)
        key = body[BODY.size : BODY.size + key_bytes]
        if not key.endswith(MATCHING.encode()) or rank >= size:
            return False
        matcher = self._matchers.setdefault(key, Matcher(size))
        self._ranks.setdefault(key, {})[rank] = connection
        self._places[connection] = key, rank
        try:
            connection.reply(VALUES)
        except OSError:
            self._lose(connection)
            return True
        connection.keep()
        self._send(key, [(rank, message) for message in matcher.connected(rank)])
        return True

    def _receive(self, key: bytes, rank: int, body: bytes) -> None:
        self._send(key, self._matchers[key].receive(rank, decode(body)))

    def _send(self, key: bytes, messages: list[tuple[int, dict[str, Any]]]) -> None:
        for rank, message in messages:
            connection = self._ranks.get(key, {}).get(rank)
            if connection is None:
                continue  # it has gone, and its generation ends
            try:
                connection.send(encode(message))
            except OSError:
                self._lose(connection)

    def _lose(self, connection: ServerConnection) -> None:
        key, rank = self._places.pop(connection)
        self._connections.close(connection)
        del self._ranks[key][rank]
        matcher = self._matchers[key]
        self._send(key, matcher.lose(rank))
        if matcher.is_over:
            self._ranks.pop(key, None)
            self._matchers.pop(key, None)
