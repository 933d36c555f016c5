"""Supervise one rank of a worker: its process, output, heartbeats and end.

What ends a rank: its function's end; an order, which raises in the function, then SIGTERM and
SIGKILL, each after a limit; a signal of someone else; too much memory. Whatever it is, the process
ends within the limits, and its last event reaches the driver:
:class:`~nbelastic.messages.RankDied` where it has sent none itself.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from distributed.core import Status
from msgspec.structs import replace

from nbelastic import messages as m
from nbelastic.cluster.dask_compat import unsent_bytes
from nbelastic.cluster.process_state import ProbeHistory

from .rank_process import RankProcess

if TYPE_CHECKING:
    from distributed import Worker

    from .rank.channel import RankSetup
    from .rank_process import RankLauncher

Key = tuple[str, int]

CROWDED = 8 * 2**20
"""Bytes that wait for the connection, above which nothing is added that may wait."""

IMPORTING = "importing torch in the host's rank template"

# Limits, in seconds.
ENDING_S, EVICTION_S = 6.0, 2.0  # that a rank has to end by itself, when it is ordered to
TERMINATION_S = 2.0  # between SIGTERM and SIGKILL
MOST_BETWEEN_S = 1.0  # between two looks that count as a rank's silence; there are two a second
SILENCE_S = 1.2  # without a heartbeat, after which the state of the process is read


class HostedRank:
    """A rank from the start of its process to its end.

    `send` sends to the scheduler. A rank that does nothing and sends no heartbeat for the
    `heartbeat_timeout` of its spec is ended. After its function, its threads, exit handlers and
    children have the `exit_timeout`.
    """

    def __init__(
        self,
        setup: RankSetup,
        launcher: RankLauncher,
        worker: Worker,
        send: Callable[[m.Message], None],
    ) -> None:
        self._spec = setup.spec
        self._key = key = (setup.spec.job, setup.spec.start)
        self._worker, self._send = worker, send
        self._loop = asyncio.get_running_loop()
        self._beat = m.Beat(key[1], 0, 0, False, -1)
        self._heard = False
        self._since = self._looked = self._loop.time()  # of its silence, and of the last look
        self._probes = ProbeHistory()
        self._plan: m.Plan | None = None
        self._last: m.Event | None = None  # by which the rank has said how it ends
        self._limits: list[asyncio.TimerHandle] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.process = RankProcess(
            setup, self._take, self._print, lambda: unsent_bytes(worker.batched_stream) > CROWDED
        )
        launcher.launch(self.process)

    async def wait(self) -> None:
        """Wait until the process has ended, and report it if the rank has not."""
        found = await self.process.wait()
        for timer in self._limits:
            timer.cancel()
        job, start = self._key
        if self._last is None:
            self._send(m.RankEvent(job, m.RankDied(start, str(found), self._beat.version)))
        elif isinstance(self._last, m.RankReturned):
            cut = str(found) if found.reason or found.status else ""
            self._send(m.RankEvent(job, m.RankExited(start, cut)))

    def _print(self, data: bytes) -> None:
        if text := self._decoder.decode(data):
            self._send(m.RankOutput(*self._key, text))

    def _take(self, message: m.Message) -> None:
        """Take a message of the rank."""
        if isinstance(message, m.Heartbeats):
            self._beat = message.beats[0][1]
            self._heard, self._since, self._probes = True, self._loop.time(), ProbeHistory()
        elif isinstance(message, m.FaultDue):
            self._worker.loop.add_callback(self._inflict, message)
        else:
            event = message.event if isinstance(message, m.RankEvent) else None
            if isinstance(event, (m.RankReturned, m.RankLeft, m.RankRaised)):
                self._last = event
                seconds = self._spec.exit_timeout_s
                self._end_within(seconds, f"it did not end within {seconds:g} s (exit_timeout)")
            if isinstance(event, m.RankReturned):
                message = replace(message, event=replace(event, exits=True))
            self._send(message)

    def obey(self, order: m.RankOrder) -> None:
        """Pass on an order; see that an order to end is obeyed."""
        self.process.send(order)
        effect = order.effect
        if isinstance(effect, m.Publish):
            self._plan = effect.plan
        elif isinstance(effect, m.EndRank) and effect.how != "leave":
            seconds = effect.save + (EVICTION_S if effect.how == "evict" else ENDING_S)
            self._end_within(seconds, f"its worker has ended its process: {effect.reason}")

    def leave_generation(self, reason: str) -> None:
        """Send the rank back to its last commit, if it is in an elastic loop."""
        if self._plan is not None and self._plan.loop:
            effect = m.Abort(self._plan.generation, (), m.Text(reason))
            self.process.send(m.RankOrder(*self._key, effect))

    # -- the end -----------------------------------------------------------------------------------

    def _end_within(self, seconds: float, reason: str) -> None:
        self._limits.append(self._loop.call_later(seconds, self.end, reason))

    def end(self, reason: str, patience: float = TERMINATION_S) -> None:
        """End the process by SIGTERM, after some seconds by SIGKILL."""
        self.process.send_signal(signal.SIGTERM, reason)
        self._limits.append(self._loop.call_later(patience, self.kill, reason))

    def kill(self, reason: str) -> None:
        """End the process at once."""
        self.process.send_signal(signal.SIGKILL, reason)

    # -- heartbeats --------------------------------------------------------------------------------

    def beat(self) -> m.Beat:
        """Return the rank's heartbeat.

        A rank whose code holds its interpreter sends none. The last one is repeated for it, but not
        that the rank waits: that may have changed. One that is stopped, or does nothing for long,
        is ended. Before its first heartbeat, it may be importing modules from a slow disk.
        """
        now = self._loop.time()
        # While its worker, or the machine, did not run, no heartbeat could be read.
        late, self._looked = max(now - self._looked - MOST_BETWEEN_S, 0.0), now
        self._since = min(self._since + late, now)
        if self.process.waits:
            self._since = now
            return replace(self._beat, operation=IMPORTING)
        silence = now - self._since
        if silence < SILENCE_S or self._last is not None:
            return self._beat
        verdict = self._probes.add(self.process.state())
        if verdict == "busy":
            self._since = now
        elif verdict == "stopped":
            self.kill(f"its process was stopped for {silence:.0f} s")
        elif self._heard and silence >= self._spec.heartbeat_timeout_s:
            self.kill(f"its process has sent no heartbeat for {silence:.0f} s and does nothing")
        # Kept: a rank that waits and does not in turns would seem to make progress.
        self._beat = replace(self._beat, waiting=False, operation="")
        return self._beat

    # -- faults of ``nbelastic.chaos`` -------------------------------------------------------------
    #
    # The rank knows when one is due. Its worker does what a process cannot do to itself, or should
    # not.

    async def _inflict(self, due: m.FaultDue) -> None:
        """Inject a due fault, and let the rank go on, if still alive."""
        worker, rank, kind, seconds = self._worker, self.process, due.fault.kind, due.fault.seconds
        self._send(m.FaultReport(due.job, due.start, due.fault.number, due.rank))
        for _ in range(5):  # turns of the loop, in which the report is sent
            await asyncio.sleep(0.004)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "crash":
            rank.send_signal(signal.SIGKILL)
        elif kind == "stop":
            stopped = [os.getpid()] if rank.pid is None else [rank.pid, os.getpid()]
            if seconds:  # by another process, because a stopped process cannot act
                words = f"(sleep {seconds:g}; kill -CONT {' '.join(map(str, stopped))})"
                command = ["/bin/sh", "-c", f"{words} >/dev/null 2>&1 &"]
                subprocess.run(command, stdin=subprocess.DEVNULL, check=True)
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
        elif kind == "close":
            worker.loop.add_callback(worker.close, nanny=False, reason="nbelastic.chaos")
        elif kind == "notice":
            self._send(m.NoticeReport(m.Notice(m.NoticeSource.CHAOS, seconds=seconds)))
            worker.loop.call_later(seconds, self._end_as_noticed)
        elif kind in ("leave", "restart"):
            worker.loop.add_callback(self._ask_scheduler, kind)
        rank.send(m.RankOrder(due.job, due.start, m.InjectFaults(drop=(due.fault.number,))))

    async def _ask_scheduler(self, kind: str) -> None:
        scheduler, addresses = self._worker.scheduler, [self._worker.address]
        with contextlib.suppress(OSError):  # the worker has lost its scheduler over it
            if kind == "leave":
                await scheduler.retire_workers(workers=addresses)
            else:
                await scheduler.restart_workers(
                    workers=addresses,
                    wait_for_workers=False,
                    on_error="return",
                    stimulus_id=f"nbelastic-chaos-{time.time()}",
                )

    def _end_as_noticed(self) -> None:
        """Kill this process, as its machine would, if its worker is still active."""
        if self._worker.status in (Status.running, Status.paused):
            os.kill(os.getpid(), signal.SIGKILL)
