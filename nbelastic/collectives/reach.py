"""Whether other ranks can be reached at all, as far as the network is concerned."""

from __future__ import annotations

import selectors
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["unreachable"]

LIMIT_S = 1.5
"""How long an answer may take: one packet that gets lost is sent again after a second."""


def unreachable(addresses: Sequence[tuple[str, int]], limit_s: float = LIMIT_S) -> list[int]:
    """Return which of `addresses` take no connection, by their places in the sequence.

    All are tried at the same time. Nothing is sent; where a store listens, it takes this for
    somebody who thinks better of it.
    """
    silent = set(range(len(addresses)))
    deadline = time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        for place, address in enumerate(addresses):
            _begin(selector, place, address)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                selector.unregister(key.fileobj)
                with key.data[1] as connection:
                    if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                        silent.discard(key.data[0])
        for key in list(selector.get_map().values()):
            key.data[1].close()
    return sorted(silent)


def _begin(selector: selectors.BaseSelector, place: int, address: tuple[str, int]) -> None:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        connection.connect(address)
    except BlockingIOError:
        pass  # under way
    except OSError:
        connection.close()  # no route, or refused at once
        return
    selector.register(connection, selectors.EVENT_WRITE, (place, connection))
