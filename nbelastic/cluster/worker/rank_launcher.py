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

A template that is asked and does nothing (it is stopped, or stuck) is left after a time, and so is
an address at which a process of other rights listens: the worker starts one for itself alone. So it
does where the system has no abstract sockets, and where forking is not safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil

from nbelastic import rank_template
from nbelastic.cluster.process_state import ProbeHistory, Verdict, process_id, read_state
from nbelastic.system import LINUX

from .rank.children import GROUP_LIMIT_S
from .rank_process import RankProcess

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbelastic.messages import Message

logger = logging.getLogger(__name__)

METHOD = "fork" if LINUX else "spawn"
"""How ranks begin. Frameworks of macOS do not work in a fork."""

STUCK_S = 30.0
"""Seconds for which a template that is asked may do nothing."""

TRIES = 4
"""Templates that may end before they are ready, one after the other, until ranks are given up."""

_LOOK_S = 0.5
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class RankLauncher:
    """Launches the ranks of a worker."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._path: list[str] = []
        self._name = ""
        self._alone = METHOD != "fork"
        self._line: socket.socket | None = None
        self._starter: subprocess.Popen[bytes] | None = None
        self.template = 0  # its process, while there is one
        self._ready = False
        self._tries = 0
        self._looking: asyncio.TimerHandle | None = None
        self._idle = 0  # looks at a template that imports, and did nothing
        self._probes = ProbeHistory()
        self._ranks: dict[int, RankProcess] = {}
        self._launched = 0

    def start(self) -> None:
        """Find or start a template if there is none; return at once."""
        if self._line is not None:
            return
        self._ready = False
        self._path = rank_template.search_path()
        line = None if self._alone else self._connect()
        self._line = line = line or self._start_template()
        line.setblocking(False)
        self._loop.add_reader(line, self._hear)
        self._watch()

    def launch(
        self, take: Callable[[Message], None], output: Callable[[bytes], None]
    ) -> RankProcess:
        """Start the process of a rank.

        `output` gets what it prints, `take` each message after all that it has printed before.
        """
        self._launched += 1
        number, rank = self._launched, RankProcess(take, output)
        self._ranks[number] = rank
        rank.gone.add_done_callback(lambda _: self._ranks.pop(number, None))
        try:
            self.start()
        except OSError as error:
            rank.finish(reason=f"the system refused to start its process: {error}")
        self._ask()
        return rank

    def close(self) -> None:
        """End the remaining ranks and their processes; leave the template."""
        ends = {each.fileno(): each for rank in self._ranks.values() if (each := rank.let_go())}
        poll = select.poll()
        for descriptor in ends:
            poll.register(descriptor, select.POLLIN)
        limit = time.monotonic() + 2 * GROUP_LIMIT_S
        while ends and (left := limit - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(1000 * left):
                with contextlib.suppress(OSError):
                    if ends[descriptor].recv(rank_template.MESSAGE_BYTES):
                        continue
                poll.unregister(descriptor)
                ends.pop(descriptor)
        for rank in list(self._ranks.values()):
            if rank.server is not None and rank.control in ends.values():  # it is there
                os.kill(rank.server, signal.SIGKILL)
            rank.withdraw()
            rank.finish(reason="its worker was closed")
        self._ranks.clear()
        self._close_line()

    # -- the template ------------------------------------------------------------------------------

    def _connect(self) -> socket.socket | None:
        """Return a line to the host's template; None if there is none."""
        line = None
        try:
            self._name = rank_template.address(self._path)
            line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            line.setblocking(False)
            line.connect(f"\0{self._name}")
            self.template = rank_template.peer(line)
        except ConnectionRefusedError:
            assert line is not None
            line.close()
            return None
        except (OSError, ValueError) as error:
            if line is not None:
                line.close()
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
            **dict.fromkeys(_ONE_THREAD, "1"),  # one thread, or it could not fork
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # has torch look for GPUs without CUDA
            "PYTHONPATH": os.pathsep.join(self._path),
        }
        words = [sys.executable, "-m", rank_template.__name__, str(theirs.fileno()), METHOD]
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
        while self._line is not None:
            try:
                data = self._line.recv(rank_template.MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lose_line()
                return
            for message in rank_template.messages(data):
                self._obey(message)

    def _obey(self, message: dict[str, Any]) -> None:
        if message["op"] == "bound":
            self.template = message["pid"]
            if self._starter is not None:  # it has forked the template, and ends
                self._starter.wait()
                self._starter = None
        elif message["op"] == "ready":
            self._ready, self._tries = True, 0
            self._ask()
        elif message["op"] == "lost" and message["rank"] in self._ranks:
            self._ranks[message["rank"]].server_lost(message["status"])

    def _close_line(self) -> None:
        if self._line is not None:
            self._loop.remove_reader(self._line)
            self._line.close()
            self._line = None
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        self.template = 0
        if self._starter is not None:
            self._starter.kill()
            self._starter.wait()
            self._starter = None

    def _lose_line(self) -> None:
        """Find another template, because the last has ended, or was not the host's first."""
        self._starter, starter = None, self._starter
        self._close_line()
        taken = starter is not None and starter.wait() == rank_template.LOST
        self._tries += 1
        if taken and self._tries >= TRIES:
            self._leave_others("the address of this host's rank template is bound, and refuses")
        if taken or self._tries < TRIES:
            with contextlib.suppress(OSError):
                self.start()
                return
        self._tries = 0
        for rank in list(self._ranks.values()):
            if rank.waits:
                rank.finish(reason="its rank template has ended before it was ready")

    def _ask(self) -> None:
        if self._ready and self._line is not None:
            for number, rank in list(self._ranks.items()):
                if rank.waits:
                    with contextlib.suppress(OSError):  # it has ended, which is heard next
                        rank.ask(self._line, number)
                        self._watch()

    # -- a template that does nothing --------------------------------------------------------------

    def _watch(self) -> None:
        if self._looking is None:
            self._probes, self._idle = ProbeHistory(), 0
            self._looking = self._loop.call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        """Leave a stopped or idle template while a rank waits for it.

        Looks are counted, and not seconds: a worker's loop may stand still itself.
        """
        self._looking = None
        asked = [each for each in self._ranks.values() if each.asked]
        if self._line is None or (self._ready and not asked):
            return
        self._looking = self._loop.call_later(_LOOK_S, self._look)
        verdict = None
        with contextlib.suppress(psutil.Error, OSError):
            verdict = self._probes.add(read_state(process_id(self.template)))
        self._idle = 0 if self._ready or verdict is Verdict.BUSY else self._idle + 1
        for rank in asked:
            rank.looks = 0 if verdict is Verdict.BUSY else rank.looks + 1
        longest = max(self._idle, *(rank.looks for rank in asked), 0)
        if verdict is not Verdict.STOPPED and longest * _LOOK_S < STUCK_S:
            return
        how = "is stopped" if verdict is Verdict.STOPPED else "does nothing"
        for rank in asked:
            rank.withdraw()
        if self._alone:
            os.kill(self.template, signal.SIGKILL)  # no other worker has it
        self._leave_others(f"the rank template of this host (process {self.template}) {how}")
        self._close_line()
        with contextlib.suppress(OSError):
            self.start()
