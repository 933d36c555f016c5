"""The process of a worker's rank, from the request to its end.

============  ====================================================================================
a process is  then
============  ====================================================================================
requested     its descriptors wait, until the host's template is ready and its server has them
running       forked. It ends by returning, by a signal (its own, the worker's, the system's), or
              with its server or its worker
ended         reaped by its server, or lost with that. Its exit is known, its output complete
============  ====================================================================================

Each has a rank server (:mod:`.rank.server`), its parent, to which the control socket leads: by it
the worker sends signals, and learns of the end. The server ends what the rank has started, and then
itself, which closes the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import re
import signal
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import psutil

from nbelastic.cluster.process_state import ProcessState, process_id, read_state
from nbelastic.elastic.ranks.telemetry import NOT_THE_USERS
from nbelastic.messages import AnyMessage, Message, decode, encode
from nbelastic.rank_template import KIND, MESSAGE_BYTES, messages, send
from nbelastic.system import LINUX

from .rank.channel import HEADER, RankSetup, frame
from .rank.children import GROUP_LIMIT_S, signal_group

_LINE = re.compile(r'File "(.*)", line (\d+) in (\S+)')
_STACK_BYTES = 1 << 16
END_OF_CHANNEL_S = None if LINUX else 1.0
"""Seconds that reading what a process had sent may take when it has ended, where it has no end."""

_WORD_OF_DEATH_S = 1.0
"""Seconds that the template may take to say how a rank server has ended."""


@dataclass(frozen=True)
class ProcessExit:
    """End of a rank's process."""

    status: int | None = None  # as ``wait(2)`` returns it; None if it is not known
    reason: str = ""  # why the worker has ended it, or why its status is not known
    out_of_memory: bool = False  # the system ended a process of this cgroup while the rank ran
    stack: str = ""  # of its Python threads at a fatal signal

    def __str__(self) -> str:
        if self.reason or self.status is None:
            return self.reason or "its process has ended"
        if os.WIFEXITED(self.status):
            return f"its process exited with status {os.WEXITSTATUS(self.status)}"
        number = os.WTERMSIG(self.status)
        if self.out_of_memory and number == signal.SIGKILL:
            return "its process was killed by the system: out of memory"
        try:
            name = f" ({signal.Signals(number).name})"
        except ValueError:  # a real-time signal
            name = ""
        return f"its process was killed by signal {number}{name}{self._place()}"

    @property
    def crash(self) -> str:
        """Python's report of a fatal signal, on the receiving thread alone."""
        what, *blocks = self.stack.split("\n\n")
        current = [each for each in blocks if each.startswith("Current thread")]
        return "\n".join([what, *current, ""]) if current else ""

    def _place(self) -> str:
        """Return the innermost line of the user's code in the crash; empty without any."""
        for file, line, function in _LINE.findall(self.crash):
            if not file.startswith(NOT_THE_USERS):
                return f", at {file}, line {line}, in {function}"
        return ""


def out_of_memory_kills() -> int:
    """Return how often the kernel has ended a process of this cgroup for its memory."""
    try:
        with open("/proc/self/cgroup") as file:
            places = dict(line.strip().split(":", 2)[1:] for line in file)
    except (OSError, ValueError):
        return 0
    found = 0
    names = [f"/sys/fs/cgroup{places['']}/memory.events"] if "" in places else []
    if "memory" in places:
        names.append(f"/sys/fs/cgroup/memory{places['memory']}/memory.oom_control")
    # Inside of a container, the own cgroup is often mounted as the root.
    names += ["/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"]
    for name in names:
        try:
            with open(name) as file:
                counts = dict(line.split() for line in file)
        except (OSError, ValueError):
            continue
        found = max(found, int(counts.get("oom_kill", 0)))
    return found


