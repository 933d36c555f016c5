"""Whether a worker is cut off from the scheduler, as its own machine knows.

Who is cut off hears nothing, but so does everybody while the scheduler is busy, and in a notebook's
``LocalCluster`` it is whenever a cell is. What tells the two apart is who acknowledges packets: the
kernel of the scheduler's machine, whatever its processes do.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

__all__ = ["LIMIT", "Tether", "unanswered"]

LIMIT = 10.0
"""Seconds without an answer after which a worker counts as cut off."""

# Linux's struct tcp_info: eight bytes, then numbers of four.
_INFO = struct.Struct("=8x13I")
_UNACKED, _LAST_ACK_MS = 4, 12


class Tether:
    """Looks at a worker's connection to the scheduler, at each heartbeat."""

    def __init__(self) -> None:
        self._silent = False

    def lost(self, comm: Any) -> bool:
        """Return whether the other end of a connection of Dask's has not answered for too long.

        It takes two looks in a row: at the first, what is unanswered may have been sent just now,
        after a pause.
        """
        before, self._silent = self._silent, unanswered(comm) >= LIMIT
        return before and self._silent


def unanswered(comm: Any) -> float:
    """Return for how many seconds nothing has been acknowledged, if anything should have been.

    It is 0 where that cannot be known: on other systems, over other connections than TCP.
    """
    connection = getattr(getattr(comm, "stream", None), "socket", None)
    if not isinstance(connection, socket.socket) or not hasattr(socket, "TCP_INFO"):
        return 0.0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    except OSError:
        return 0.0  # closed meanwhile; Dask notices by itself
    numbers = _INFO.unpack(info)
    return numbers[_LAST_ACK_MS] / 1000 if numbers[_UNACKED] else 0.0
