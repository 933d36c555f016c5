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
from typing import Any

from nbelastic.system import LINUX

_LENGTH = struct.Struct("@Q")
_DESCRIPTORS = "/proc/self/fd"  # Gloo does not give its descriptors out


def addresses_of(encoded: Sequence[bytes]) -> list[tuple[str, int]]:
    """Return the listening addresses of a group's ranks, from Gloo's encoding.

    There are none before the exchange, nor of an unknown form, as on another system or with another
    version of Gloo. Then no connection can be cut, and a stuck operation lasts until its timeout.
    """
    try:
        return [_decode(each) for each in encoded] if LINUX else []
    except (struct.error, ValueError, IndexError):
        return []


def _decode(value: bytes) -> tuple[str, int]:
    """Return a rank's address from Gloo's encoding.

    That is: length of a host name, the name, length of an address, a ``sockaddr``, and more.
    """
    (length,) = _LENGTH.unpack_from(value)
    start = 2 * _LENGTH.size + length
    (family,) = struct.unpack_from("@H", value, start)
    (port,) = struct.unpack_from("!H", value, start + 2)
    places = {socket.AF_INET: slice(start + 4, start + 8)}
    places[socket.AF_INET6] = slice(start + 8, start + 24)
    if port == 0 or family not in places:
        raise ValueError(f"port {port} of address family {family}")
    return socket.inet_ntop(family, value[places[family]]), port


def cut_connections(addresses: Sequence[tuple[str, int]], rank: int) -> int:
    """Shut down all connections of a rank with its group; return their number.

    Listening sockets are left alone, because Gloo ends the process when its own is shut down.
    """
    peers = {*addresses[:rank], *addresses[rank + 1 :]}
    try:
        names = os.listdir(_DESCRIPTORS) if addresses else []
    except OSError:
        return 0  # no descriptor is left to read the folder with
    count = 0
    for name in names:
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            # Of sockets only: to close the duplicate of a file would give up locks of the file.
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            # Other threads may close and reuse the number at any time: a duplicate stays the same.
            with socket.fromfd(int(name), socket.AF_INET, socket.SOCK_STREAM) as duplicate:
                remote, local = duplicate.getpeername(), duplicate.getsockname()
                # Peers' listening addresses are remote where this rank has connected, else its own
                # is local.
                if _plain(remote) in peers or _plain(local) == addresses[rank]:
                    count += 1
                    duplicate.shutdown(socket.SHUT_RDWR)  # closing it would only end the duplicate
    return count


def _plain(address: Any) -> tuple[str, int] | None:
    """Return an address of IPv4 as such, also over an IPv6 socket; None of another family."""
    if not (isinstance(address, tuple) and isinstance(address[0], str)):
        return None
    return address[0].removeprefix("::ffff:"), address[1]