class RankProcess:
    """Process of one rank; made by :meth:`~.rank_launcher.RankLauncher.launch`."""

    def __init__(
        self, setup: RankSetup, take: Callable[[Message], None], output: Callable[[bytes], None]
    ) -> None:
        self._unsent = [frame(pickle.dumps(setup))]
        self.pid: int | None = None  # while it runs
        self.server: int | None = None  # its rank server's
        self._take, self._output = take, output
        self._loop = asyncio.get_running_loop()
        self._channel, theirs = socket.socketpair()
        self._source, prints = os.pipe()
        os.set_blocking(self._source, False)
        self._crash: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - until it has ended
        self._theirs = [theirs.detach(), prints, os.dup(self._crash.fileno())]
        self.control: socket.socket | None = None
        self._lost: asyncio.Future[int] = self._loop.create_future()  # status of the server
        self.gone: asyncio.Future[None] = self._loop.create_future()  # the server, too
        self._kills = out_of_memory_kills()
        self._reason = ""
        self._exit: asyncio.Future[ProcessExit] = self._loop.create_future()
        self._ending = self._closed = False
        self._paused = False
        self._serving = asyncio.ensure_future(self._serve())
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: set[asyncio.Future[None]] = set()
        self._loop.add_reader(self._source, self._print)

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self._exit.done()

    async def wait(self) -> ProcessExit:
        """Wait until it has ended; return how."""
        return await asyncio.shield(self._exit)

    def send(self, message: Message) -> None:
        """Send an order to the rank."""
        if self._writer is None:
            self._unsent.append(frame(encode(message)))
        elif not self._closed:
            self._writer.write(frame(encode(message)))

    def send_signal(self, number: int, reason: str = "") -> None:
        """Send a signal to the process and its group, unless it has ended; say why it ends."""
        if not self.ended:
            self._reason = reason or self._reason
            if self.pid is None:
                self.finish(reason=self._reason)  # its server sees that, and forks none
            elif self.control is not None:
                send(self.control, signal=number)

    def pause_output(self, paused: bool) -> None:
        """Stop reading the rank's output, or resume. The rank waits once the pipe is full."""
        if paused != self._paused and not self._closed:
            self._paused = paused
            if paused:
                self._loop.remove_reader(self._source)
            else:
                self._loop.add_reader(self._source, self._print)

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
                message = decode(await reader.readexactly(length), AnyMessage)
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
        if not self._paused and not self._closed:  # all have closed it: it would always be ready
            self._loop.remove_reader(self._source)
            self._paused = True

    # -- its server --------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether no server was asked for so far."""
        return self.control is None and self.pid is None and not self._ending

    def is_asked_by(self, control: socket.socket) -> bool:
        """Whether a server was asked for with this socket, and has not answered so far."""
        return self.control is control and self.pid is None and not self._ending

    def ask(self, line: socket.socket, number: int) -> socket.socket:
        """Ask a template for a server, which gets the descriptors; return the control socket."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, KIND)
        ours.setblocking(False)
        message = json.dumps({"worker": os.getpid(), "rank": number}).encode()
        with theirs, contextlib.ExitStack() as stack:
            descriptors = [theirs.fileno(), *self._theirs]
            if LINUX and hasattr(os, "pidfd_open"):
                with contextlib.suppress(OSError):  # an old kernel
                    descriptors.append(os.pidfd_open(os.getpid()))
                    stack.callback(os.close, descriptors[-1])
            try:
                socket.send_fds(line, [message], descriptors)
            except OSError:
                ours.close()
                raise
        self.control = ours
        self._loop.add_reader(ours, self._hear)
        return ours

    def withdraw(self) -> None:
        """Ask no more: a server that finds the control socket closed forks nothing."""
        if self.control is not None:
            self._loop.remove_reader(self.control)
            self.control.close()
            self.control = None

    def server_lost(self, status: int) -> None:
        """Note how its server has ended, as the template tells."""
        if not self._lost.done():
            self._lost.set_result(status)

    def _hear(self) -> None:
        while self.control is not None:
            try:
                data = self.control.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.withdraw()
                if self._ending:
                    self._forget()
                else:
                    self._do(self._lose_server())
                return
            for message in messages(data):
                if message["op"] == "forked":
                    self.pid, self.server = message["pid"], message["server"]
                    self._close_theirs()
                elif message["op"] == "ended":
                    self.finish(message["status"])
                elif message["op"] == "refused":
                    why = message["why"]
                    self.finish(reason=f"the system refused to start its process: {why}")

    async def _lose_server(self) -> None:
        """End the processes left by an ended server, for lack of a template."""
        if self.pid is not None:  # the kernel ends the rank itself
            signal_group(self.pid, signal.SIGTERM)
            self._loop.call_later(GROUP_LIMIT_S, signal_group, self.pid, signal.SIGKILL)
        how = "its status is not known"
        if (await asyncio.wait([self._lost], timeout=_WORD_OF_DEATH_S))[0]:
            status = os.waitstatus_to_exitcode(self._lost.result())
            how = f"killed by signal {-status}" if status < 0 else f"exited with status {status}"
        self.finish(reason=f"its rank server has ended ({how})")
        self._forget()

    def _forget(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)

    def _do(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _close_theirs(self) -> None:
        while self._theirs:
            os.close(self._theirs.pop())

    def finish(self, status: int | None = None, reason: str = "") -> None:
        """Record the end of the process, after all its output and messages."""
        if not self._ending:
            self._ending = True
            if self.pid is None:
                self.withdraw()
                self._forget()
            self._close_theirs()
            self._do(self._finish(status, reason))

    async def _finish(self, status: int | None, reason: str) -> None:
        with contextlib.suppress(OSError):
            # What is in the socket can be read, and then it ends, although a fork may keep it. A
            # worker that is busy may need any time for that.
            if LINUX:
                self._channel.shutdown(socket.SHUT_RD)
        await asyncio.wait([self._serving], timeout=END_OF_CHANNEL_S)
        self._paused = False
        self._print()
        self._closed = True
        self._loop.remove_reader(self._source)
        os.close(self._source)
        self._serving.cancel()
        if self._writer is not None:
            self._writer.close()
        with self._crash:
            self._crash.seek(0)
            stack = self._crash.read(_STACK_BYTES).decode(errors="replace")
        killed = out_of_memory_kills() > self._kills
        self._exit.set_result(ProcessExit(status, reason or self._reason, killed, stack))
