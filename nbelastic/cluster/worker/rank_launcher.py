"""Launch the ranks of a worker, by the rank template of its host.

The line to the template (:mod:`nbelastic.rank_template`) is kept while the worker has its agent.

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
import logging
import os
import signal
import socket
import subprocess
import sys

from nbelastic import rank_template
from nbelastic.elastic.ranks.runtime import THREAD_VARIABLES
from nbelastic.system import LINUX

from .rank.children import GROUP_LIMIT_S, signal_group
from .rank_process import RankProcess

logger = logging.getLogger(__name__)

TRIES = 4
"""Templates that may end before they are ready until the worker starts one for itself alone.

After as many again, ranks that wait are given up.
"""


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
        ours, theirs = socket.socketpair(socket.AF_UNIX, rank_template.KIND)
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
        found = rank_template.receive(self._line)
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
