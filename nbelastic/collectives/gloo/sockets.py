"""Cutting of a Gloo group's connections, so that stuck operations fail at once.

Gloo cannot cancel an operation: a group with a stopped or vanished peer would keep its buffers, as
large as a model, and its threads until the timeout. Shutting its connections down ends it.

The group's sockets are recognised by their addresses: a group listens on a port of its own, and
knows its peers' ports. Where several ranks share a process, as in tests, cutting one rank's
connections also cuts those among the others.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from nbelastic.system import LINUX

_Address = tuple[str, int]
_LENGTH = struct.Struct("@Q")
_DESCRIPTORS = "/proc/self/fd"  # Gloo does not give its descriptors out


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
    if not addresses or not LINUX:  # other systems have no such folder
        return None
    try:
        decoded = [_decode(address) for address in addresses]
    except (struct.error, ValueError, IndexError):
        return None
    return Endpoints(decoded[rank], frozenset(decoded[:rank] + decoded[rank + 1 :]))


def cut_connections(endpoints: Endpoints) -> int:
    """Shut down all connections of a group; return their number.

    Listening sockets are left alone, because Gloo ends the process when its own is shut down.
    """
    try:
        names = os.listdir(_DESCRIPTORS)
    except OSError:
        return 0  # no descriptor is left to read the folder with
    count = 0
    for name in names:
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            # Other threads may close and reuse the number at any time: a duplicate stays the same.
            duplicate = socket.fromfd(int(name), socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            continue  # closed meanwhile, or the descriptor that listed the folder
        with duplicate:
            if _belongs(duplicate, endpoints):
                count += 1
                with contextlib.suppress(OSError):  # the peer has closed it
                    duplicate.shutdown(socket.SHUT_RDWR)  # closing it would only end the duplicate
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


def _belongs(connection: socket.socket, endpoints: Endpoints) -> bool:
    """Whether a socket, of any family, is a connection of the group."""
    try:
        remote, local = connection.getpeername(), connection.getsockname()
    except OSError:
        return False  # it is not connected
    return _plain(remote) in endpoints.peers or _plain(local) == endpoints.own


def _plain(address: object) -> _Address | None:
    if not (isinstance(address, tuple) and isinstance(address[0], str)):
        return None  # of another family
    return address[0].removeprefix("::ffff:"), address[1]  # IPv4 over an IPv6 socket
