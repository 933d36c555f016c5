"""Inject faults into a worker, its rank server and its rank's process.

The rank knows when a fault of ``nbelastic.chaos`` is due, and its worker does what a process
cannot, or should not, do to itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from distributed import Worker
from distributed.core import Status

from nbelastic import messages as m

if TYPE_CHECKING:
    from .rank_process import RankProcess


async def inflict(
    worker: Worker, send: Callable[[m.Message], None], rank: RankProcess, due: m.FaultDue
) -> None:
    """Inject a due fault, and let the rank go on, if still alive."""
    send(m.FaultReport(due.job, due.start, "done", number=due.fault.number, rank=due.rank))
    for _ in range(5):  # turns of the loop, in which the report is sent
        await asyncio.sleep(0.004)
    kind, seconds = due.fault.kind, due.fault.seconds
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "crash":
        rank.send_signal(signal.SIGKILL)
    elif kind == "crash_server" and rank.server is not None:
        os.kill(rank.server, signal.SIGKILL)
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
        send(m.NoticeReport(m.Notice(m.NoticeSource.CHAOS, seconds=seconds)))
        worker.loop.call_later(seconds, _end_as_noticed, worker)
    elif kind in ("leave", "restart"):
        worker.loop.add_callback(_ask_scheduler, worker, kind)
    rank.send(m.RankOrder(due.job, due.start, m.FaultDone(due.fault.number)))


async def _ask_scheduler(worker: Worker, kind: str) -> None:
    addresses = [worker.address]
    with contextlib.suppress(OSError):  # the worker has lost its scheduler over it
        if kind == "leave":
            await worker.scheduler.retire_workers(workers=addresses)
        else:
            await worker.scheduler.restart_workers(
                workers=addresses,
                wait_for_workers=False,
                on_error="return",
                stimulus_id=f"nbelastic-chaos-{time.time()}",
            )


def _end_as_noticed(worker: Worker) -> None:
    """Kill this process, as its machine would, if its worker is still active."""
    if worker.status in (Status.running, Status.paused):
        os.kill(os.getpid(), signal.SIGKILL)
