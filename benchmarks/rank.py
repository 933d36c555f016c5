"""A rank of a crew: carries out orders, and sleeps otherwise (see benchmarks.side_by_side)."""

from __future__ import annotations

import importlib
import os
import queue
import socket
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.side_by_side import Failed


def main(kind: str, address: str, number: str = "") -> None:
    # Ranks that mpiexec starts have the same command line. This variable differs.
    rank = int(number or os.environ["PMI_RANK"])
    with socket.socket(socket.AF_UNIX) as own:
        own.connect(address)
        connection = Connection(own.detach())
    connection.send(rank)
    size = connection.recv()
    orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=listen, args=(connection, orders), daemon=True).start()
    member: Any = None
    while (order := orders.get()) is not None:
        what, arguments, moment = order
        error, answer = "", None
        try:
            if what == "__init__":
                module, _, name = kind.partition(":")
                member = getattr(importlib.import_module(module), name)(rank, size, *arguments)
            else:
                answer = carry_out(getattr(member, what), arguments, moment)
        except Exception as problem:  # the process that gave the order handles it
            error = str(problem)
            if not isinstance(problem, Failed):
                error += "\n" + traceback.format_exc()
        connection.send((error, answer))
    if member is not None:
        member.close()


def carry_out(method: Any, arguments: tuple[object, ...], moment: float | None) -> Any:
    """Return the result of `method`; if it is to begin at a moment, the moment of its end."""
    if moment is None:
        return method(*arguments)
    time.sleep(max(0.0, moment - time.monotonic()))
    method(*arguments)
    return time.monotonic()


def listen(connection: Connection, orders: queue.SimpleQueue[Any]) -> None:
    order: Any = ()
    while order is not None:
        try:
            order = connection.recv()
        except (EOFError, OSError):
            os._exit(1)  # no orders can come, and the rank may hang in a collective
        orders.put(order)


if __name__ == "__main__":
    main(*sys.argv[1:])
