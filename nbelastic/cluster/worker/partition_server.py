"""Serve partitions of Dask collections to the processes of ranks.

Runs in a worker: requests are taken in its event loop, and answered by one thread. A partition is
written into memory that the rank maps: its arrays as they are (pickle 5, out of band), so they are
copied once.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import cloudpickle

from nbelastic.cluster.dask_compat import key_of, value_of

if TYPE_CHECKING:
    from distributed import Worker

REQUEST_BYTES = 1 << 16
ALIGNMENT = 64
"""Of buffers in the memory that is shared, in bytes."""

_MISSING = object()


class PartitionServer:
    """Server of one rank's requests, on the worker's end of their socket."""

    def __init__(self, worker: Worker, channel: socket.socket) -> None:
        self._worker = worker
        self._channel = channel
        self._threads: ThreadPoolExecutor | None = None
        self._loop = asyncio.get_running_loop()
        channel.setblocking(False)
        self._loop.add_reader(channel, self._take)

    def close(self) -> None:
        """Take no more requests. The thread ends after the one under way."""
        self._loop.remove_reader(self._channel)
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _take(self) -> None:
        try:
            request = self._channel.recv(REQUEST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            request = b""
        if not request:
            self._loop.remove_reader(self._channel)  # the rank has ended
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "nbelastic-partitions")
        self._threads.submit(self._answer, request.decode(), self._channel.dup())

    def _answer(self, text: str, channel: socket.socket) -> None:
        with channel:
            channel.setblocking(True)
            try:
                memory, sizes = _written(self._value(key_of(text)))
                answer: dict[str, Any] = {"sizes": sizes}
            except Exception as error:  # what computing it again has raised
                memory, sizes = _written(error)
                answer = {"sizes": sizes, "failed": True}
            try:
                socket.send_fds(channel, [json.dumps(answer).encode()], [memory])
            except OSError:
                pass  # the rank has ended
            finally:
                os.close(memory)

    def _value(self, key: Any) -> Any:
        """Return the value of a key from this worker's memory, else from another's.

        If no worker has it any more, Dask computes it again, and this waits for it.
        """
        found = self._worker.data.get(key, _MISSING)
        if found is not _MISSING:
            return found
        return value_of(self._worker._get_client(), key)


def _written(value: Any) -> tuple[int, list[int]]:
    """Write a value into memory that has a descriptor; return that, and the sizes of its parts."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    except Exception:  # a class of the notebook
        buffers.clear()
        head = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(head), *(each.raw() for each in buffers)]
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create("nbelastic-partition")
    else:
        memory, name = tempfile.mkstemp()
        os.unlink(name)
    offset = 0
    try:
        for part in parts:
            done = 0
            while done < part.nbytes:
                done += os.pwrite(memory, part[done:], offset + done)
            offset += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
    except BaseException:
        os.close(memory)
        raise
    return memory, [part.nbytes for part in parts]
