"""Rendezvous of a rank: its terms, a client of the server, a probe of servers."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import msgspec

from nbelastic.collectives.rendezvous.handshake import MessageChannel, open_channel, proof
from nbelastic.collectives.rendezvous.matcher import Message, decode, encode
from nbelastic.errors import CollectiveError

MATCHING = "matching"
"""Subject of the matching of operations, see :mod:`nbelastic.collectives.rendezvous.matcher`."""

# The server's address came with the plan, from a rank that was alive a moment ago.
_CONNECT_LIMIT_S = 10.0

# A lost packet is sent again after a second.
_PROBE_LIMIT_S = 1.5


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Everything that a rank needs to connect to the ranks of its generation."""

    job: str  # unique on the cluster; with the generation it names keys that are never reused
    generation: int
    rank: int
    size: int
    store: tuple[str, int]  # address of the rendezvous server, which one of the ranks runs
    bind: str  # address of the interface that this rank listens on
    timeout_s: float = 1800.0  # for connecting and for each operation
    # The driver breaks a generation that has not formed by then; trials of transports stay within.
    forming_s: float = 10.0
    backend: str = "auto"  # the transport that the job asks for
    secret: bytes = field(default=b"", repr=False)  # peers that do not know it are refused

    def part(self, name: str, ranks: Sequence[int]) -> Rendezvous:
        """Return the rendezvous of some of the ranks, under a `name` of their own."""
        rank, size = ranks.index(self.rank), len(ranks)
        return replace(self, job=f"{self.job}/{name}", rank=rank, size=size)

    def token(self, rank: int) -> bytes:
        """Return the proof by which `rank` identifies itself to its peers in the generation."""
        return proof(self.secret, "peer", f"{self.job}/{self.generation}/{rank}".encode())


class RendezvousClient:
    """A rank's connection to the rendezvous of its generation; each subject has one of its own.

    One thread receives; any thread sends, also before there is a connection, and aborts.
    """

    def __init__(self, rendezvous: Rendezvous, subject: str = "") -> None:
        self._its = rendezvous
        self._subject = subject
        self._matches = subject == MATCHING
        self._lock = threading.Lock()  # any thread sends, also before there is a channel
        self._socket: socket.socket | None = None
        self._channel: MessageChannel | None = None
        self._unsent: list[Message] = []
        self._aborted = False
        self._limit_s: float | None = None
        self.timeout_s = rendezvous.timeout_s

    def exchange(self, value: bytes, limit_s: float | None = None) -> list[bytes]:
        """Send `value`, wait for all ranks, and return the value of each.

        By default the rendezvous' limit holds for that. Raises ``CollectiveError`` if a rank or the
        server is missing, or this rank has aborted.
        """
        limit = self.timeout_s if limit_s is None else min(limit_s, self.timeout_s)
        self.send({"do": "exchange", "value": value})
        try:
            self.connect(limit)
            reply = self.receive()
        finally:
            self.close()
        if reply["do"] == "gone":
            raise CollectiveError(f"rank {reply['rank']} left before all had joined")
        values: list[bytes] = reply["values"]
        return values

    def connect(self, limit_s: float | None = None) -> None:
        """Connect, and send what has been sent so far; no message may then take past the limit.

        Raises ``CollectiveError`` if the server cannot be reached, or there has been an abort.
        """
        its = self._its
        key = f"{its.job}/{its.generation}" + (self._subject and f"/{self._subject}")
        family = socket.AF_INET6 if ":" in its.store[0] else socket.AF_INET
        self._socket = connection = socket.socket(family, socket.SOCK_STREAM)
        self._limit_s = limit_s
        try:
            self._reach(connection)
            channel = open_channel(connection, its.secret)
            channel.send(msgspec.msgpack.encode((key, its.rank, its.size)))
            connection.settimeout(limit_s)  # none for a matching, which lasts a generation
            # From here on other threads send; what they have said so far has to come first.
            with self._lock:
                self._channel = channel
                for message in self._unsent:
                    channel.send(encode(message))
                self._unsent = []
            if self._aborted:  # a matching leaves only now: the server knows this rank
                raise ConnectionAbortedError("this rank has left")
        except OSError as error:
            raise self._failure(error) from None

    def send(self, message: Message) -> None:
        """Send a message; an unsent message is lost with the generation."""
        with self._lock:
            if self._channel is None:
                self._unsent.append(message)
                return
            with contextlib.suppress(OSError):  # the receiving thread finds out
                self._channel.send(encode(message))

    def receive(self) -> Message:
        """Wait for a message. Raises ``CollectiveError`` if the connection has ended."""
        assert self._channel is not None
        try:
            message = decode(self._channel.receive())
        except TimeoutError:
            raise CollectiveError(f"not all ranks joined within {self._limit_s:g} s") from None
        except PermissionError:
            raise CollectiveError("the rendezvous server does not belong to this job") from None
        except OSError as error:
            raise self._failure(error) from None
        if message["do"] == "refused":
            raise CollectiveError(message["reason"])
        return message

    @property
    def has_received(self) -> bool:
        """Whether :meth:`receive` would return at once."""
        return self._channel is not None and self._channel.has_received

    def abort(self) -> None:
        """End the connection, at once or when it has been made.

        A rank that leaves the matching is connected first: the others learn only then that it has
        gone.
        """
        self._aborted = True
        # Shut down, not closed: the receiving thread may be in ``recv``, and closes it itself.
        connection = self._socket
        if connection is not None and (self._channel is not None or not self._matches):
            with contextlib.suppress(OSError):  # it is closed, or was never established
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. The receiving thread calls it."""
        with self._lock:  # a thread may be sending on it
            connection, self._socket, self._channel = self._socket, None, None
        if connection is not None:
            connection.close()

    def _reach(self, connection: socket.socket) -> None:
        """Connect without blocking: only then can an abort shut the socket down."""
        limit = min(self.timeout_s, _CONNECT_LIMIT_S)
        connection.setblocking(False)
        code = connection.connect_ex(self._its.store)
        if self._aborted and not self._matches:  # an abort before this has shut nothing down
            raise ConnectionAbortedError("this rank has left")
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

    def _failure(self, error: OSError) -> CollectiveError:
        host, port = self._its.store
        return CollectiveError(f"no answer from the rendezvous server at {host}:{port}: {error}")


def unreachable(addresses: Sequence[tuple[str, int]], limit_s: float = _PROBE_LIMIT_S) -> list[int]:
    """Return the indices of `addresses` that accept no connection.

    All are tried at the same time. Nothing is sent; a server drops such a connection.
    """

    def is_silent(address: tuple[str, int]) -> bool:
        try:
            socket.create_connection(address, limit_s).close()
        except OSError:
            return True
        return False

    with ThreadPoolExecutor(len(addresses) or 1) as probes:
        return [i for i, silent in enumerate(probes.map(is_silent, addresses)) if silent]
