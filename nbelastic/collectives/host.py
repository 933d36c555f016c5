"""How the ranks of one host come to share a segment.

Each rank opens a *door*, a listening socket whose name nobody can guess and which cannot be reached
from outside the host. The lowest rank makes the segment, and the others come to its door: whoever
knows the job's secret, and is of the same user, gets the segment's descriptor. The segment has no
other name, so who has it is on that host.

The sockets stay: when one closes, a process is gone (:meth:`Share.watch`).

Strangers are turned away and keep nobody waiting. Everything ends within
:data:`FORMING_LIMIT_S`, or at once if another thread shuts the door: what is waited for are
sockets, which are shut down.

What is said, all numbers in network order::

    host to guest   magic, nonce
    guest to host   rank within the host, nonce; proof
    host to guest   proof, with the descriptor
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import struct
import time
from typing import TYPE_CHECKING

from nbelastic.collectives.proof import NONCE_BYTES, PROOF_BYTES, proof, proves
from nbelastic.collectives.visit import read
from nbelastic.native import core

if TYPE_CHECKING:
    from nbelastic.collectives.communicator import Rendezvous
    from nbelastic.native._core import Group

__all__ = ["Door", "NotFormed", "Share"]

FORMING_LIMIT_S = 10.0
"""How long it may take. They met at the store a moment ago; it takes a millisecond."""

GREETING = struct.Struct(f"!4s{NONCE_BYTES}s")
REQUEST = struct.Struct(f"!I{NONCE_BYTES}s{PROOF_BYTES}s")
MAGIC = b"nbh1"
ASK, REPLY = "segment request", "segment reply"
_CREDENTIALS = struct.Struct("@3i")


class NotFormed(Exception):
    """The ranks of this host do not share a segment, and why."""


class Share:
    """A rank's part in a segment, and its connections to the others.

    Attributes
    ----------
    group : Group
        The segment, mapped.
    """

    def __init__(self, group: Group, peers: dict[int, socket.socket]) -> None:
        self.group = group
        self._peers = peers

    def watch(self) -> None:
        """Have the segment break when a process is gone, from here on."""
        peers, self._peers = self._peers, {}
        self.group.watch([(rank, connection.detach()) for rank, connection in peers.items()])

    def drop(self) -> None:
        """Let go of it."""
        for connection in self._peers.values():
            connection.close()
        self._peers = {}
        self.group.close()


class Door:
    """The socket on which a rank meets the others of its host.

    Parameters
    ----------
    rendezvous : Rendezvous
        Which generation, and its secret.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.name = f"nbelastic-{secrets.token_hex(16)}"
        self._its = rendezvous
        self._shut = False
        self._sockets: list[socket.socket] = []
        self._listener = self._socket()
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(128)

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let nobody in any more, nor anybody wait. What has been shared stays."""
        self._listener.close()

    def shut(self) -> None:
        """Make what is under way, or to come, fail. Any thread may call it."""
        self._shut = True
        for each in list(self._sockets):
            with contextlib.suppress(OSError):  # not connected, or closed by now
                each.shutdown(socket.SHUT_RDWR)

    def receive(self, size: int) -> Share:
        """Make a segment for so many ranks and give it to the others."""
        try:
            descriptor = core.create(size)
            try:
                group = core.Group(descriptor, 0, size, self._its.timeout_s)
                try:
                    return Share(group, _Reception(self, descriptor, size).hold())
                except BaseException:
                    group.close()
                    raise
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise NotFormed(str(error)) from None

    def visit(self, name: str, rank: int, size: int) -> Share:
        """Come to the door of that name, as this rank of the host, and take part in a segment."""
        connection = self._socket()
        try:
            connection.settimeout(min(FORMING_LIMIT_S, self._its.timeout_s))
            connection.connect(f"\0{name}")
            descriptor = self._ask(connection, name, rank)
            try:
                group = core.Group(descriptor, rank, size, self._its.timeout_s)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            connection.close()
            raise NotFormed(f"the first rank of its host: {error}") from None
        except BaseException:
            connection.close()
            raise
        self._sockets.remove(connection)
        return Share(group, {0: connection})

    def _socket(self) -> socket.socket:
        """Return a new socket, which is shut down when the door is."""
        new = socket.socket(socket.AF_UNIX)
        self._sockets.append(new)
        if self._shut:
            new.close()
        return new

    def _ask(self, connection: socket.socket, name: str, rank: int) -> int:
        """Return the segment's descriptor, from one who knows the secret."""
        if not _is_own(connection):
            raise PermissionError("it is another user's")
        magic, challenge = GREETING.unpack(read(connection, GREETING.size))
        if magic != MAGIC:
            raise ConnectionError("it speaks another language")
        nonce = secrets.token_bytes(NONCE_BYTES)
        said = _request(self._its, name, challenge, rank, nonce)
        connection.sendall(REQUEST.pack(rank, nonce, said))
        answer, descriptors, _, _ = socket.recv_fds(
            connection, PROOF_BYTES, 1, socket.MSG_CMSG_CLOEXEC
        )
        if len(descriptors) == 1 and proves(answer, self._its.secret, REPLY, nonce, name.encode()):
            return descriptors[0]
        for each in descriptors:
            os.close(each)
        raise ConnectionError("it hung up" if not answer else "it does not belong to this job")


