"""Handing a segment's descriptor from the lowest rank of a host to the others.

Each rank opens a Unix socket with an unguessable name that cannot be reached from outside the host.
The lowest rank creates the segment. The others connect to its socket, and receive the descriptor if
they know the job's secret and belong to the same user. The segment has no other name, so a rank
that has it is on that host. The connections stay open: the end of one is the death of a process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time
from typing import TYPE_CHECKING

from nbelastic.collectives.rendezvous.handshake import (
    PROOF_BYTES,
    AuthenticatedClient,
    AuthenticatingListener,
)
from nbelastic.native import core

if TYPE_CHECKING:
    from nbelastic.collectives.communicator import Rendezvous
    from nbelastic.collectives.rendezvous.handshake import ServerConnection
    from nbelastic.native._core import Group

FORMING_LIMIT_S = 10.0
"""Limit for sharing a segment. All ranks have just been at the rendezvous; it takes 1 ms."""

_LOCAL_RANK = struct.Struct("!I")
_CREDENTIALS = struct.Struct("@3i")


class SegmentError(Exception):
    """The ranks of this host do not share a segment; the message says why."""


class SharedSegment:
    """A segment, mapped, and this rank's connections to the other ranks of its host."""

    def __init__(self, group: Group, peers: dict[int, socket.socket]) -> None:
        self.group = group
        self._peers = peers

    def watch(self) -> None:
        """Break the segment when a peer's process ends, from here on."""
        peers, self._peers = self._peers, {}
        self.group.watch([(rank, connection.detach()) for rank, connection in peers.items()])

    def close(self) -> None:
        """Leave the segment."""
        for connection in self._peers.values():
            connection.close()
        self._peers = {}
        self.group.close()


class SegmentSocket:
    """The socket at which a rank shares a segment with the ranks of its host, by its `name`."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.name = f"nbelastic-{secrets.token_hex(16)}"
        self._its = rendezvous
        self._aborted = False
        self._sockets: list[socket.socket] = []
        self._listener = self._socket()
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(128)

    def __enter__(self) -> SegmentSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening. Segments that are shared stay."""
        self._listener.close()

    def abort(self) -> None:
        """Fail calls under way and to come. Any thread may call this."""
        self._aborted = True
        for each in list(self._sockets):
            with contextlib.suppress(OSError):  # not connected, or closed by now
                each.shutdown(socket.SHUT_RDWR)

    def create(self, size: int) -> SharedSegment:
        """Create a segment for `size` ranks and hand it to all."""
        try:
            descriptor = core.create(size)
            try:
                group = core.Group(descriptor, 0, size, self._its.timeout_s)
                try:
                    return SharedSegment(group, self._hand_over(descriptor, size))
                except BaseException:
                    group.close()
                    raise
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise SegmentError(str(error)) from None

    def join(self, name: str, local_rank: int, size: int) -> SharedSegment:
        """Receive a segment of `size` ranks at the socket `name` of the lowest one."""
        connection = self._socket()
        try:
            connection.settimeout(min(FORMING_LIMIT_S, self._its.timeout_s))
            connection.connect(f"\0{name}")
            descriptor = self._receive(connection, name, local_rank)
            try:
                group = core.Group(descriptor, local_rank, size, self._its.timeout_s)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            connection.close()
            raise SegmentError(f"the lowest rank of its host: {error}") from None
        except BaseException:
            connection.close()
            raise
        self._sockets.remove(connection)
        return SharedSegment(group, {0: connection})

    def _socket(self) -> socket.socket:
        """Return a new socket, which an abort shuts down."""
        new = socket.socket(socket.AF_UNIX)
        self._sockets.append(new)
        if self._aborted:
            new.close()
        return new

    def _purpose(self, name: str) -> str:
        return f"segment {name} {self._its.job}/{self._its.generation}"

    def _hand_over(self, descriptor: int, size: int) -> dict[int, socket.socket]:
        """Send the descriptor to all other ranks of the host, and return their connections."""
        deadline = time.monotonic() + min(FORMING_LIMIT_S, self._its.timeout_s)
        self._listener.setblocking(False)
        peers: dict[int, ServerConnection] = {}
        purpose = self._purpose(self.name)
        with AuthenticatingListener(
            self._listener, self._its.secret, purpose, accepts=_is_own
        ) as connections:
            while len(peers) < size - 1:
                if self._aborted:  # the listener only becomes readable
                    raise ConnectionAbortedError("this rank has left")
                left = deadline - time.monotonic()
                if left <= 0:
                    missing = size - 1 - len(peers)
                    raise TimeoutError(f"{missing} ranks of its host did not connect in time")
                for connection, body in connections.poll(left) or ():
                    if body is None:
                        gone = [rank for rank, each in peers.items() if each is connection]
                        raise ConnectionError(f"local rank {gone[0]} has closed its connection")
                    rank = _LOCAL_RANK.unpack(body)[0] if len(body) == _LOCAL_RANK.size else 0
                    if rank in peers or not 0 < rank < size:
                        connections.close(connection)
                        continue
                    connection.reply(b"", [descriptor])
                    peers[rank] = connection
            return {rank: connections.release(each) for rank, each in peers.items()}

    def _receive(self, connection: socket.socket, name: str, local_rank: int) -> int:
        """Return the segment's descriptor, from a rank that knows the secret."""
        if not _is_own(connection):
            raise PermissionError("its socket belongs to another user")
        client = AuthenticatedClient(connection, self._its.secret, self._purpose(name))
        client.request(_LOCAL_RANK.pack(local_rank))
        given, descriptors, _, _ = socket.recv_fds(
            connection, PROOF_BYTES, 1, socket.MSG_CMSG_CLOEXEC
        )
        if len(descriptors) == 1 and client.verifies(b"", given):
            return descriptors[0]
        for each in descriptors:
            os.close(each)
        raise ConnectionError(
            "it does not belong to this job" if given else "it closed the connection"
        )


def _is_own(connection: socket.socket) -> bool:
    """Return whether the process at the other end of a connection belongs to this user."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(peer)[1] == os.getuid())
