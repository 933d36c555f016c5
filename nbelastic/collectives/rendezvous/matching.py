"""Client of the matching of operations at the rendezvous server of a generation.

See :mod:`nbelastic.collectives.rendezvous.matcher` for the messages.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from typing import TYPE_CHECKING

from nbelastic.collectives.rendezvous.client import open_connection
from nbelastic.collectives.rendezvous.handshake import PROOF_BYTES, AuthenticatedClient, read
from nbelastic.collectives.rendezvous.matcher import Message, decode, encode
from nbelastic.collectives.rendezvous.server import MATCHING, PURPOSE, VALUES, encode_body
from nbelastic.errors import CollectiveError

if TYPE_CHECKING:
    from nbelastic.collectives.communicator import Rendezvous
    from nbelastic.collectives.rendezvous.handshake import MessageChannel


class MatchingClient:
    """A rank's connection to the matching of its generation.

    One thread receives; any thread sends, also before there is a connection, and aborts.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._its = rendezvous
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._channel: MessageChannel | None = None
        self._unsent: list[Message] = []
        self._received: deque[Message] = deque()
        self._aborted = False
        self.timeout_s = rendezvous.timeout_s

    def connect(self) -> None:
        """Connect, and send what has been sent so far.

        Raises ``CollectiveError`` if the server cannot be reached, or there has been an abort.
        """
        its = self._its
        key = f"{its.job}/{its.generation}{MATCHING}"
        try:
            connection = open_connection(its)
            self._socket = connection
            client = AuthenticatedClient(connection, its.secret, PURPOSE)
            client.request(encode_body(key, its.rank, its.size, b""))
            reply = read(connection, len(VALUES))
            if reply != VALUES or not client.verifies(reply, read(connection, PROOF_BYTES)):
                raise ConnectionError("it does not belong to this job")
            connection.settimeout(None)
            with self._lock:
                self._channel = client.channel()
                for message in self._unsent:
                    connection.sendall(self._channel.encode(encode(message)))
                self._unsent = []
            if self._aborted:
                raise ConnectionAbortedError("this rank has left")
        except OSError as error:
            raise CollectiveError(f"no answer from the matching of operations: {error}") from None

    def send(self, message: Message) -> None:
        """Send a message; an unsent message is lost with the generation."""
        with self._lock:
            if self._channel is None or self._socket is None:
                self._unsent.append(message)
                return
            try:
                self._socket.sendall(self._channel.encode(encode(message)))
            except OSError:
                pass  # the receiving thread finds out

    def receive(self) -> Message:
        """Wait for a message. Raises ``CollectiveError`` if the connection has ended."""
        assert self._socket is not None
        assert self._channel is not None
        while not self._received:
            try:
                data = self._socket.recv(1 << 16)
                if not data:
                    raise ConnectionResetError("it closed the connection")
                self._received.extend(decode(body) for body in self._channel.take(data))
            except OSError as error:
                raise CollectiveError(f"the matching of operations has ended: {error}") from None
        return self._received.popleft()

    @property
    def has_received(self) -> bool:
        """Whether :meth:`receive` would return at once."""
        return bool(self._received)

    def abort(self) -> None:
        """End the connection, at once or when it has been made.

        A rank that leaves before is connected first: the others learn only then that it has gone.
        """
        self._aborted = True
        connection = self._socket
        if connection is not None and self._channel is not None:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it is closed

    def close(self) -> None:
        """Close the connection. The receiving thread calls it."""
        with self._lock:
            connection, self._socket, self._channel = self._socket, None, None
        if connection is not None:
            connection.close()
