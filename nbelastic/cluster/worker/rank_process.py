"""Launch the processes of a worker's ranks, by the rank template of their host.

Requested, a rank's descriptors wait until the template is ready and its server has them. Running,
it has a rank server (:mod:`.rank.server`), its parent, to which the control socket leads: by it the
worker sends signals, and learns of the end. The server ends what the rank has started, and then
itself, which closes the socket. Ended, its exit is known and its output complete.

The line to the template (:mod:`nbelastic.rank_template`) is kept while the worker has its agent:

============  ====================================================================================
the line is   then
============  ====================================================================================
starting      a template was started. Where another was first, that is connected to
joined        the template imports torch. Requests wait in the worker
ready         a request is sent at once, and answered by the rank's server
closed        the template has ended: another one is found or started at once. Ranks live on
============  ====================================================================================

Where a process of other rights listens at the address, the worker starts a template for itself
alone. So it does where the system has no abstract sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from nbelastic import rank_template
from nbelastic.cluster.dask_compat import until
from nbelastic.cluster.process_state import ProcessState, read_state
from nbelastic.elastic.ranks.runtime import THREAD_VARIABLES
from nbelastic.messages import AnyMessage, Message, RankEvent, decode, encode
from nbelastic.rank_template import KIND, receive, send
from nbelastic.system import LINUX

from .rank.channel import HEADER, RankSetup, frame
from .rank.children import GROUP_LIMIT_S, signal_group

logger = logging.getLogger(__name__)

# Limits, in seconds.
END_OF_CHANNEL_S = None if LINUX else 1.0  # to read what an ended process had sent
OUTPUT_INTERVAL_S = 0.1  # that text may wait for more
PATIENCE_S = 1.0  # that output is not read for the connection's sake, each time
PAUSE_S = 0.02  # after which a crowded connection is checked again

OUTPUT_BYTES = 2**20  # that are read at once at most, and that a rank can print meanwhile

TRIES = 4
"""Templates that may end before they are ready until the worker starts one for itself alone.

After as many again, ranks that wait are given up.
"""


@dataclass(frozen=True)
class ProcessExit:
    """End of a rank's process."""

    status: int | None = None  # as ``wait(2)`` returns it; None if it is not known
    reason: str = ""  # why the worker has ended it, or why its status is not known
    out_of_memory: bool = False  # the system ended a process of this cgroup while the rank ran

    def __str__(self) -> str:
        if self.reason or self.status is None:
            return self.reason or "its process has ended"
        if os.WIFEXITED(self.status):
            return f"its process exited with status {os.WEXITSTATUS(self.status)}"
        number, name = os.WTERMSIG(self.status), ""
        if self.out_of_memory and number == signal.SIGKILL:
            return "its process was killed by the system: out of memory"
        with contextlib.suppress(ValueError):  # a real-time signal
            name = f" ({signal.Signals(number).name})"
        return f"its process was killed by signal {number}{name}"


def out_of_memory_kills() -> int:
    """Return how often the kernel has ended a process of this cgroup for its memory."""
    found = 0
    with contextlib.suppress(OSError, ValueError), open("/proc/self/cgroup") as groups:
        for line in groups:
            _, version, place = line.rstrip("\n").split(":", 2)
            if version in ("", "memory"):
                name = "memory.oom_control" if version else "memory.events"
                # Inside of a container, the own cgroup is often mounted as the root.
                for folder in (place, ""):
                    with contextlib.suppress(OSError, ValueError):
                        with open(f"/sys/fs/cgroup/{version}{folder}/{name}") as file:
                            counts = dict(each.split() for each in file)
                        found = max(found, int(counts.get("oom_kill", 0)))
    return found


class OutputPipe:
    """The worker's end of a pipe to which a rank prints.

    A rank may print a million lines in a second, so the pipe is read at intervals, and many lines
    go in one message. A rank that is faster than the connection waits: its pipe is not read while
    that is `crowded`, for a second at most each time.
    """

    def __init__(
        self, source: int, output: Callable[[bytes], None], crowded: Callable[[], bool]
    ) -> None:
        self._source, self._output, self._crowded = source, output, crowded
        self._ended = False  # all have closed it
        os.set_blocking(source, False)
        if LINUX:
            with contextlib.suppress(OSError):  # the user has too many such pipes
                fcntl.fcntl(source, fcntl.F_SETPIPE_SZ, OUTPUT_BYTES)
        self._serving = asyncio.get_running_loop().create_task(self._serve())

    async def _serve(self) -> None:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        while not self._ended:
            ready.clear()
            loop.add_reader(self._source, ready.set)
            await ready.wait()
            loop.remove_reader(self._source)
            await asyncio.sleep(OUTPUT_INTERVAL_S)
            await until(lambda: not self._crowded(), PATIENCE_S, PAUSE_S)
            self.read()

    def read(self) -> None:
        """Pass on what is in the pipe now."""
        data = bytearray()
        with contextlib.suppress(BlockingIOError):
            while len(data) < OUTPUT_BYTES and not self._ended:
                part = os.read(self._source, 1 << 16)
                data += part
                self._ended = not part
        if data:
            self._output(bytes(data))

    def close(self) -> None:
        """Pass on the rest, and close the pipe."""
        self._serving.cancel()
        self.read()
        asyncio.get_running_loop().remove_reader(self._source)
        os.close(self._source)


