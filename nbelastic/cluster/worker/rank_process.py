"""Start, watch and end the processes of a worker's ranks.

A rank server (:mod:`.rank.server`) forks the processes, so that a rank starts in milliseconds and
has none of the worker's sockets, locks and threads.

============  ====================================================================================
a process is  then
============  ====================================================================================
requested     the server has its descriptors, and may still be importing torch
running       forked. It ends by returning, by a signal (its own, the worker's, the system's), or
              with the server
ended         reaped by the server, or lost with it. Its exit is known, its output complete
============  ====================================================================================

A rank ends with its server, by a death signal of the kernel. The server ends with the worker, by
the same and by the end of the control socket, and ends its ranks first. What a rank has started
ends with the rank, as far as it stays in the rank's process group. A server that has ended is
started anew for the next rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any, BinaryIO

import psutil

from nbelastic.cluster.process_state import ProcessState, process_id, read_state

from .rank.channel import HEADER, framed, read_message
from .rank.server import GROUP_LIMIT_S, MESSAGE_BYTES, signal_group
from .rank_exit import ProcessExit, out_of_memory_kills

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbelastic.messages import Message

METHOD = "fork" if sys.platform == "linux" else "spawn"
"""How ranks begin. Frameworks of macOS do not work in a fork."""

_CODE = "from nbelastic.cluster.worker.rank.server import main; main()"
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_STACK_BYTES = 1 << 16
_END_OF_CHANNEL = 1.0
"""Seconds that a process which has ended may take to have its channel closed by its children."""


class RankProcess:
    """Process of one rank, from the request to its end; made by :meth:`RankServer.launch`.

    `partitions` is the worker's end of the socket on which the rank asks for them.
    """

    def __init__(
        self,
        server: RankServer,
        number: int,
        take: Callable[[Message], None],
        output: Callable[[bytes], None],
    ) -> None:
        self.pid: int | None = None  # while it runs
        self.at_end: list[Callable[[], None]] = []  # called when it has ended
        self._server, self._number, self._take, self._output = server, number, take, output
        self._channel, self._theirs = socket.socketpair()
        self.partitions, self._asks = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._source, self._prints = os.pipe()
        os.set_blocking(self._source, False)
        self._crash: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - until it has ended
        self._kills = out_of_memory_kills()
        self._reason = ""
        self._exit: asyncio.Future[ProcessExit] = asyncio.get_running_loop().create_future()
        self._ending = False
        self._paused = False
        self._serving = asyncio.ensure_future(self._serve())
        self._writer: asyncio.StreamWriter | None = None
        self._unsent: list[bytes] = []
        server.loop.add_reader(self._source, self._print)

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self._exit.done()

    async def wait(self) -> ProcessExit:
        """Wait until it has ended; return how."""
        return await asyncio.shield(self._exit)

    def send(self, message: Message) -> None:
        """Send an order to the rank."""
        self.send_bytes(framed(message))

    def send_bytes(self, data: bytes) -> None:
        """Send a frame to the rank."""
        if self._writer is None:
            self._unsent.append(data)
        elif not self._ending:
            self._writer.write(data)

    def send_signal(self, number: int, reason: str = "") -> None:
        """Send a signal to the process and what it has started, unless it has ended.

        If this ends it, the `reason` explains that.
        """
        if not self.ended:
            self._reason = reason or self._reason
            self._server.signal_rank(self._number, number, self._reason)

    def pause_output(self, paused: bool) -> None:
        """Read no more of what it prints, or go on. It waits once the pipe is full."""
        if paused != self._paused and not self._ending:
            self._paused = paused
            if paused:
                self._server.loop.remove_reader(self._source)
            else:
                self._server.loop.add_reader(self._source, self._print)

    def state(self) -> ProcessState:
        """Return the state of the process, as the system has it."""
        try:
            return ProcessState("unknown") if self.pid is None else read_state(process_id(self.pid))
        except (psutil.Error, OSError):
            return ProcessState("gone")

    def memory(self) -> int:
        """Return how many bytes of memory the process has for itself."""
        try:
            found = None if self.pid is None else psutil.Process(self.pid).memory_info()
        except (psutil.Error, OSError):
            return 0
        return 0 if found is None else int(found.rss - getattr(found, "shared", 0))

    # -- the channel -------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Take messages of the rank, until it has closed the channel."""
        reader, self._writer = await asyncio.open_connection(sock=self._channel, limit=1 << 20)
        for data in self._unsent:
            self._writer.write(data)
        self._unsent.clear()
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                message = read_message(await reader.readexactly(length))
                self._print()  # what it has printed before
                self._take(message)

    def _print(self) -> None:
        """Pass on what is in the pipe now."""
        try:
            while data := os.read(self._source, 1 << 16):
                self._output(data)
                if self._paused:
                    return
        except BlockingIOError:
            return
        if not self._paused and not self._ending:  # all have closed it: it would always be ready
            self._server.loop.remove_reader(self._source)
            self._paused = True

    # -- for the server ----------------------------------------------------------------------------

    def hand_over(self, control: socket.socket) -> None:
        """Send the process's descriptors to the server, and close them here."""
        message = json.dumps({"op": "fork", "rank": self._number}).encode()
        theirs = [self._theirs.fileno(), self._asks.fileno(), self._prints, self._crash.fileno()]
        try:
            socket.send_fds(control, [message], theirs)
        finally:
            self._theirs.close()
            self._asks.close()
            os.close(self._prints)

    async def finish(self, status: int | None = None, reason: str = "") -> None:
        """Record how it has ended, after all that it has printed and sent."""
        if self._ending:
            return
        await asyncio.wait([self._serving], timeout=_END_OF_CHANNEL)
        self._paused = False
        self._print()
        self._ending = True
        self._server.loop.remove_reader(self._source)
        os.close(self._source)
        self._serving.cancel()
        if self._writer is not None:
            self._writer.close()
        for call in self.at_end:
            call()
        self.partitions.close()
        with self._crash:
            self._crash.seek(0)
            stack = self._crash.read(_STACK_BYTES).decode(errors="replace")
        killed = out_of_memory_kills() > self._kills
        self._exit.set_result(ProcessExit(status, reason or self._reason, killed, stack))


