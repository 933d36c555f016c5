"""Handing a segment's descriptor from the lowest rank of a host to the others.

Each rank opens a Unix socket with an unguessable name that cannot be reached from outside the host.
The lowest rank creates the segment. The others connect to its socket, and receive the descriptor if
they know the job's secret and belong to the same user. The segment has no other name, so a rank
that has it is on that host.
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
    LENGTH,
    PROOF_BYTES,
    AuthenticatingListener,
    open_channel,
)
from nbelastic.native import core

if TYPE_CHECKING:
    from nbelastic.collectives.communicator import Rendezvous
    from nbelastic.native._core import Group

FORMING_LIMIT_S = 10.0
"""Limit for sharing a segment. All ranks have just been at the rendezvous; it takes 1 ms."""

_LOCAL_RANK = struct.Struct("!I")
_CREDENTIALS = struct.Struct("@3i")


class SegmentError(Exception):
    """The ranks of this host do not share a segment; the message says why."""


class SegmentSocket:
    """The socket at which a rank shares a segment with the ranks of its host, by its `name`."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.name = f"nbelastic-{secrets.token_hex(16)}"  # all jobs of a host share the names
        self._its = rendezvous
        self._aborted = False
        self._sockets: list[socket.socket] = []
        self._listener = self._socket()
        self._listener.bind(f"\0{self.name}")  # abstract: no file stays behind when the rank dies
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
        self._aborted = True  # first: `_socket` adds a socket, then reads this
        for each in list(self._sockets):  # a copy: the rank's thread may add sockets
            with contextlib.suppress(OSError):  # not connected, or closed by now
                each.shutdown(socket.SHUT_RDWR)  # closing would wake no waiting thread

    def create(self, size: int) -> Group:
        """Create a segment for `size` ranks and hand it to all."""
        try:
            with contextlib.ExitStack() as stack:
                descriptor = core.create(size)
                stack.callback(os.close, descriptor)  # the group has a duplicate
                group = core.Group(descriptor, 0, size, self._its.timeout_s)
                failed = stack.enter_context(contextlib.ExitStack())
                failed.callback(group.close)  # ranks that have received it must not wait in it
                self._hand_over(descriptor, size)
                failed.pop_all()
                return group
        except (OSError, ValueError) as error:
            raise SegmentError(str(error)) from None

    def join(self, name: str, local_rank: int, size: int) -> Group:
        """Receive a segment of `size` ranks at the socket `name` of the lowest one."""
        try:
            with self._socket() as connection:
                connection.settimeout(min(FORMING_LIMIT_S, self._its.timeout_s))
                connection.connect(f"\0{name}")
                descriptor = self._receive(connection, name, local_rank)
            try:
                return core.Group(descriptor, local_rank, size, self._its.timeout_s)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise SegmentError(f"the lowest rank of its host: {error}") from None

    def _socket(self) -> socket.socket:
        """Return a new socket, which an abort shuts down."""
        new = socket.socket(socket.AF_UNIX)
        self._sockets.append(new)
        if self._aborted:  # the abort may not have seen the new socket
            new.close()  # so that every call on it fails
        return new

    def _purpose(self, name: str) -> str:
        # With the name, so that a proof holds for one segment only.
        return f"segment {name} {self._its.job}/{self._its.generation}"

    def _hand_over(self, descriptor: int, size: int) -> None:
        """Send the descriptor to all other ranks of the host."""
        deadline = time.monotonic() + min(FORMING_LIMIT_S, self._its.timeout_s)
        self._listener.setblocking(False)  # `accept` must not wait past the deadline
        missing = set(range(1, size))
        purpose = self._purpose(self.name)
        with AuthenticatingListener(
            self._listener, self._its.secret, purpose, accepts=_is_own
        ) as connections:
            while missing:
                if self._aborted:  # the listener only becomes readable
                    raise ConnectionAbortedError("this rank has left")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"{len(missing)} ranks of its host did not connect in time")
                for connection, body in connections.poll(left) or ():
                    if body is None:  # the end of a rank that has the descriptor
                        continue
                    rank = _LOCAL_RANK.unpack(body)[0] if len(body) == _LOCAL_RANK.size else 0
                    if rank in missing:
                        connection.send(b"", [descriptor])
                        missing.remove(rank)
                    else:  # it knows the secret, and yet is none of those that are awaited
                        connections.close(connection)

    def _receive(self, connection: socket.socket, name: str, local_rank: int) -> int:
        """Return the segment's descriptor, from a rank that knows the secret."""
        if not _is_own(connection):
            raise PermissionError("its socket belongs to another user")
        channel = open_channel(connection, self._its.secret, self._purpose(name))
        channel.send(_LOCAL_RANK.pack(local_rank))
        # Read before the proof is checked: the kernel drops descriptors that are not read.
        given, descriptors, _, _ = socket.recv_fds(
            connection, LENGTH.size + PROOF_BYTES, 1, socket.MSG_CMSG_CLOEXEC
        )
        with contextlib.suppress(PermissionError):
            if len(descriptors) == 1 and channel.take(given):
                return descriptors[0]
        for each in descriptors:
            os.close(each)  # the kernel has installed it in this process already
        raise ConnectionError(
            "it does not belong to this job" if given else "it closed the connection"
        )


def _is_own(connection: socket.socket) -> bool:
    """Return whether the process at the other end of a connection belongs to this user."""
    # Filled in by the kernel, so a peer cannot claim to be another user.
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(peer)[1] == os.getuid())
