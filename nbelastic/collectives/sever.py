"""Cutting the connections of one group, so that whatever is stuck in them fails at once.

Gloo offers no way to break off an operation: a group with a peer that is stopped, or whose host has
vanished, would keep its buffers, as large as a model, and its threads until the operation's
timeout. What does end it is to shut its connections down beneath it.

Which sockets of a process are the group's is read off their addresses: a group listens on a port
of its own, and knows those its peers listen on. Descriptors may be closed and used anew by other
threads at any time, so a socket that looks right is duplicated, the duplicate is looked at again,
and that is shut down: whatever happens to the number meanwhile, the duplicate stays what it is.
Listening sockets are left alone (Gloo ends the process when its own is shut down).

Where a process runs several ranks of a generation, as tests do, cutting one rank's connections cuts
those that the others have made among themselves. Their generation is over as well; but messages of
theirs may be under way, and where Gloo forgets one, it lasts until its timeout.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Ends", "ends_of", "sever"]

_Address = tuple[str, int]
_LENGTH = struct.Struct("@Q")
_DESCRIPTORS = "/proc/self/fd"


@dataclass(frozen=True)
class Ends:
    """Where the connections of a group end.

    Attributes
    ----------
    own : tuple of (str, int)
        What this rank listens on: the local end of connections that peers have made.
    peers : frozenset of (str, int)
        What the others listen on: the far end of connections that this rank has made.
    """

    own: _Address
    peers: frozenset[_Address]


def ends_of(addresses: Sequence[bytes], rank: int) -> Ends | None:
    """Read the ends of a group off what its ranks brought to their meeting.

    Returns None if they have not met; and where addresses are not what is expected, on another
    system or with another version of Gloo: then nothing can be severed, and what is stuck lasts
    until its timeout.
    """
    if not addresses or not sys.platform.startswith("linux"):
        return None
    try:
        decoded = [_decode(address) for address in addresses]
    except (struct.error, ValueError, IndexError):
        return None
    return Ends(decoded[rank], frozenset(decoded[:rank] + decoded[rank + 1 :]))


def sever(ends: Ends) -> int:
    """Shut down all connections of a group; return how many there were."""
    count = 0
    for descriptor in _sockets():
        if not _belongs(descriptor, ends):
            continue
        try:
            duplicate = os.dup(descriptor)
        except OSError:
            continue  # closed by its owner since
        try:
            if _belongs(duplicate, ends):
                _shut_down(duplicate)
                count += 1
        finally:
            os.close(duplicate)
    return count


def _decode(value: bytes) -> _Address:
    """Return the address in what a rank brought.

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
        return  # there is no descriptor left to read it with
    for name in names:
        descriptor = int(name)
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                yield descriptor
        except OSError:
            continue  # closed since, or the one that listed the folder


def _belongs(descriptor: int, ends: Ends) -> bool:
    """Return whether `descriptor` is a connection between `ends`. It may be anything by now."""
    try:
        looked_at = socket.socket(fileno=descriptor)
    except OSError:
        return False
    try:
        if looked_at.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        far, near = looked_at.getpeername(), looked_at.getsockname()  # or it is not connected
        if not isinstance(far, tuple) or not isinstance(near, tuple):
            return False  # a socket of another kind, by now
        return _plain(far) in ends.peers or _plain(near) == ends.own
    except OSError:
        return False
    finally:
        looked_at.detach()


def _plain(address: tuple[str, int]) -> _Address:
    return address[0].removeprefix("::ffff:"), address[1]


def _shut_down(descriptor: int) -> None:
    connection = socket.socket(fileno=descriptor)
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the peer was quicker
    finally:
        connection.detach()
