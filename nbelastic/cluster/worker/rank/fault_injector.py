"""Inject faults into a rank, on orders of ``nbelastic.chaos``.

Orders come in the thread that reads. Faults that belong to a step are injected by the rank's
thread, after each batch (:meth:`FaultInjector.step`). Faults of the process or of its worker are
the worker's to inject (:mod:`nbelastic.cluster.worker.hosted_rank`); the rank says when one is
due. The kernel is told of each first, so that it knows even of a process that ends a moment later.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nbelastic.messages import FaultDue, FaultOrder, FaultReport, Message

if TYPE_CHECKING:
    from nbelastic.elastic.ranks.session import Session

IN_STEP = frozenset({"fail", "hang", "slow", "memory"})
"""Kinds that happen in user code: the rank's thread does them, after its next batch."""

SETTLING = 0.5
"""Seconds after a change of membership for which nothing is due: word of what was done travels."""

LONGEST_HOLD = 5.0
"""Seconds that a rank's thread stands still, at most, for the worker to do what it has to."""


class InjectedFault(RuntimeError):
    """What ``chaos.fail`` raises on a rank."""


class FaultInjector:
    """Injects the faults of one rank; `send` sends a message to its worker."""

    def __init__(self, job: str, session: Session, send: Callable[[Message], None]) -> None:
        self._job = job
        self._session = session
        self._send = send
        self._lock = threading.Lock()
        self._armed: list[FaultOrder] = []
        self._done: dict[int, threading.Event] = {}
        self._slow: tuple[int, float] = (0, 0.0)
        self._moved = -math.inf

    def _tell(self, what: str, **fields: Any) -> None:
        self._send(FaultReport(self._job, self._session.spec.start, what, **fields))

    # -- by the thread that reads orders -----------------------------------------------------------

    def take(self, faults: Sequence[FaultOrder], drop: Sequence[int]) -> None:
        """Arm `faults`, or inject immediate faults now; disarm the faults numbered `drop`."""
        later = [fault for fault in faults if fault.timed or fault.kind in IN_STEP]
        with self._lock:
            self._armed = [each for each in self._armed if each.number not in {*drop}] + later
        for number in drop:
            self.done(number)
        for fault in faults:
            if fault not in later:
                self._inflict(fault)

    def plan(self) -> None:
        """Do what waits for a generation to form: a plan has come for the rank."""
        if self._session.generation > 0:
            self._moved = time.monotonic()
        for fault in self._due(forming=True):
            self._inflict(fault)

    def done(self, number: int) -> None:
        """Note that the worker has injected a fault, or could not."""
        if number in self._done:
            self._done[number].set()

    # -- by the rank's thread ----------------------------------------------------------------------

    def step(self) -> None:
        """Do what is due after a batch."""
        for fault in self._due(forming=False):
            if fault.kind in IN_STEP:
                self._tell("done", number=fault.number, rank=self._session.rank)
                self._in_step(fault)
            else:
                done = self._done[fault.number] = threading.Event()
                self._inflict(fault)
                done.wait(LONGEST_HOLD)  # in this very step, until the worker has done it
        left, seconds = self._slow
        if left > 0:
            self._slow = (left - 1, seconds)
            time.sleep(seconds)  # the fault itself

    def _due(self, *, forming: bool) -> list[FaultOrder]:
        session = self._session
        if not forming and time.monotonic() < self._moved + SETTLING:
            return []  # it may have been the fault of another rank, that had this number
        with self._lock:
            due = [
                fault
                for fault in self._armed
                if fault.forming == forming
                and fault.rank in (None, session.rank)
                and session.telemetry.steps >= (fault.step or 0)
                and session.generation >= (fault.generation or 0)
            ]
            self._armed = [fault for fault in self._armed if fault not in due]
        return due

    def redone(self, steps: int, samples: int) -> None:
        """Report batches that are repeated, because a reset has rolled them back."""
        if steps:
            generation = self._session.generation
            self._tell("redone", generation=generation, steps=steps, samples=samples)

    def _in_step(self, fault: FaultOrder) -> None:
        kind, rank = fault.kind, self._session.rank
        # In letters, because errors that differ only in digits count as equal.
        name = "".join(chr(ord("a") + int(digit)) for digit in str(fault.number))
        if kind == "fail":
            raise InjectedFault(f"rank {rank} was told to fail (fault {name})")
        if kind == "memory":
            try:
                _run_out_of_memory()
            except MemoryError:
                raise MemoryError(f"rank {rank} has none left (fault {name})") from None
        if kind == "slow":
            self._slow = (fault.steps, fault.seconds)
        while kind == "hang":
            time.sleep(0.1)  # the fault itself; short, so that an order to end can interrupt it

    # -- by either ---------------------------------------------------------------------------------

    def _inflict(self, fault: FaultOrder) -> None:
        number, rank = fault.number, self._session.rank
        if fault.kind not in ("partition", "disk"):
            self._send(FaultDue(self._job, self._session.spec.start, fault, rank))
            return
        communicator = self._session._communicator  # its own thread may replace it at any time
        cuts = fault.kind == "partition"
        if cuts and (communicator is None or not communicator.cut_connections()):
            detail = "it has no connections that could be cut"
            self._tell("refused", number=number, rank=rank, detail=detail)
        else:
            self._tell("done", number=number, rank=rank)
            if fault.kind == "disk":
                _fill_disk(fault.seconds)
        self.done(number)


def _fill_disk(seconds: float) -> None:
    """Limit the size of files of this process for a while, so that none can grow."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if before[0] != 0:  # else it is full already
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        timer = threading.Timer(seconds, resource.setrlimit, (resource.RLIMIT_FSIZE, before))
        timer.daemon = True
        timer.start()


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
