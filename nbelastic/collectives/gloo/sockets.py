"""Cutting of a Gloo group's connections, so that stuck operations fail at once.

Gloo cannot cancel an operation: a group with a stopped or vanished peer would keep its buffers, as
large as a model, and its threads until the timeout. Shutting its connections down ends it.

The group's sockets are recognised by their addresses: a group listens on a port of its own, and
knows its peers' ports. Where several ranks share a process, as in tests, cutting one rank's
connections also cuts those among the others.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbelastic.system import LINUX

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_Address = tuple[str, int]
_LENGTH = struct.Struct("@Q")
_DESCRIPTORS = "/proc/self/fd"


@dataclass(frozen=True)
class Endpoints:
    """Listening addresses of a group.

    `own` is the local end of connections that peers have made, `peers` are the remote ends of those
    that this rank has made.
    """

    own: _Address
    peers: frozenset[_Address]


def endpoints_of(addresses: Sequence[bytes], rank: int) -> Endpoints | None:
    """Read a group's endpoints from the addresses that its ranks have exchanged.

    Returns None before the exchange, and for addresses of an unknown form, as on another system or
    with another version of Gloo. Then no connection can be cut, and a stuck operation lasts until
    its timeout.
    """
    if not addresses or not LINUX:
        return None
    try:
        decoded = [_decode(address) for address in addresses]
    except (struct.error, ValueError, IndexError):
        return None
    return Endpoints(decoded[rank], frozenset(decoded[:rank] + decoded[rank + 1 :]))


def cut_connections(endpoints: Endpoints) -> int:
    """Shut down all connections of a group; return their number.

    Other threads may close and reuse descriptors at any time. So a socket that matches is
    duplicated, the duplicate is checked again, and shut down: whatever happens to the number
    meanwhile, the duplicate stays what it is. Listening sockets are left alone, because Gloo ends
    the process when its own is shut down.
    """
    count = 0
    for descriptor in _sockets():
        if not _belongs(descriptor, endpoints):
            continue
        try:
            duplicate = os.dup(descriptor)
        except OSError:
            continue  # its owner has closed it
        try:
            if _belongs(duplicate, endpoints):
                _shut_down(duplicate)
                count += 1
        finally:
            os.close(duplicate)
    return count


def _decode(value: bytes) -> _Address:
    """Return a rank's address from Gloo's encoding.

    That is: length of a host name, the name, length of an address, a ``sockaddr``, and more.
    """
    (length,) = _LENGTH.unpack_from(value)
    start = 2 * _LENGTH.size + length
    (family,) = struct.unpack_from("@H", value, start)
    (port,) = struct.unpack_from("!H", value, start + 2)
    if port == 0:
        raise ValueError("no port")
    if family == socket.AF_INET:
        return socket.inet_ntop(family, value[start + 4 : start + 8]), port
    if family == socket.AF_INET6:
        return socket.inet_ntop(family, value[start + 8 : start + 24]), port
    raise ValueError(f"address family {family}")


def _sockets() -> Iterator[int]:
    try:
        names = os.listdir(_DESCRIPTORS)
    except OSError:
        return  # no descriptor is left to read the folder with
    for name in names:
        descriptor = int(name)
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                yield descriptor
        except OSError:
            continue  # closed meanwhile, or the descriptor that listed the folder


def _belongs(descriptor: int, endpoints: Endpoints) -> bool:
    """Return whether `descriptor` is a connection of the group. It may be anything by now."""
    try:
        candidate = socket.socket(fileno=descriptor)
    except OSError:
        return False
    try:
        if candidate.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        remote, local = candidate.getpeername(), candidate.getsockname()  # raises if not connected
        if not isinstance(remote, tuple) or not isinstance(local, tuple):
            return False  # a socket of another family by now
        return _plain(remote) in endpoints.peers or _plain(local) == endpoints.own
    except OSError:
        return False
    finally:
        candidate.detach()


def _plain(address: tuple[str, int]) -> _Address:
    return address[0].removeprefix("::ffff:"), address[1]


def _shut_down(descriptor: int) -> None:
    connection = socket.socket(fileno=descriptor)
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the peer has closed it
    finally:
        connection.detach()
