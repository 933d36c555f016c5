"""Inject faults into a worker, its rank server and its rank's process.

The rank knows when a fault of ``nbelastic.chaos`` is due, and its worker does what a process
cannot, or should not, do to itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from distributed.core import Status

from nbelastic.messages import (
    FaultDone,
    FaultDue,
    FaultReport,
    Notice,
    NoticeReport,
    NoticeSource,
    RankOrder,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Worker

    from nbelastic.messages import FaultOrder, Message

    from .rank_process import RankProcess


class WorkerFaults:
    """Injects the faults of one worker; `send` sends a message to the scheduler."""

    def __init__(self, worker: Worker, send: Callable[[Message], None]) -> None:
        self._worker = worker
        self._send = send

    async def inflict(self, rank: RankProcess, due: FaultDue) -> None:
        """Inject a due fault, and let the rank go on, if still alive."""
        fault = due.fault
        report = FaultReport(due.job, due.start, "done", number=fault.number, rank=due.rank)
        self._send(report)
        await self._sent()
        await self._do(rank, fault)
        rank.send(RankOrder(due.job, due.start, FaultDone(fault.number)))

    async def _sent(self) -> None:
        """Wait, not for long, until the report is on its way."""
        for _ in range(50):
            await asyncio.sleep(0.001)
            if not self._worker.batched_stream.buffer:
                break
        await asyncio.sleep(0.001)

    async def _do(self, rank: RankProcess, fault: FaultOrder) -> None:
        kind, seconds, worker = fault.kind, fault.seconds, self._worker
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "crash":
            rank.send_signal(signal.SIGKILL)
        elif kind == "crash_server" and rank.server is not None:
            os.kill(rank.server, signal.SIGKILL)
        elif kind == "stop":
            stopped = [os.getpid()] if rank.pid is None else [rank.pid, os.getpid()]
            if seconds:
                _continue_after(seconds, stopped)
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
        elif kind == "close":
            worker.loop.add_callback(worker.close, nanny=False, reason="nbelastic.chaos")
        elif kind == "notice":
            self._send(NoticeReport(Notice(NoticeSource.CHAOS, seconds=seconds)))
            worker.loop.call_later(seconds, self._end_as_noticed)
        elif kind in ("leave", "restart"):
            worker.loop.add_callback(self._ask_scheduler, kind)

    async def _ask_scheduler(self, kind: str) -> None:
        addresses = [self._worker.address]
        try:
            if kind == "leave":
                await self._worker.scheduler.retire_workers(workers=addresses)
            else:
                await self._worker.scheduler.restart_workers(
                    workers=addresses,
                    wait_for_workers=False,
                    on_error="return",
                    stimulus_id=f"nbelastic-chaos-{time.time()}",
                )
        except OSError:
            pass  # it is as good as done: the worker has lost its scheduler over it

    def _end_as_noticed(self) -> None:
        """Kill this process, as its machine would, if its worker is still active."""
        if self._worker.status in (Status.running, Status.paused):
            os.kill(os.getpid(), signal.SIGKILL)


def _continue_after(seconds: float, pids: list[int]) -> None:
    """Continue processes from another process, because a stopped process cannot act."""
    words = " ".join(map(str, pids))
    subprocess.run(
        ["/bin/sh", "-c", f"(sleep {seconds:g}; kill -CONT {words}) >/dev/null 2>&1 &"],
        stdin=subprocess.DEVNULL,
        check=True,
    )
