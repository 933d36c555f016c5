"""Exchange messages between a worker and the process of its rank.

The channel is a pair of Unix sockets. A frame is the length of a message and the message, as
:func:`~nbelastic.messages.encode` writes it. The first frame to a rank is its
:class:`RankSetup`, pickled.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbelastic.cluster.wire import HEARTBEAT_INTERVAL_S
from nbelastic.messages import AnyMessage, JobPayload, Message, RankEvent, decode, encode
from nbelastic.system import LINUX

if TYPE_CHECKING:
    from nbelastic.elastic.ranks.runtime import RankSpec

HEADER = struct.Struct("=Q")  # length of the frame that follows


@dataclass(frozen=True)
class RankSetup:
    """What a worker gives its rank at the start."""

    spec: RankSpec
    payload: JobPayload
    environment: Mapping[str, str]  # the worker's, as the next two
    directory: str
    path: tuple[str, ...]
    threads: int  # that the rank is to compute with
    scheduler: str  # address of Dask's scheduler
    security: Any  # of connections to it
    dask_config: bytes  # the worker's, pickled; empty if it does not pickle
    scratch: str = ""  # a directory, if it exists, that the worker deletes at the process's end


def frame(data: bytes) -> bytes:
    """Return a frame of `data`."""
    return HEADER.pack(len(data)) + data


class RankChannel:
    """A rank's end of its channel, served by threads to read and to send."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._file = self._socket.makefile("rb")
        self._process = os.getpid()
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sender: threading.Thread | None = None

    def start(self, take: Callable[[Message], None], beat: Callable[[], None]) -> None:
        """Begin to serve the channel; `beat` is called in the thread that sends."""
        for name, serve, act in (
            ("nbelastic-reader", self._serve_reader, take),
            ("nbelastic-sender", self._serve_sender, beat),
        ):
            self._sender = threading.Thread(target=serve, args=[act], name=name, daemon=True)
            self._sender.start()

    def send(self, message: Message) -> None:
        """Send a message without waiting; an event after all that was printed. Any thread."""
        if isinstance(message, RankEvent):
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # the user's own stream, or none
                    stream.flush()
        if os.getpid() == self._process:  # a fork is no rank
            self._waiting.put(frame(encode(message)))

    def close(self) -> None:
        """Wait until all is sent."""
        if self._sender is not None:
            self._waiting.put(None)
            self._sender.join()

    def _serve_sender(self, beat: Callable[[], None]) -> None:
        due = time.monotonic()
        while True:
            try:
                data = self._waiting.get(timeout=max(due - time.monotonic(), 0))
            except queue.Empty:
                due = time.monotonic() + HEARTBEAT_INTERVAL_S
                beat()
                continue
            if data is None:
                return
            with contextlib.suppress(OSError):  # the worker has ended, and ends this process
                self._socket.sendall(data)

    def _serve_reader(self, take: Callable[[Message], None]) -> None:
        while True:
            try:
                data = self.read()
            except OSError:  # the worker has ended
                # Its server, or the template, ends what this process has started, and waits until
                # multiprocessing's tracker has removed what is in shared memory.
                end = os.kill if LINUX else os.killpg
                end(os.getpid(), signal.SIGKILL)
            take(decode(data, AnyMessage))

    def read(self) -> bytes:
        """Wait for a message; ConnectionError: the worker has ended."""
        return self._exactly(*HEADER.unpack(self._exactly(HEADER.size)))

    def _exactly(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) < count:
            raise ConnectionError("the worker has closed the channel")
        return data