class RankProcess:
    """Process of one rank, launched by :class:`RankLauncher`; `setup` comes first.

    `output` gets what it prints, which waits while `crowded()`, and `take` each message, an event
    after all that was printed before.
    """

    def __init__(
        self,
        setup: RankSetup,
        take: Callable[[Message], None],
        output: Callable[[bytes], None],
        crowded: Callable[[], bool],
    ) -> None:
        self._unsent = [frame(pickle.dumps(setup))]
        self.pid: int | None = None  # while it runs
        self.server: int | None = None  # its rank server's
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._channel, theirs = socket.socketpair()
        source, prints = os.pipe()
        self._output = OutputPipe(source, output, crowded)
        self._theirs = [theirs.detach(), prints]
        self.control: socket.socket | None = None
        self.gone: asyncio.Future[None] = self._loop.create_future()  # the server, too
        self._kills = out_of_memory_kills()
        self._reason = ""
        self._exit: asyncio.Future[ProcessExit] = self._loop.create_future()
        self._writer: asyncio.StreamWriter | None = None
        self._serving = self._loop.create_task(self._serve())
        self._finishing: asyncio.Task[None] | None = None  # which the loop would forget

    async def wait(self) -> ProcessExit:
        """Wait until it has ended; return how."""
        return await asyncio.shield(self._exit)

    def send(self, message: Message) -> None:
        """Send an order to the rank."""
        if self._writer is None:
            self._unsent.append(frame(encode(message)))
        elif not self._exit.done():
            self._writer.write(frame(encode(message)))

    def send_signal(self, number: int, reason: str = "") -> None:
        """Send a signal to the process and its group, unless it has ended; say why it ends."""
        if not self._exit.done():
            self._reason = reason or self._reason
            if self.pid is None:
                self.finish(reason=self._reason)  # its server sees that, and forks none
            elif self.control is not None:
                send(self.control, signal=number)

    def state(self) -> ProcessState:
        """Return the state of the process, as the system has it."""
        return ProcessState("unknown") if self.pid is None else read_state(self.pid)

    def memory(self) -> int:
        """Return how many bytes of memory the process has for itself."""
        if self.pid is not None:
            with contextlib.suppress(psutil.Error):
                found = psutil.Process(self.pid).memory_info()
                return int(found.rss - getattr(found, "shared", 0))
        return 0

    async def _serve(self) -> None:
        """Take messages of the rank, until it has closed the channel."""
        reader, self._writer = await asyncio.open_connection(sock=self._channel, limit=1 << 20)
        self._writer.writelines(self._unsent)
        self._unsent.clear()
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                message = decode(await reader.readexactly(length), AnyMessage)
                if isinstance(message, RankEvent):
                    self._output.read()  # what it has printed before
                self._take(message)

    # -- its server --------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether no server was asked for so far."""
        return self.control is None and self.pid is None and self._finishing is None

    def ask(self, line: socket.socket) -> None:
        """Ask a template for a server, which gets the descriptors."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, KIND)
        ours.setblocking(False)
        message = json.dumps({"worker": os.getpid()}).encode()
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

    def withdraw(self) -> None:
        """Ask no more: a server that finds the control socket closed forks nothing."""
        if self.control is not None:
            self._loop.remove_reader(self.control)
            self.control.close()
            self.control = None

    def _hear(self) -> None:
        assert self.control is not None
        found = receive(self.control)
        for message in found:
            if message["op"] == "forked":
                self.pid, self.server = message["pid"], message["server"]
                self._close_theirs()
            elif message["op"] == "ended":
                self.finish(message["status"])
            elif message["op"] == "refused":
                why = message["why"]
                self.finish(reason=f"the system refused to start its process: {why}")
        if not found:
            self.withdraw()
            if self.pid is not None and self._finishing is None:
                # Its server was killed, and the kernel ends the rank itself. The template ends what
                # that has started, if there is one, and has more time: a tracker ends last.
                signal_group(self.pid, signal.SIGTERM)
                self._loop.call_later(2 * GROUP_LIMIT_S, signal_group, self.pid, signal.SIGKILL)
            self.finish(reason="its rank server has ended")
            if self.pid is not None:
                self.gone.set_result(None)

    def _close_theirs(self) -> None:
        while self._theirs:
            os.close(self._theirs.pop())

    def finish(self, status: int | None = None, reason: str = "") -> None:
        """Record the end of the process, after all its output and messages."""
        if self._finishing is None:
            if self.pid is None:
                self.withdraw()
                self.gone.set_result(None)
            self._close_theirs()
            self._finishing = self._loop.create_task(self._finish(status, reason))

    async def _finish(self, status: int | None, reason: str) -> None:
        with contextlib.suppress(OSError):
            # What is in the socket can be read, and then it ends, although a fork may keep it. A
            # worker that is busy may need any time for that.
            if LINUX:
                self._channel.shutdown(socket.SHUT_RD)
        await asyncio.wait([self._serving], timeout=END_OF_CHANNEL_S)
        self._output.close()
        self._serving.cancel()
        if self._writer is not None:
            self._writer.close()
        killed = out_of_memory_kills() > self._kills
        self._exit.set_result(ProcessExit(status, reason or self._reason, killed))


class RankLauncher:
    """Launches the ranks of a worker."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._name = ""
        self._alone = not LINUX
        self._line: socket.socket | None = None
        self._starter: subprocess.Popen[bytes] | None = None
        self.template = 0  # its process, while there is one
        self._ready = False
        self._tries = 0
        self._ranks: set[RankProcess] = set()

    def start(self) -> None:
        """Find or start a template if there is none; return at once."""
        if self._line is not None:
            return
        self._ready = False
        line = None if self._alone else self._connect()
        self._line = line = line or self._start_template()
        line.setblocking(False)
        self._loop.add_reader(line, self._hear)

    def launch(self, rank: RankProcess) -> None:
        """Start the process of a rank."""
        self._ranks.add(rank)
        rank.gone.add_done_callback(lambda _: self._ranks.discard(rank))
        try:
            self.start()
        except OSError as error:
            rank.finish(reason=f"the system refused to start its process: {error}")
        self._ask()

    async def close(self) -> None:
        """End the remaining ranks and their processes; leave the template."""
        for rank in self._ranks:
            rank.send_signal(signal.SIGKILL, "its worker was closed")
        if ends := [rank.gone for rank in self._ranks]:
            await asyncio.wait(ends, timeout=2 * GROUP_LIMIT_S)
        for rank in list(self._ranks):
            if rank.server is not None:
                signal_group(rank.server, signal.SIGKILL)
            rank.withdraw()
            rank.finish(reason="its worker was closed")
        self._ranks.clear()
        self._close_line()

    # -- the template ------------------------------------------------------------------------------

    def _connect(self) -> socket.socket | None:
        """Return a line to the host's template; None if there is none."""
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._name = rank_template.address(rank_template.search_path())
            line.setblocking(False)
            line.connect(f"\0{self._name}")
            self.template = rank_template.peer(line)
        except (OSError, ValueError) as error:
            line.close()
            if not isinstance(error, ConnectionRefusedError):
                self._leave_others(f"the rank template of this host cannot be used: {error}")
            return None
        return line

    def _leave_others(self, why: str) -> None:
        self._alone = True
        logger.warning("%s. This worker starts one for itself", why)

    def _start_template(self) -> socket.socket:
        """Start a template, of which this process is the first to have a line."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, KIND)
        variables = {
            **os.environ,
            **dict.fromkeys(THREAD_VARIABLES, "1"),  # one thread, or it could not fork
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # has torch look for GPUs without CUDA
            "PYTHONPATH": os.pathsep.join(rank_template.search_path()),
        }
        words = [sys.executable, "-m", rank_template.__name__, str(theirs.fileno())]
        with theirs, contextlib.ExitStack() as failed:
            failed.callback(ours.close)
            self._starter = subprocess.Popen(
                words if self._alone else [*words, self._name],
                env=variables,
                cwd="/",
                stdin=subprocess.DEVNULL,  # no worker's streams: it may be there for longer
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
            failed.pop_all()
        self.template = self._starter.pid
        return ours

    def _hear(self) -> None:
        assert self._line is not None
        found = receive(self._line)
        for message in found:
            if message["op"] == "bound":
                self.template = message["pid"]
                if self._starter is not None:  # it has forked the template, and ends
                    self._starter.wait()
                    self._starter = None
            elif message["op"] == "ready":
                self._ready, self._tries = True, 0
                self._ask()
        if not found:
            self._lose_line()

    def _close_line(self) -> None:
        if self._line is not None:
            self._loop.remove_reader(self._line)
            self._line.close()
            self._line = None
        self.template = 0
        if self._starter is not None:
            self._starter.kill()
            self._starter.wait()
            self._starter = None

    def _lose_line(self) -> None:
        """Find another template, because the last has ended, or was not the host's first."""
        self._close_line()
        self._tries += 1
        if self._tries == TRIES and not self._alone:
            self._leave_others("the rank template of this host ends, or its address is bound")
        if self._tries < 2 * TRIES:
            with contextlib.suppress(OSError):
                self.start()
                return
        self._tries = 0
        for rank in self._ranks:
            if rank.waits:
                rank.finish(reason="its rank template has ended before it was ready")

    def _ask(self) -> None:
        if self._ready and self._line is not None:
            for rank in filter(lambda each: each.waits, self._ranks):
                with contextlib.suppress(OSError):  # it has ended, which is heard next
                    rank.ask(self._line)
