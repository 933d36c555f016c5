"""Inject faults into a worker or its rank, on orders of ``nbelastic.chaos``.

Runs in a worker. Orders come in its event loop. Faults that belong to a step are injected by the
rank's thread, after each batch (:meth:`FaultInjector.step`), all others by the event loop. The
kernel is told of each first, so that it knows even of a process that ends a moment later.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

from distributed.core import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from distributed import Worker

    from nbelastic.cluster.wire import FaultOrder
    from nbelastic.elastic.session import Session

__all__ = ["FaultInjector", "InjectedFault"]

IN_STEP = frozenset({"fail", "hang", "slow", "memory"})
"""Kinds that happen in user code: the rank's thread does them, after its next batch."""

SETTLING = 0.5
"""Seconds after a change of membership for which nothing is due: word of what was done travels."""

LONGEST_HOLD = 5.0
"""Seconds that a rank's thread stands still, at most, for the event loop to stop its process."""


class InjectedFault(RuntimeError):
    """What ``chaos.fail`` raises on a rank."""


class FaultInjector:
    """Injects the faults of one rank; there is none without orders.

    Parameters
    ----------
    worker : Worker
        The rank's worker.
    session : Session
        The rank.
    tell : callable
        ``tell(what, **fields)`` sends a report to the kernel; for the event loop only.
    give_notice : callable
        ``give_notice(seconds)`` says that the worker will go; for the event loop only.
    """

    def __init__(
        self,
        worker: Worker,
        session: Session,
        tell: Callable[..., None],
        give_notice: Callable[[float], None],
    ) -> None:
        self._worker = worker
        self._session = session
        self._tell = tell
        self._give_notice = give_notice
        self._lock = threading.Lock()
        self._armed: list[FaultOrder] = []
        self._slow: tuple[int, float] = (0, 0.0)
        self._version, self._generation = session.version, session.generation
        self._since = (0, 0)
        self._moved = -math.inf
        self._samples = session.telemetry.samples

    def take(self, faults: Iterable[FaultOrder] = (), drop: Iterable[int] = ()) -> None:
        """Arm `faults`, or do them now if they wait for nothing; disarm those numbered `drop`."""
        dropped = set(drop)
        with self._lock:
            self._armed = [fault for fault in self._armed if fault.number not in dropped]
            for fault in faults:
                if fault.timed or fault.kind in IN_STEP:
                    self._armed.append(fault)
                else:
                    self._worker.loop.add_callback(self._inflict, fault)

    def plan(self) -> None:
        """Do what waits for a generation to form: a plan has come for the rank."""
        if self._session.generation > 0:
            self._moved = time.monotonic()
        for fault in self._due(forming=True):
            self._worker.loop.add_callback(self._inflict, fault)

    def step(self, recorded: bool) -> None:
        """Do what is due after a batch (or a commit or check: then `recorded` is False)."""
        self._count_redone(recorded)
        for fault in self._due(forming=False):
            if fault.kind in IN_STEP:
                self._worker.loop.add_callback(
                    self._tell, "done", number=fault.number, rank=self._session.rank
                )
                self._in_step(fault)
            else:
                self._hold(fault)
        left, seconds = self._slow
        if left > 0:
            self._slow = (left - 1, seconds)
            time.sleep(seconds)  # the fault itself

    def _due(self, *, forming: bool) -> list[FaultOrder]:
        with self._lock:
            due = [fault for fault in self._armed if self._is_due(fault, forming)]
            self._armed = [fault for fault in self._armed if fault not in due]
        return due

    def _is_due(self, fault: FaultOrder, forming: bool) -> bool:
        session = self._session
        if not forming and time.monotonic() < self._moved + SETTLING:
            return False  # it may have been the fault of another rank, that had this number
        return (
            fault.forming == forming
            and fault.rank in (None, session.rank)
            and session.telemetry.steps >= (fault.step or 0)
            and session.generation >= (fault.generation or 0)
        )

    def _count_redone(self, recorded: bool) -> None:
        """Count batches that were recorded in an earlier generation and never committed."""
        session = self._session
        if session.version != self._version:
            self._since = (0, 0)
            fresh = int(recorded)  # a commit without a sampler is counted after it was made
        else:
            fresh = 1
            if session.generation != self._generation and self._since[0]:
                steps, samples = self._since
                self._worker.loop.add_callback(
                    self._tell,
                    "redone",
                    generation=session.generation,
                    steps=steps,
                    samples=samples,
                )
                self._since = (0, 0)
        self._version, self._generation = session.version, session.generation
        samples = session.telemetry.samples - self._samples
        self._samples = session.telemetry.samples
        self._since = (self._since[0] + fresh, self._since[1] + samples)

    # -- by the rank's thread ----------------------------------------------------------------------

    def _in_step(self, fault: FaultOrder) -> None:
        kind, name = fault.kind, _name(fault.number)
        if kind == "fail":
            raise InjectedFault(f"rank {self._session.rank} was told to fail (fault {name})")
        if kind == "memory":
            try:
                _run_out_of_memory()
            except MemoryError:
                raise MemoryError(
                    f"rank {self._session.rank} has none left (fault {name})"
                ) from None
        if kind == "slow":
            self._slow = (fault.steps, fault.seconds)
        while kind == "hang":
            time.sleep(0.1)  # the fault itself; short, so that an order to end can interrupt it

    def _hold(self, fault: FaultOrder) -> None:
        """Stand still, in this very step, until the event loop has done it."""
        done = threading.Event()
        self._worker.loop.add_callback(self._inflict, fault, done)
        done.wait(LONGEST_HOLD)

    # -- in the event loop -------------------------------------------------------------------------

    async def _inflict(self, fault: FaultOrder, done: threading.Event | None = None) -> None:
        number, rank = fault.number, self._session.rank
        if fault.kind == "partition" and not self._cut():
            detail = "it has no connections that could be cut"
            self._tell("refused", number=number, rank=rank, detail=detail)
        else:
            self._tell("done", number=number, rank=rank)
            await self._sent()
            await self._do(fault)
        if done is not None:
            done.set()

    async def _sent(self) -> None:
        """Wait, not for long, until the report is on its way."""
        for _ in range(50):
            await asyncio.sleep(0.001)
            if not self._worker.batched_stream.buffer:
                break
        await asyncio.sleep(0.001)

    async def _do(self, fault: FaultOrder) -> None:
        kind, seconds, worker = fault.kind, fault.seconds, self._worker
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            if seconds:
                _continue_after(seconds)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "close":
            worker.loop.add_callback(worker.close, nanny=False, reason="nbelastic.chaos")
        elif kind == "notice":
            self._give_notice(seconds)
            worker.loop.call_later(seconds, self._end_as_noticed)
        elif kind == "disk":
            self._fill_disk(seconds)
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
        """Kill the process, as its machine would, if it is still there as a worker."""
        if self._worker.status in (Status.running, Status.paused):
            os.kill(os.getpid(), signal.SIGKILL)

    def _cut(self) -> int:
        communicator = self._session._communicator  # its own thread may replace it at any time
        return 0 if communicator is None else communicator.cut_connections()

    def _fill_disk(self, seconds: float) -> None:
        """Let no file of this process grow for a while."""
        import resource

        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if before[0] != 0:  # else it is full already
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
            self._worker.loop.call_later(seconds, resource.setrlimit, resource.RLIMIT_FSIZE, before)


def _name(number: int) -> str:
    """Return a number in letters, because errors that differ in numbers only count as one error."""
    letters = ""
    while number > 0:
        number, last = divmod(number - 1, 26)
        letters = chr(ord("a") + last) + letters
    return letters


def _continue_after(seconds: float) -> None:
    """Have this process continued; by another, as a stopped one cannot do that itself."""
    subprocess.run(
        ["/bin/sh", "-c", f"(sleep {seconds:g}; kill -CONT {os.getpid()}) >/dev/null 2>&1 &"],
        stdin=subprocess.DEVNULL,
        check=True,
    )


def _run_out_of_memory() -> None:
    """Ask for memory that the process is not allowed to have."""
    import resource

    before: Any = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used, before[1]))
    try:
        bytearray(1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
