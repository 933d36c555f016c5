"""Fetch partitions of Dask collections from the rank's worker.

Any thread may fetch.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import socket
import threading
from typing import Any

from nbelastic.cluster.worker.partition_server import ALIGNMENT

ANSWER_BYTES = 1 << 18


class PartitionFetcher:
    """Fetches partitions from the worker's memory, by the descriptor of their socket."""

    def __init__(self, descriptor: int) -> None:
        self._channel = socket.socket(fileno=descriptor)
        self._lock = threading.Lock()

    def __call__(self, text: str) -> Any:
        """Return the value of a key, which is given as JSON.

        LookupError: the scheduler has forgotten it. What computing it again raises is raised here.
        """
        with self._lock:
            self._channel.send(text.encode())
            data, (memory, *_), _, _ = socket.recv_fds(
                self._channel, ANSWER_BYTES, 1, getattr(socket, "MSG_CMSG_CLOEXEC", 0)
            )
        answer = json.loads(data)
        value = _read(memory, answer["sizes"])
        if answer.get("failed"):
            raise value
        return value


def _read(memory: int, sizes: list[int]) -> Any:
    places, end = [], 0
    for size in sizes:
        places.append((end, size))
        end += -(-size // ALIGNMENT) * ALIGNMENT
    end = sum(places[-1])
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    try:
        view = memoryview(mmap.mmap(memory, end, flags))
    finally:
        os.close(memory)
    parts = [view[start : start + size] for start, size in places]
    return pickle.loads(parts[0], buffers=parts[1:])