def start_process(control: socket.socket) -> subprocess.Popen[bytes]:
    """Start the process of a rank server, which is spoken to over the other end of `control`."""
    variables = {
        **os.environ,
        **dict.fromkeys(_ONE_THREAD, "1"),  # one thread, or it could not fork
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # has torch look for GPUs without CUDA
        "PYTHONPATH": os.pathsep.join(each for each in sys.path if each),
    }
    words = [sys.executable, "-c", _CODE, str(control.fileno()), str(os.getpid()), METHOD]
    # The kernel's death signal is for the end of this thread, which is the worker's loop.
    return subprocess.Popen(
        words, env=variables, stdin=subprocess.DEVNULL, pass_fds=[control.fileno()]
    )


class RankServer:
    """The rank server of a worker."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.pid: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ranks: dict[int, RankProcess] = {}
        self._launched = 0
        self._tasks: set[asyncio.Future[None]] = set()

    def start(self) -> None:
        """Start the server if it does not run; return at once."""
        if self._process is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            self._process = start_process(theirs)
        self.pid, self._control = self._process.pid, ours
        self.loop.add_reader(ours, self._receive)

    def launch(
        self, take: Callable[[Message], None], output: Callable[[bytes], None]
    ) -> RankProcess:
        """Start the process of a rank.

        `output` gets what it prints, `take` each message after all that it has printed before.
        """
        self.start()
        assert self._control is not None
        self._launched += 1
        rank = self._ranks[self._launched] = RankProcess(self, self._launched, take, output)
        try:
            rank.hand_over(self._control)
        except OSError as error:
            self._finish(self._launched, reason=f"its rank server does not answer: {error}")
        return rank

    def send(self, **message: Any) -> None:
        """Send a message to the server."""
        if self._control is not None:
            with contextlib.suppress(OSError):  # it has ended: that is noticed when it is read
                self._control.send(json.dumps(message).encode())

    def signal_rank(self, number: int, signum: int, reason: str) -> None:
        """Send a signal to a rank, by its number; one that is not forked yet has ended with it.

        A server that still imports torch would read it too late.
        """
        rank = self._ranks.get(number)
        if rank is not None and rank.pid is None:
            self._finish(number, reason=reason)
        else:
            self.send(op="signal", rank=number, signal=signum)

    def close(self) -> None:
        """End the server, and the ranks that are left."""
        if self._control is not None:
            self._close_control()
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2 * GROUP_LIMIT_S)
            process.kill()
            process.wait()
        for number in list(self._ranks):
            self._finish(number, reason="its rank server was closed")

    def _close_control(self) -> None:
        assert self._control is not None
        self.loop.remove_reader(self._control)
        self._control.close()
        self._control = None

    def _receive(self) -> None:
        assert self._control is not None
        while self._control is not None:
            try:
                data = self._control.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lose_server()
                return
            message: dict[str, Any] = json.loads(data)
            rank = self._ranks.get(message.get("rank", 0))
            if message["op"] == "forked":
                if rank is not None:
                    rank.pid = message["pid"]
                else:  # it was to end before
                    self.send(op="signal", rank=message["rank"], signal=signal.SIGKILL)
            elif message["op"] == "ended":
                self._finish(message["rank"], message["status"])
            elif message["op"] == "refused":
                reason = f"the system refused to start its process: {message['why']}"
                self._finish(message["rank"], reason=reason)

    def _lose_server(self) -> None:
        """End what a server that has ended leaves; the next rank gets another."""
        process, self._process = self._process, None
        assert process is not None
        self._close_control()
        process.kill()
        status = process.wait()
        how = f"killed by signal {-status}" if status < 0 else f"exited with status {status}"
        for number, rank in list(self._ranks.items()):
            if rank.pid is not None:  # the kernel ends the rank itself, but not its children
                signal_group(rank.pid, signal.SIGTERM)
                self.loop.call_later(GROUP_LIMIT_S, signal_group, rank.pid, signal.SIGKILL)
            self._finish(number, reason=f"its rank server has ended ({how})")

    def _finish(self, number: int, status: int | None = None, reason: str = "") -> None:
        rank = self._ranks.pop(number, None)
        if rank is not None:
            task = asyncio.ensure_future(rank.finish(status, reason))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