class _Guest:
    """Who has come to the door, and what they have said."""

    def __init__(self) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.said = b""
        self.rank: int | None = None


class _Reception:
    """What the first rank of a host does at its door, until all others have the segment."""

    def __init__(self, door: Door, descriptor: int, size: int) -> None:
        self._door = door
        self._listener = door._listener
        self._its = door._its
        self._descriptor = descriptor
        self._missing = set(range(1, size))
        self._guests: dict[socket.socket, _Guest] = {}

    def hold(self) -> dict[int, socket.socket]:
        """Return the connections to all other ranks of the host."""
        deadline = time.monotonic() + min(FORMING_LIMIT_S, self._its.timeout_s)
        self._listener.setblocking(False)
        peers: dict[int, socket.socket] = {}
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._listener, selectors.EVENT_READ)
                while self._missing:
                    if self._door._shut:  # accepting does not tell
                        raise ConnectionAbortedError("this rank has left")
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise TimeoutError(f"{len(self._missing)} of its host did not come")
                    for key, _ in selector.select(left):
                        if key.fileobj is self._listener:
                            self._admit(selector)
                        elif not self._hear(key.data, self._guests[key.data]):
                            selector.unregister(key.data)
                            self._guests.pop(key.data)
                            key.data.close()
            admitted = [(guest.rank, each) for each, guest in self._guests.items()]
            peers = {rank: connection for rank, connection in admitted if rank is not None}
            return peers
        finally:
            for connection in self._guests.keys() - peers.values():
                connection.close()

    def _admit(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        connection.setblocking(False)
        guest = _Guest()
        try:
            if not _is_own(connection):
                raise PermissionError
            connection.sendall(GREETING.pack(MAGIC, guest.nonce))
        except OSError:
            connection.close()
            return
        self._guests[connection] = guest
        selector.register(connection, selectors.EVENT_READ, connection)

    def _hear(self, connection: socket.socket, guest: _Guest) -> bool:
        """Take in what a guest says; return whether it may stay."""
        try:
            data = connection.recv(4096)
        except OSError:
            data = b""
        if guest.rank is not None:
            raise ConnectionError(f"the rank in place {guest.rank} of its host is gone")
        guest.said += data
        if not data or len(guest.said) > REQUEST.size:
            return False
        return len(guest.said) < REQUEST.size or self._answer(connection, guest)

    def _answer(self, connection: socket.socket, guest: _Guest) -> bool:
        rank, nonce, given = REQUEST.unpack(guest.said)
        expected = _request(self._its, self._door.name, guest.nonce, rank, nonce)
        if not secrets.compare_digest(given, expected) or rank not in self._missing:
            return False
        answer = proof(self._its.secret, REPLY, nonce, self._door.name.encode())
        socket.send_fds(connection, [answer], [self._descriptor])
        guest.rank = rank
        self._missing.remove(rank)
        return True


def _request(its: Rendezvous, name: str, challenge: bytes, rank: int, nonce: bytes) -> bytes:
    """Return the proof that goes with a request."""
    generation = f"{its.job}/{its.generation}/{rank}"
    return proof(its.secret, ASK, challenge, nonce, name.encode(), generation.encode())


def _is_own(connection: socket.socket) -> bool:
    """Return whether the other end of a connection is this user's."""
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(said)[1] == os.getuid())
